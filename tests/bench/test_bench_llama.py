import importlib.util
import io
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kakeya.bench import processes
from kakeya.bench.cases import LEAD_IN, Case, Side
from kakeya.bench.peers import llama as llama_peer
from kakeya.bench.peers.llama import (
    LlamaPeer,
    LlamaProcess,
    require_llama,
    surprises_of,
    tokens_per_sequence,
)
from kakeya.bench.processes import answer_lines
from kakeya.errors import ConfigError, PeerFailed
from support.fake_llama import FakeLlama

TEXT = [5, 6, 7, 8, 9]
CASES: list[Case] = [Case(7), Case(0, 1, 4, 3), Case(0, 3, 6, 2)]


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> FakeLlama:
    """The stand-in, found where the real module would be."""
    fake = FakeLlama()
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)  # type: ignore[arg-type]
    return fake


@pytest.fixture(params=["fake", "real"])
def peer(request: pytest.FixtureRequest) -> Iterator[Side]:
    """The same promises, kept by the stand-in here and by llama.cpp itself in its own process."""
    if request.param == "fake":
        request.getfixturevalue("llama")
        yield LlamaPeer("model.gguf", 1, TEXT)
        return
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is not installed")
    # One thread: llama.cpp's threads wait for each other in a busy loop, which crawls on a busy machine.
    with LlamaProcess(str(request.getfixturevalue("default_model")), 1, TEXT) as process:
        assert process.facts["library"].startswith("llama-cpp-python ")
        assert process.facts["system"].startswith("CPU :")
        yield process


def test_cases_can_be_measured_again_and_again(peer: Side) -> None:
    for case in CASES:
        peer.prepare(case)
    for _ in range(2):
        assert all(peer.measure(case) > 0 for case in CASES)
    peer.release()
    peer.prepare(CASES[0])
    assert peer.measure(CASES[0]) > 0


def test_what_was_released_is_gone(llama: FakeLlama) -> None:
    peer = LlamaPeer("model.gguf", 2, TEXT)
    peer.prepare(CASES[0])
    peer.release()
    with pytest.raises(KeyError):
        peer.measure(CASES[0])


def test_a_prompt_is_one_batch_that_asks_for_the_last_logits(llama: FakeLlama) -> None:
    peer = LlamaPeer("model.gguf", 2, TEXT)
    peer.prepare(Case(7))
    llama.calls.clear()
    peer.measure(Case(7))
    (rows,) = llama.calls
    assert [token for token, *_ in rows] == [5, 6, 7, 8, 9, 5, 6]
    assert [wants for *_, wants in rows] == [False] * 6 + [True]


def test_decoding_feeds_one_token_a_sequence_after_the_history(llama: FakeLlama) -> None:
    case = Case(0, 3, 6, 2)
    peer = LlamaPeer("model.gguf", 2, TEXT)
    peer.prepare(case)
    llama.calls.clear()
    peer.measure(case)
    assert len(llama.calls) == LEAD_IN + case.steps
    assert llama.calls[0] == [(6, 6, sequence, True) for sequence in range(3)]


def test_contexts_fit_their_case_and_use_our_threads(llama: FakeLlama) -> None:
    LlamaPeer("model.gguf", 3, TEXT).prepare(Case(0, 3, 300, 2))
    params = llama.opened[0].params
    assert params.n_ctx == 3 * 512
    assert params.n_threads == params.n_threads_batch == 3
    assert params.kv_unified is params.offload_kqv is params.op_offload is False


@pytest.mark.parametrize("slow_flash", [0, 1])
def test_the_quicker_attention_is_kept_and_the_other_freed(llama: FakeLlama, slow_flash: int) -> None:
    llama.slow_flash = slow_flash
    peer = LlamaPeer("model.gguf", 2, TEXT)
    peer.prepare(Case(0, 1, 4, 3))
    assert peer.flash(Case(0, 1, 4, 3)) is (slow_flash == 0)
    assert [context.params.flash_attn_type for context in llama.freed] == [slow_flash]


