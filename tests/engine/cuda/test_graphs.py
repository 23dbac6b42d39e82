"""The bookkeeping of graphs and moments, with a device that only remembers what it was told."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

from kakeya.engine.batch import Segment
from kakeya.engine.cuda.graphs import StepGraphs
from kakeya.engine.cuda.shapes import StepBuckets, StepShape
from kakeya.engine.device import DeviceEvent, on_side_stream
from kakeya.engine.sampler import SampleRequest
from kakeya.engine.sequence import TokenSequence
from kakeya.types import Numerics, SamplingParams
from support import tiny
from support.tiny import make_device_backend

SHAPES = (StepShape(1), StepShape(64, 128, 64, 192), StepShape(8))


class Recorder:
    """Stands for torch.cuda while graphs are captured and replayed."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.ran: list[StepShape] = []

    def run(self, shape: StepShape) -> None:
        self.ran.append(shape)
        self.told.append(f"run {shape.rows}")

    def graph_type(self) -> type:
        recorder = self

        class Graph:
            def replay(self) -> None:
                recorder.told.append("replay")

        return Graph

    @contextmanager
    def capturing(self, graph: object, **how: object) -> Iterator[None]:
        assert how["pool"] == (7, 7)
        assert how["capture_error_mode"] == "thread_local"
        self.told.append("begin")
        yield
        self.told.append("end")


class Stream:
    """Waits for nobody."""

    def __init__(self, device: object = None) -> None:
        self.waits_for: list[object] = []

    def wait_stream(self, other: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        self.waits_for.append(event)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    fakes = {
        "Stream": Stream,
        "current_stream": Stream,
        "stream": lambda stream: nullcontext(),
        "graph_pool_handle": lambda: (7, 7),
        "CUDAGraph": recorder.graph_type(),
        "graph": recorder.capturing,
        "synchronize": lambda: recorder.told.append("wait"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return recorder


def test_the_largest_is_captured_first_and_run_once_before(recorder: Recorder) -> None:
    graphs = StepGraphs(recorder.run)
    graphs.capture(SHAPES)
    one = ["run {0}", "begin", "run {0}", "end"]
    assert recorder.told == [line.format(rows) for rows in (192, 8, 1) for line in one] + ["wait"]
    assert all(shape in graphs for shape in SHAPES)
    assert StepShape(2) not in graphs


def test_what_is_captured_is_replayed_and_the_rest_is_run(recorder: Recorder) -> None:
    graphs = StepGraphs(recorder.run)
    graphs.capture(SHAPES)
    recorder.told.clear()
    for shape in (StepShape(8), StepShape(2), StepShape(64, 128, 64, 192)):
        graphs.run(shape)
    assert recorder.told == ["replay", "run 2", "replay"]


def test_a_backend_captures_all_its_buckets(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[StepShape] = []
    monkeypatch.setattr(StepGraphs, "capture", lambda self, shapes: captured.extend(shapes))
    config = tiny.engine_config()
    backend = make_device_backend(tiny_llama, config)
    assert captured == []  # not on a CPU
    backend._capture()
    assert tuple(captured) == StepBuckets(config).captured
    # And each of them can be run over tables that belong to nobody.
    with torch.inference_mode():
        for shape in captured:
            backend._run_captured(shape)
    assert not backend.pool.storage.any()


def test_a_prepared_step_samples_what_a_launch_samples_at_every_replay(tiny_llama: Path) -> None:
    backend = make_device_backend(tiny_llama, tiny.engine_config())
    slabs = [backend.pool.allocate() for _ in range(3)]
    for slab in slabs:
        slab.storage.normal_()
    rows = enumerate(slabs, start=5)
    segments = [Segment(TokenSequence(slab, "any", (), None), 30, [token], 0, 1) for token, slab in rows]
    requests = [SampleRequest(SamplingParams(), segment.end) for segment in segments]
    with torch.inference_mode():
        backend.launch(segments, requests)
    launched = backend._space.sampled[:3].tolist()
    replay = backend.prepare(segments, requests)
    for _ in range(2):
        backend._space.sampled.fill_(-1)
        replay()
        assert backend._space.sampled[:3].tolist() == launched


def test_a_step_that_no_graph_holds_is_not_prepared(tiny_llama: Path) -> None:
    backend = make_device_backend(tiny_llama, tiny.engine_config(numerics=Numerics.EXACT))
    prompt = Segment(TokenSequence(backend.pool.allocate(), "any", (), None), 0, [1, 2, 3], 0, 1)
    with pytest.raises(AssertionError, match="no graph is captured"):
        backend.prepare([prompt], [SampleRequest(SamplingParams(), prompt.end)])


class Event:
    """Remembers what happened to it."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def record(self, stream: object) -> None:
        self.told.append(stream)

    def synchronize(self) -> None:
        self.told.append("waited")


def test_a_device_event_is_one_of_the_threads_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, entered = Stream(), []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda aside: entered.append(aside) or nullcontext())
    device = torch.device("cuda", 77)  # one that nobody has asked for a stream yet
    event = DeviceEvent(device).record()
    event.wait()
    event.block_stream()
    assert event._event.told == [stream, "waited"]
    assert stream.waits_for == [event._event]
    for _ in range(2):
        with on_side_stream(device):
            pass
    assert entered[0] is entered[1] is not stream
