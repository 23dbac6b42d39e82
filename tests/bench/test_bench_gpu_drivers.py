"""What `bench gpu` measures with: random weights, bare steps, many streams, transformers, clocks."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kakeya.bench.benchmark import Run
from kakeya.bench.gpu import checks, device, rig as rigs, steps, transformers_peer
from kakeya.bench.gpu.benchmark import Device, GpuBench
from kakeya.bench.gpu.plan import QUICK
from kakeya.bench.gpu.results import Part, PlannedMemory, UsedMemory
from kakeya.bench.gpu.rig import MemoryMeter, Rig, RigKey, Workshop
from kakeya.bench.gpu.runtime import Tally, generate_all, generated, sessions
from kakeya.bench.gpu.shapes import TINY_LLAMA, TINY_QWEN3, RandomCheckpoint
from kakeya.errors import CorruptCheckpoint, PeerFailed, StepFailed, Unavailable
from kakeya.text import Tokenizer
from kakeya.types import FailedEvent, Numerics

MIB = 2**20
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
TINY = RigKey(TINY_LLAMA.name, 4)


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Workshop(CPU, QUICK) as shop:
        yield shop.rig(TINY)


def test_random_weights_are_the_same_each_time() -> None:
    checkpoint = RandomCheckpoint(TINY_QWEN3, CPU)
    name = "model.layers.1.self_attn.q_proj.weight"
    first, again = checkpoint.tensor(name), checkpoint.tensor(name)
    assert first.dtype == torch.bfloat16
    assert torch.equal(first, again)
    assert not torch.equal(first, checkpoint.tensor(name.replace("1", "0")))
    assert not torch.equal(first, RandomCheckpoint(TINY_QWEN3, CPU, seed=1).tensor(name))
    assert 0.015 < float(first.float().std()) < 0.025
    assert checkpoint.tensor("model.layers.0.self_attn.k_norm.weight").eq(1).all()
    assert checkpoint.fingerprint != RandomCheckpoint(TINY_LLAMA, CPU).fingerprint
    assert checkpoint.path == Path("tiny-qwen3")


def test_a_shape_has_only_its_own_tensors() -> None:
    for name in ("lm_head.weight", "model.layers.0.self_attn.q_norm.weight", "other"):
        with pytest.raises(CorruptCheckpoint, match="has no tensor"):
            RandomCheckpoint(TINY_LLAMA, CPU).tensor(name)


def test_the_tokenizer_is_one() -> None:
    tokenizer = Tokenizer(RandomCheckpoint(TINY_LLAMA, CPU).tokenizer_files())
    assert tokenizer.decode(tokenizer.encode("abba")) == "abba"


def test_bare_steps_choose_what_a_launch_chooses_and_give_their_slabs_back(rig: Rig) -> None:
    backend = rig.backend
    free = backend.pool.free_count
    with steps.bare_steps(backend, 2) as bare:
        assert backend.pool.free_count == free - 2
        assert all(slab.any() for slab in backend.pool.storage[:2])
        replay = bare.decode(2, position=100)
        replay()
        chosen = backend._space.chosen[:2].tolist()
        replay()
        assert backend._space.chosen[:2].tolist() == chosen, "the same step again"
        assert all(0 <= token < backend.vocab_size for token in chosen)
    assert backend.pool.free_count == free


def test_a_step_without_a_graph_is_not_measured() -> None:
    with Workshop(CPU, QUICK) as shop:
        [exact] = shop.rigs([replace(TINY, numerics=Numerics.EXACT)])
        with steps.bare_steps(exact.backend, 1) as bare, pytest.raises(AssertionError, match="no graph"):
            bare.prompt(8, 100)


def test_only_what_is_needed_stays_open() -> None:
    other = RigKey(TINY_QWEN3.name, 2)
    with Workshop(CPU, QUICK) as shop:
        [first] = shop.rigs([TINY])
        assert shop.rigs([other, TINY])[1] is first
        [second] = shop.rigs([other])
        with pytest.raises(Unavailable, match="shut down"):
            first.runtime.create_session()
        second.runtime.create_session()
    with pytest.raises(Unavailable, match="shut down"):
        second.runtime.create_session()


def test_speed_counts_while_all_generate() -> None:
    tally = Tally([0, 0], started_at=0.0)
    for now, counts, ended in ((1.0, [3, 0], 0), (2.0, [5, 1], 0), (3.0, [9, 5], 0), (4.0, [10, 9], 1)):
        tally.counts = counts
        tally.note(now, ended)
    assert tally.speed == 8.0
    assert tally.tokens == 19
    assert tally.seconds == 4.0


def test_streams_that_were_never_all_there_have_no_speed() -> None:
    tally = Tally([0, 0])
    tally.counts = [2, 2]
    tally.note(1.0, 2)
    assert tally.speed is None
    tally.note(2.0, 0)
    assert tally.speed is None
    tally.note(3.0, 0)
    assert tally.speed is None, "no token in that time"


def test_all_sessions_generate_their_own(rig: Rig) -> None:
    histories = [rig.shape.random_tokens(30, seed) for seed in (1, 2, 1)]
    with sessions(rig.runtime, histories) as session_ids:
        tokens = [[event.token_id for event in events] for events in generated(rig.runtime, session_ids, 6)]
        assert generate_all(rig.runtime, session_ids, 5).counts == [5, 5, 5]
        assert rig.runtime.info(session_ids[0]).history_length == 30 + 6 + 5
    assert tokens[0] == tokens[2]
    assert [len(each) for each in tokens] == [6, 6, 6]
    assert rig.runtime.free_slabs == TINY.sessions


def test_a_stream_that_fails_ends_the_measurement(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = SimpleNamespace(poll_all=lambda: [FailedEvent(StepFailed("not finite"))])
    monkeypatch.setattr(rig.runtime, "generate", lambda *_: failed)
    with pytest.raises(StepFailed, match="not finite"):
        generate_all(rig.runtime, ["any"], 1)


def test_a_difference_is_found_where_it_begins() -> None:
    row = checks.parity("model", 9, [1, 2, 3, 4], [1, 2, 0, 4])
    assert (row.equal_tokens, row.tokens, row.identical) == (2, 4, False)


class FakeModel:
    """Answers like the library's, and as quickly as nothing; some requests only in part."""

    def __init__(self, short: int = 0, error: str | None = None) -> None:
        self.short, self.error = short, error
        self.asked: list[dict[str, Any]] = []

    def generate_batch(self, **asked: Any) -> dict[str, Any]:
        self.asked.append(asked)
        made = [0] * (asked["generation_config"].max_new_tokens - self.short)
        answer = SimpleNamespace(generated_tokens=made, error=self.error)
        return {str(n): answer for n in range(len(asked["inputs"]))}