def test_a_long_history_is_filled_once_with_the_setting_that_won_before(
    llama: FakeLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_peer, "LONGEST_TRIED_HISTORY", 8)
    llama.slow_flash = 1
    peer = LlamaPeer("model.gguf", 2, TEXT)
    peer.prepare(Case(0, 1, 8, 3))
    peer.prepare(Case(0, 1, 9, 3))
    assert len(llama.opened) == 3
    assert peer.flash(Case(0, 1, 9, 3)) is False


def test_a_long_prompt_goes_in_batches(llama: FakeLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_peer, "BATCH", 4)
    peer = LlamaPeer("model.gguf", 2, TEXT)
    peer.prepare(Case(0, 1, 10, 1))
    assert [len(rows) for rows in llama.calls[:3]] == [4, 4, 2]


def test_what_llama_refuses_is_said(llama: FakeLlama) -> None:
    with pytest.raises(PeerFailed, match=r"broken\.gguf"):
        LlamaPeer("broken.gguf", 2, TEXT)
    peer = LlamaPeer("model.gguf", 2, TEXT)
    with pytest.raises(PeerFailed, match="context"):
        peer.prepare(Case(0, 1, 2**21, 1))
    peer.prepare(Case(0, 1, 4, 3))
    llama.opened[0].length[0] = 99
    with pytest.raises(PeerFailed, match="returned -1"):
        peer.measure(Case(0, 1, 4, 3))


def test_absent_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(ConfigError, match=r"kakeya\[peers\]"):
        LlamaPeer("model.gguf", 2, TEXT)


def test_cells_come_in_blocks_of_256() -> None:
    assert tokens_per_sequence(Case(256)) == 256
    assert tokens_per_sequence(Case(257)) == 512
    assert tokens_per_sequence(Case(0, 9, 256 - LEAD_IN - 3, 3)) == 256
    assert tokens_per_sequence(Case(0, 9, 256 - LEAD_IN - 2, 3)) == 512


def _conversation(*requests: dict[str, object]) -> list[Any]:
    replies, worker = io.StringIO(), llama_peer._Worker()
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    answer_lines(worker.answer, io.StringIO(lines), replies)
    if worker.peer is not None:
        worker.peer.close()
    return [json.loads(line) for line in replies.getvalue().splitlines()]


def test_every_request_gets_one_reply(llama: FakeLlama) -> None:
    case = asdict(Case(0, 1, 4, 3))
    opened, prepared, measured, released = _conversation(
        {"do": "open", "path": "model.gguf", "threads": 2, "text": TEXT},
        {"do": "prepare", "case": case},
        {"do": "measure", "case": case},
        {"do": "release"},
    )
    assert opened == {"library": "llama-cpp-python 0.0", "system": "CPU : FAKE = 1"}
    assert prepared is True
    assert isinstance(measured, float)
    assert released is None
    assert len(llama.freed) == 2
    assert llama.closed == ["batch", "model"]


def test_passages_are_scored_in_contexts_of_their_own(
    llama: FakeLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_peer, "SCORED_AT_ONCE", 2)
    expected, other = (math.log(math.e + llama.VOCABULARY - 1) - bonus for bonus in (1.0, 0.0))
    peer = LlamaPeer("model.gguf", 2, ())
    assert peer.surprises([3, 4, 5, 9, 10]) == pytest.approx([expected, expected, other, expected])
    assert peer.surprises([3, 5]) == pytest.approx([other])
    assert [[position for _, position, *_ in rows] for rows in llama.calls] == [[0, 1], [2, 3], [4], [0, 1]]
    assert all(wants for rows in llama.calls for *_, wants in rows)
    assert [context.params.flash_attn_type for context in llama.freed] == [0, 0]


def test_a_context_that_breaks_is_freed(llama: FakeLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "llama_decode", lambda context, batch: -3)
    with pytest.raises(PeerFailed, match="returned -3"):
        LlamaPeer("model.gguf", 2, ()).surprises([3, 4])
    assert len(llama.freed) == 1


