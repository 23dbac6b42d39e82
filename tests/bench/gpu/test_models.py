"""What `bench gpu` measures with: random weights, bare steps, many streams, clocks and meters."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kakeya.bench.gpu import checks, device, models as opened, runtime as runtimes
from kakeya.bench.gpu.models import OpenModel, OpenModels, Setup
from kakeya.bench.gpu.plan import LARGE, QUICK, SMALL
from kakeya.bench.gpu.runtime import generate_all, generated, sessions, speed_between
from kakeya.bench.gpu.shapes import SHAPES, TINY_LLAMA, TINY_QWEN3, RandomCheckpoint
from kakeya.errors import CorruptCheckpoint, StepFailed, Unavailable
from kakeya.text import Tokenizer
from kakeya.types import DoneEvent, FailedEvent, Numerics, StopReason, TokenEvent

MIB = 2**20
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
TINY, OTHER = Setup(TINY_LLAMA.name, 4), Setup(TINY_QWEN3.name, 2)


@pytest.fixture(scope="module")
def model() -> Iterator[OpenModel]:
    with closing(OpenModels(CPU, QUICK)) as models:
        yield models.get(TINY)[0]


def test_sizes_are_those_of_the_named_models() -> None:
    large, small = SHAPES[LARGE], SHAPES[SMALL]
    assert large.layer_weights + 2 * large.head_weights == pytest.approx(8.19e9, rel=0.001)
    assert small.layer_weights + small.head_weights == pytest.approx(134.5e6, rel=0.001)
    assert large.prompt_flops(2048) == 2 * (2048 * large.layer_weights + large.head_weights)
    assert (large.model.qk_norm, small.model.qk_norm) == ("head", None)
    assert (set(large.model.layer_windows), large.model.eos_token_ids) == ({None}, ())


def test_random_weights_are_the_same_each_time_and_of_the_shape_alone() -> None:
    checkpoint, other = RandomCheckpoint(TINY_QWEN3, CPU), RandomCheckpoint(TINY_LLAMA, CPU)
    name = "model.layers.1.self_attn.q_proj.weight"
    first = checkpoint.tensor(name)
    assert first.dtype == torch.bfloat16
    assert torch.equal(first, checkpoint.tensor(name))
    assert not torch.equal(first, checkpoint.tensor(name.replace("1", "0")))
    assert not torch.equal(first, RandomCheckpoint(TINY_QWEN3, CPU, seed=1).tensor(name))
    assert 0.015 < float(first.float().std()) < 0.025
    assert checkpoint.tensor("model.layers.0.self_attn.k_norm.weight").eq(1).all()
    assert (checkpoint.path, other.fingerprint) == (Path("tiny-qwen3"), "random/tiny-llama/0")
    for name in ("lm_head.weight", "model.layers.0.self_attn.q_norm.weight", "other"):
        with pytest.raises(CorruptCheckpoint, match="has no tensor"):
            other.tensor(name)
    tokenizer = Tokenizer(other.tokenizer_files())
    assert tokenizer.decode(tokenizer.encode("abba")) == "abba"


def test_bare_steps_sample_the_same_tokens_again_and_give_their_slabs_back(model: OpenModel) -> None:
    backend = model.backend
    free = backend.pool.free_count
    with model.bare_steps(2) as prepare:
        assert backend.pool.free_count == free - 2
        assert all(slab.any() for slab in backend.pool.storage[:2])
        replay = prepare(100)
        replay()
        sampled = backend._space.sampled[:2].tolist()
        replay()
        assert backend._space.sampled[:2].tolist() == sampled
        assert all(0 <= token < backend.vocab_size for token in sampled)
    assert backend.pool.free_count == free


def test_steps_take_turns_and_none_is_always_first() -> None:
    order: list[str] = []
    prepares = [lambda name=name: lambda: order.append(name) for name in "ab"]
    taken = opened.seconds_in_turns(CPU, prepares, 3)
    assert [len(each) for each in taken] == [3, 3]
    assert "".join(order[:: len(order) // 6]) == "baabba"


def test_a_step_without_a_graph_is_not_measured_and_only_what_is_needed_stays_open() -> None:
    with closing(OpenModels(CPU, QUICK)) as models:
        [exact] = models.get(replace(TINY, numerics=Numerics.EXACT))
        with exact.bare_steps(1, tokens=8) as prepare, pytest.raises(AssertionError, match="no graph"):
            prepare(100)
        [first] = models.get(TINY)
        second = models.get(OTHER, TINY)[0]
        assert models.get(OTHER, TINY) == [second, first]
        models.get(OTHER)
        second.runtime.create_session()
        for closed in (exact, first):
            with pytest.raises(Unavailable, match="shut down"):
                closed.runtime.create_session()
    with pytest.raises(Unavailable, match="shut down"):
        second.runtime.create_session()


def test_each_model_is_metered_while_it_is_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = [0]
    load = OpenModels._load

    def loading(models: OpenModels, *args: Any) -> OpenModel:
        gone[0] += 10 * MIB
        return load(models, *args)

    monkeypatch.setattr(opened, "free_bytes", lambda device: 10**9 - gone[0])
    monkeypatch.setattr(OpenModels, "_load", loading)
    with closing(OpenModels(CPU, QUICK)) as models:
        gone[0] = MIB  # libraries, by what was done before
        models.get(TINY)
        gone[0] += 2 * MIB
        models.note_steps()
        gone[0] -= MIB
        models.note_steps()  # the most counts
        gone[0] += MIB
        models.get(TINY, OTHER)
        gone[0] += 3 * MIB
        models.note_steps()
        first, second = models.memory.values()
        assert first.pool == models.get(TINY)[0].backend.pool.storage.nbytes
    pool = first.pool
    assert first.used == {"earlier": MIB, "opened": 10 * MIB - pool, "stepped": 12 * MIB - pool}
    assert second.used == {"earlier": None, "opened": 10 * MIB - pool, "stepped": 13 * MIB - pool}
    assert pool == second.pool > 0, "four slabs of one head, two slabs of two"


def test_all_sessions_generate_their_own_and_speed_counts_while_all_do(
    model: OpenModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    histories = [model.shape.random_tokens(30, seed) for seed in (1, 2, 1)]
    with sessions(model.runtime, histories) as session_ids:
        events = generated(model.runtime, session_ids, 6)
        tally = generate_all(model.runtime, session_ids, 5)
        assert (tally.counts, tally.whole_speed) == ([5, 5, 5], 15 / tally.seconds)
        assert model.runtime.info(session_ids[0]).history_length == 30 + 6 + 5
    tokens = [[event.token_id for event in each] for each in events]
    assert tokens[0] == tokens[2]
    assert [len(each) for each in tokens] == [6, 6, 6]
    assert model.runtime.free_slabs == TINY.sessions
    assert speed_between([(2.0, 6), (2.5, 11), (3.0, 14)]) == 8.0
    assert [speed_between(reads) for reads in ([], [(1.0, 4)], [(1.0, 4), (2.0, 4)])] == [None] * 3
    failed = SimpleNamespace(poll_all=lambda: [FailedEvent(StepFailed("not finite"))])
    monkeypatch.setattr(model.runtime, "generate", lambda *_: failed)
    with pytest.raises(StepFailed, match="not finite"):
        generate_all(model.runtime, ["any"], 1)


def test_only_reads_of_all_streams_count_as_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two streams of which one begins and ends later than the other."""
    token, done = TokenEvent(0), DoneEvent(StopReason.MAX_TOKENS, 9, 0.0, 0.0, 0)
    polled = {"a": [[token], [token], [token] * 3, [done]], "b": [[], [token], [token] * 4, [token], [done]]}
    runtime: Any = SimpleNamespace(
        generate=lambda session_id, *_: SimpleNamespace(poll_all=lambda: polled[session_id].pop(0))
    )
    clock = count(start=0.0)
    monkeypatch.setattr(runtimes.time, "perf_counter", lambda: next(clock))
    tally = generate_all(runtime, ["a", "b"], 9)
    assert (tally.counts, tally.seconds, tally.speed) == ([5, 6], 5.0, 7.0)


def test_a_difference_is_found_where_it_begins() -> None:
    row = checks.parity("model", 9, [1, 2, 3, 4], [1, 2, 0, 4])
    assert (row.equal_tokens, row.tokens, row.identical) == (2, 4, False)


def test_a_device_is_timed_by_its_own_events(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        """On a clock that each one moves by two milliseconds."""

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = next(clock)

        def elapsed_time(self, other: "Event") -> float:
            return other.at - self.at

    clock, waited, calls = count(step=2.0), list[object](), list[int]()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    assert device.timed(CUDA, lambda: calls.append(1), 4) == pytest.approx([0.002] * 4)
    assert (len(calls), len(waited)) == (3 + 4, 1), "the queue is not held up between repetitions"


def test_a_device_says_what_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    properties = SimpleNamespace(name="H200", total_memory=141)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (99, 141))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    facts = device.device_facts(CUDA)
    assert (facts.name, facts.memory_bytes, device.free_bytes(CUDA)) == ("H200", 141, 99)
    assert device.open_device("cuda") == CUDA
    version = tmp_path / "version"
    assert device.driver_version(version) is None
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build")
    assert device.driver_version(version) == "580.95.05"
