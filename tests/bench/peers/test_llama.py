"""llama.cpp beside us: the stand-in, the library itself, and the pipe between the processes."""

import importlib.util
import io
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kakeya.bench import processes
from kakeya.bench.cases import LEAD_IN, Case, Side
from kakeya.bench.peers import llama as llama_peer
from kakeya.bench.peers.llama import (
    LlamaPeer,
    LlamaProcess,
    Worker,
    require_llama,
    surprises_of,
    tokens_per_sequence,
)
from kakeya.bench.processes import answer_lines
from kakeya.errors import ConfigError, PeerFailed
from support.fakes import FakeLlama

TEXT = [5, 6, 7, 8, 9]
PROMPT, ALONE, TOGETHER = Case(7), Case(0, 1, 4, 3), Case(0, 3, 6, 2)


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> FakeLlama:
    """The stand-in, found where the real module would be."""
    fake = FakeLlama()
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)  # type: ignore[arg-type]
    return fake


@pytest.fixture
def opened(llama: FakeLlama) -> LlamaPeer:
    return LlamaPeer("model.gguf", 3, TEXT)


@pytest.fixture(params=["fake", "real"])
def peer(request: pytest.FixtureRequest) -> Iterator[Side]:
    """The same promises, kept by the stand-in here and by llama.cpp itself in its own process."""
    if request.param == "fake":
        yield request.getfixturevalue("opened")
        return
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is not installed")
    # One thread: llama.cpp's threads wait for each other in a busy loop, which crawls on a busy machine.
    with LlamaProcess(str(request.getfixturevalue("default_model")), 1, TEXT) as process:
        assert process.peer.library.startswith("llama-cpp-python ")
        assert process.peer.system.startswith("CPU :")
        yield process


def test_cases_can_be_measured_again_and_again(peer: Side) -> None:
    cases = (PROMPT, ALONE, TOGETHER)
    for case in cases:
        peer.prepare(case)
    for _ in range(2):
        assert all(peer.measure(case) > 0 for case in cases)
    peer.release()
    peer.prepare(PROMPT)
    assert peer.measure(PROMPT) > 0


def test_what_a_measurement_feeds(llama: FakeLlama, opened: LlamaPeer) -> None:
    for case in (PROMPT, TOGETHER):
        opened.prepare(case)
    llama.calls.clear()
    opened.measure(PROMPT)
    (rows,) = llama.calls
    assert [token for token, *_ in rows] == [5, 6, 7, 8, 9, 5, 6]
    assert [wants for *_, wants in rows] == [False] * 6 + [True]
    llama.calls.clear()
    opened.measure(TOGETHER)
    assert len(llama.calls) == LEAD_IN + TOGETHER.steps
    assert llama.calls[0] == [(6, 6, sequence, True) for sequence in range(3)]
    opened.release()
    with pytest.raises(KeyError):
        opened.measure(PROMPT)


def test_contexts_fit_their_case_and_use_our_threads(llama: FakeLlama, opened: LlamaPeer) -> None:
    opened.prepare(Case(0, 3, 300, 2))
    params = llama.opened[0].params
    assert params.n_ctx == 3 * 512
    assert params.n_threads == params.n_threads_batch == 3
    assert params.kv_unified is params.offload_kqv is params.op_offload is False
    cells = {
        Case(256): 256,
        Case(257): 512,
        Case(0, 9, 253 - LEAD_IN, 3): 256,
        Case(0, 9, 254 - LEAD_IN, 3): 512,
    }
    assert {case: tokens_per_sequence(case) for case in cells} == cells


@pytest.mark.parametrize("slow_flash", [0, 1])
def test_the_quicker_attention_is_kept_and_tried_up_to_a_history(
    llama: FakeLlama, opened: LlamaPeer, slow_flash: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_peer, "LONGEST_TRIED_HISTORY", 8)
    llama.slow_flash = slow_flash
    assert opened.prepare(Case(0, 1, 8, 3)) is (slow_flash == 0)
    assert [context.params.flash_attn_type for context in llama.freed] == [slow_flash]
    assert opened.prepare(Case(0, 1, 9, 3)) is (slow_flash == 0), "the setting that won before"
    assert len(llama.opened) == 3


def test_a_long_prompt_goes_in_batches(
    llama: FakeLlama, opened: LlamaPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_peer, "BATCH", 4)
    opened.prepare(Case(0, 1, 10, 1))
    assert [len(rows) for rows in llama.calls[:3]] == [4, 4, 2]


def test_what_llama_refuses_is_said(llama: FakeLlama, opened: LlamaPeer) -> None:
    with pytest.raises(PeerFailed, match=r"broken\.gguf"):
        LlamaPeer("broken.gguf", 2, TEXT)
    with pytest.raises(PeerFailed, match="context"):
        opened.prepare(Case(0, 1, 2**21, 1))
    opened.prepare(ALONE)
    llama.opened[0].length[0] = 99
    with pytest.raises(PeerFailed, match="returned -1"):
        opened.measure(ALONE)


def test_passages_are_scored_in_contexts_of_their_own(
    llama: FakeLlama, opened: LlamaPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_peer, "SCORED_AT_ONCE", 2)
    expected, other = (math.log(math.e + llama.VOCABULARY - 1) - bonus for bonus in (1.0, 0.0))
    assert opened.surprises([3, 4, 5, 9, 10]) == pytest.approx([expected, expected, other, expected])
    assert opened.surprises([3, 5]) == pytest.approx([other])
    assert [[position for _, position, *_ in rows] for rows in llama.calls] == [[0, 1], [2, 3], [4], [0, 1]]
    assert all(wants for rows in llama.calls for *_, wants in rows)
    assert [context.params.flash_attn_type for context in llama.freed] == [0, 0]
    monkeypatch.setattr(llama, "llama_decode", lambda context, batch: -3)
    with pytest.raises(PeerFailed, match="returned -3"):
        opened.surprises([3, 4])
    assert len(llama.freed) == 3, "also a context that breaks"