def test_surprise_is_what_the_softmax_says() -> None:
    logits = np.array([[1.0, 2.0, 0.5], [900.0, 899.0, 0.0], [np.nan] * 3], dtype=np.float32)
    first, second = surprises_of(logits, [2, 1])
    assert math.exp(-first) == pytest.approx(math.exp(0.5) / (math.exp(1.0) + math.exp(2.0) + math.exp(0.5)))
    assert math.exp(-second) == pytest.approx(1 / (1 + math.e))
    assert surprises_of(logits, []) == []


def test_scores_come_over_the_pipe(llama: FakeLlama) -> None:
    opening = {"do": "open", "path": "model.gguf", "threads": 2, "text": []}
    _, scored = _conversation(opening, {"do": "score", "token_ids": [3, 5, 6]})
    assert len(scored) == 2
    assert scored[0] == pytest.approx(scored[1] + 1)


def test_a_refusal_is_a_reply_too(llama: FakeLlama) -> None:
    (reply,) = _conversation({"do": "open", "path": "broken.gguf", "threads": 2, "text": TEXT})
    assert reply == {"error": "llama.cpp could not open broken.gguf"}


CASE = Case(0, 1, 4, 3)
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
        "score": [0.5] * (len(request.get("token_ids", [])) - 1),
    }
    if request["do"] == "measure": time.sleep(0.05)
    print(json.dumps(replies[request["do"]]), flush=True)
"""


def _peer(script: str = WORKER) -> LlamaProcess:
    return LlamaProcess("model.gguf", 2, [1, 2], worker=("-c", script))


def test_a_peer_is_a_side_in_another_process() -> None:
    with _peer() as peer:
        assert peer.facts == {"library": "model.gguf", "system": "2"}
        peer.prepare(CASE)
        assert peer.measure(CASE) == 12.5
        assert peer.flash_attention == {CASE.label: True}
        peer.release()
        assert Path(f"/proc/{peer.pid}").exists()
    assert peer._process.returncode == 0


def test_a_peer_scores_tokens() -> None:
    with _peer() as peer:
        assert peer.surprises((7, 8, 9)) == [0.5, 0.5]


def test_our_own_work_while_the_peer_is_timed_is_seen() -> None:
    with _peer() as peer:
        peer.measure(CASE)
        assert peer.our_cpu_share < 0.5
        peer.ask = lambda request: _busy_reply()  # type: ignore[method-assign]
        peer.measure(CASE)
        assert peer.our_cpu_share > 0.2
        del peer.ask


def _busy_reply() -> float:
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    return 1.0


def test_a_refusal_is_raised_and_the_peer_lives_on() -> None:
    with _peer() as peer:
        with pytest.raises(PeerFailed, match="too hard"):
            peer.measure(Case(0, 55, 4, 3))
        assert peer.measure(CASE) == 12.5


@pytest.mark.parametrize(("sessions", "words"), [(66, "out of memory"), (77, "exit status 0")])
def test_a_dead_peer_says_its_last_words(sessions: int, words: str) -> None:
    with _peer() as peer:
        with pytest.raises(PeerFailed, match=f"ended unexpectedly: {words}"):
            peer.prepare(Case(0, sessions, 4, 3))
        peer.release()
        with pytest.raises(PeerFailed, match="ended unexpectedly"):
            peer.measure(CASE)


def test_a_peer_that_cannot_start_leaves_no_process() -> None:
    with pytest.raises(PeerFailed, match="no peer today"):
        _peer("import sys; sys.exit('no peer today')")


def test_a_peer_that_ignores_the_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PATIENCE_SECONDS", 0.1)
    peer = _peer(WORKER + "\ntime.sleep(60)")
    began = time.perf_counter()
    peer.close()
    assert time.perf_counter() - began < 30
    assert peer._process.returncode is not None
    assert peer._process.returncode < 0


def test_absent_peer_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_peer, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--peers needs llama.cpp; .* pip install 'kakeya\[peers\]'"):
        require_llama()
    with pytest.raises(ConfigError, match="--part peer needs llama.cpp"):
        require_llama(asked_by="--part peer")


def test_only_a_gguf_file_can_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_peer, "find_spec", lambda name: sys)
    require_llama("some/model.gguf")
    with pytest.raises(ConfigError, match=r"got some/directory"):
        require_llama("some/directory")