def with_model(model: FakeModel) -> transformers_peer.Transformers:
    peer = transformers_peer.Transformers(TINY_LLAMA, CPU)
    peer._model = model
    return peer


def test_batches_of_transformers_are_counted_and_no_manager_is_kept() -> None:
    model = FakeModel()
    assert with_model(model).generate_batch([[1, 2], (3, 4)], 10) > 0
    [asked] = model.asked
    assert asked["inputs"] == [[1, 2], [3, 4]]
    assert set(asked) == {"inputs", "generation_config"}


def test_half_the_work_is_not_counted_as_speed() -> None:
    with pytest.raises(PeerFailed, match=r"made 10 of 20 tokens$"):
        with_model(FakeModel(5)).generate_batch([[1], [2]], 10)
    with pytest.raises(PeerFailed, match="made 18 of 20 tokens: out of blocks"):
        with_model(FakeModel(1, "out of blocks")).generate_batch([[1], [2]], 10)


def test_transformers_gets_the_attention_that_is_named() -> None:
    peers = [transformers_peer.Transformers(TINY_LLAMA, CPU, attention) for attention in ("default", "eager")]
    assert [peer._model.config._attn_implementation for peer in peers] == ["sdpa", "eager"]


class FakeEvent:
    """A CUDA event on a clock that each one moves by two milliseconds."""

    clock = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0.0

    def record(self) -> None:
        FakeEvent.clock += 2.0
        self.at = FakeEvent.clock

    def elapsed_time(self, other: "FakeEvent") -> float:
        return other.at - self.at


def test_a_device_is_timed_by_its_own_events(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[object] = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    calls: list[int] = []
    seconds = device.timed(torch.device("cuda"), lambda: calls.append(1), 4)
    assert seconds == pytest.approx([0.002] * 4)
    assert len(calls) == 3 + 4
    assert len(waited) == 1, "the queue is not held up between repetitions"


def test_a_device_says_what_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    properties = SimpleNamespace(name="H200", total_memory=141)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 99)
    facts = device.device_facts(CUDA)
    assert (facts.name, facts.memory_bytes) == ("H200", 141)
    device.reset_peak(CUDA)
    assert device.peak_bytes(CUDA) == [99]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device.chosen_device("cuda") == CUDA
    version = tmp_path / "version"
    assert device.driver_version(version) is None
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build")
    assert device.driver_version(version) == "580.95.05"


def test_a_meter_counts_what_is_gone_without_the_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([10_000, 8_500, 8_100, 8_300])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 20_000))
    planned = PlannedMemory(400, 300, 200, 100)
    meter = MemoryMeter(CUDA, planned, pool_bytes=1000, used=UsedMemory(7))
    meter.note_opened()
    meter.note_stepped()
    meter.note_stepped()
    assert meter.used == UsedMemory(7, 500, 900)
    assert planned.total == 1000


def test_a_device_that_does_not_tell_leaves_the_plan_alone() -> None:
    bench = GpuBench(part=[Part.EXACT], quick=True, device=Device.CPU)
    results = bench.run(Run())
    assert [(row.shape, row.sessions, row.numerics) for row in results.memory] == [
        (QUICK.large, 4, "fast"),
        (QUICK.large, 4, "exact"),
    ]
    assert all(row.planned.total > row.planned.weights > 0 for row in results.memory)
    assert [row.used for row in results.memory] == [UsedMemory()] * 2
    assert [gate.passed for gate in bench.gates(results) if gate.name == "memory_within_plan"] == [None]


def test_each_rig_is_metered_while_it_is_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = [0]
    one, other = TINY, RigKey(TINY_QWEN3.name, 2)
    opened = Workshop._opened

    def opening(shop: Workshop, *args: Any) -> Rig:
        gone[0] += 10 * MIB
        return opened(shop, *args)

    monkeypatch.setattr(rigs, "free_bytes", lambda device: 10**9 - gone[0])
    monkeypatch.setattr(Workshop, "_opened", opening)
    with Workshop(CPU, QUICK) as shop:
        gone[0] = MIB  # libraries, by what was done before
        shop.rigs([one])
        gone[0] += 2 * MIB
        shop.note_memory()
        shop.rigs([one, other])
        gone[0] += 3 * MIB
        shop.note_memory()
        first, second = shop.memory()
        assert first.pool == shop.rig(one).backend.pool.storage.nbytes
    assert first.used == UsedMemory(MIB, 10 * MIB - first.pool, 12 * MIB - first.pool)
    assert second.used == UsedMemory(None, 10 * MIB - second.pool, 13 * MIB - second.pool)
    assert first.pool == second.pool > 0, "four slabs of one head, two slabs of two"