def test_surprise_is_what_the_softmax_says() -> None:
    logits = np.array([[1.0, 2.0, 0.5], [900.0, 899.0, 0.0], [np.nan] * 3], dtype=np.float32)
    first, second = surprises_of(logits, [2, 1])
    assert math.exp(-first) == pytest.approx(math.exp(0.5) / (math.exp(1.0) + math.exp(2.0) + math.exp(0.5)))
    assert math.exp(-second) == pytest.approx(1 / (1 + math.e))
    assert surprises_of(logits, []) == []


def test_every_request_gets_one_reply(llama: FakeLlama) -> None:
    opening = {"do": "open", "threads": 2, "text": TEXT}
    requests: list[dict[str, Any]] = [
        {**opening, "path": "broken.gguf"},
        {**opening, "path": "model.gguf"},
        {"do": "prepare", "case": asdict(ALONE)},
        {"do": "measure", "case": asdict(ALONE)},
        {"do": "release"},
        {"do": "surprises", "token_ids": [3, 5, 6]},
    ]
    replies = io.StringIO()
    answer_lines(Worker().answer, io.StringIO("".join(json.dumps(each) + "\n" for each in requests)), replies)
    refused, facts, prepared, measured, released, scored = map(json.loads, replies.getvalue().splitlines())
    assert refused == {"error": "llama.cpp could not open broken.gguf"}
    assert facts == {"library": "llama-cpp-python 0.0", "system": "CPU : FAKE = 1"}
    assert (prepared, type(measured), released) == (True, float, None)
    assert scored[0] == pytest.approx(scored[1] + 1)
    assert len(scored) == 2
    assert len(llama.freed) == len(llama.opened) == 3


# A worker that answers like the real one, unless the case asks for trouble by its number of sessions.
WORKER = """
import json, sys, time
for line in sys.stdin:
    request = json.loads(line)
    sessions = request.get("case", {}).get("sessions")
    if sessions == 66: sys.exit("out of " + "memory")
    if sessions == 77: sys.exit(0)
    replies = {
        "open": {"library": request.get("path"), "system": str(request.get("threads"))},
        "prepare": True,
        "measure": {"error": "too hard"} if sessions == 55 else 12.5,
        "release": None,
        "surprises": [0.5] * (len(request.get("token_ids", [])) - 1),
    }
    if request["do"] == "measure": time.sleep(0.05)
    print(json.dumps(replies[request["do"]]), flush=True)
"""


def worker(script: str = WORKER) -> LlamaProcess:
    return LlamaProcess("model.gguf", 2, [1, 2], worker=("-c", script))


def test_a_peer_is_a_side_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with worker() as process:
        process.prepare(ALONE)
        assert process.measure(ALONE) == 12.5
        with pytest.raises(PeerFailed, match="too hard"):
            process.measure(Case(0, 55, 4, 3))
        assert process.measure(ALONE) == 12.5, "it lives on"
        assert process.surprises((7, 8, 9)) == [0.5, 0.5]
        process.release()
        peer = process.peer
        assert (peer.library, peer.system, peer.flash_attention) == ("model.gguf", "2", {ALONE.label(): True})
        assert (peer.resident_bytes or 0) > 2**20
        assert peer.our_cpu_share < 0.5
        cpu, wall = iter([10.0, 10.6]), iter([20.0, 21.0])
        clocks = SimpleNamespace(process_time=lambda: next(cpu), perf_counter=lambda: next(wall))
        monkeypatch.setattr(llama_peer, "time", clocks)
        process.measure(ALONE)
        assert process.peer.our_cpu_share == pytest.approx(0.6), (
            "our own work while the peer is timed is seen"
        )
        assert Path(f"/proc/{process.pid}").exists()
    assert process._process.returncode == 0


@pytest.mark.parametrize(("sessions", "words"), [(66, "out of memory"), (77, "exit status 0")])
def test_a_dead_peer_says_its_last_words(sessions: int, words: str) -> None:
    with worker() as process:
        with pytest.raises(PeerFailed, match=f"ended unexpectedly: {words}"):
            process.prepare(Case(0, sessions, 4, 3))
        process.release()
        with pytest.raises(PeerFailed, match="ended unexpectedly"):
            process.measure(ALONE)


def test_a_peer_that_cannot_start_leaves_no_process() -> None:
    with pytest.raises(PeerFailed, match="no peer today"):
        worker("import sys; sys.exit('no peer today')")


def test_a_peer_that_ignores_the_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PATIENCE_SECONDS", 0.1)
    process = worker(WORKER + "\ntime.sleep(60)")
    began = time.perf_counter()
    process.close()
    assert time.perf_counter() - began < 30
    assert (process._process.returncode or 0) < 0


def test_what_cannot_be_compared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_peer, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--peers needs llama.cpp; .* pip install 'kakeya\[peers\]'"):
        require_llama()
    with pytest.raises(ConfigError, match="--part peer needs llama.cpp"):
        require_llama(asked_by="--part peer")
    monkeypatch.setattr(llama_peer, "find_spec", lambda name: sys)
    require_llama("some/model.gguf")
    with pytest.raises(ConfigError, match=r"got some/directory"):
        require_llama("some/directory")
