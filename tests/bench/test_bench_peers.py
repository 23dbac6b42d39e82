import sys
import time
from pathlib import Path

import pytest

from kakeya.bench import line_process, peers
from kakeya.bench.peers import PeerProcess, require_peer
from kakeya.bench.plan import DecodeCase
from kakeya.errors import ConfigError, PeerFailed

CASE = DecodeCase(1, 4, 3)
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
        "prepare": {"flash_attention": True},
        "measure": {"error": "too hard"} if sessions == 55 else {"speed": 12.5},
        "release": {},
        "score": {"surprises": [0.5] * (len(request.get("token_ids", [])) - 1)},
    }
    if request["do"] == "measure": time.sleep(0.05)
    print(json.dumps(replies[request["do"]]), flush=True)
"""


def _peer(script: str = WORKER) -> PeerProcess:
    return PeerProcess("model.gguf", 2, [1, 2], worker=("-c", script))


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
        peer._ask = lambda request: _busy_reply()  # type: ignore[method-assign, assignment]
        peer.measure(CASE)
        assert peer.our_cpu_share > 0.2
        del peer._ask


def _busy_reply() -> dict[str, float]:
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    return {"speed": 1.0}


def test_a_refusal_is_raised_and_the_peer_lives_on() -> None:
    with _peer() as peer:
        with pytest.raises(PeerFailed, match="too hard"):
            peer.measure(DecodeCase(55, 4, 3))
        assert peer.measure(CASE) == 12.5


@pytest.mark.parametrize(("sessions", "words"), [(66, "out of memory"), (77, "exit status 0")])
def test_a_dead_peer_says_its_last_words(sessions: int, words: str) -> None:
    with _peer() as peer:
        with pytest.raises(PeerFailed, match=f"ended unexpectedly: {words}"):
            peer.prepare(DecodeCase(sessions, 4, 3))
        peer.release()
        with pytest.raises(PeerFailed, match="ended unexpectedly"):
            peer.measure(CASE)


def test_a_peer_that_cannot_start_leaves_no_process() -> None:
    with pytest.raises(PeerFailed, match="no peer today"):
        _peer("import sys; sys.exit('no peer today')")


def test_a_peer_that_ignores_the_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_process, "PATIENCE_SECONDS", 0.1)
    peer = _peer(WORKER + "\ntime.sleep(60)")
    began = time.perf_counter()
    peer.close()
    assert time.perf_counter() - began < 30
    assert peer._process.returncode is not None
    assert peer._process.returncode < 0


def test_absent_peer_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--peers needs llama.cpp; .* pip install 'kakeya\[peers\]'"):
        require_peer()
    with pytest.raises(ConfigError, match="--part peer needs llama.cpp"):
        require_peer(asked_by="--part peer")


def test_only_a_gguf_file_can_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: sys)
    require_peer("some/model.gguf")
    with pytest.raises(ConfigError, match=r"got some/directory"):
        require_peer("some/directory")
