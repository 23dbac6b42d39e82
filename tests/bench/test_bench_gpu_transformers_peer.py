"""`generate_batch` of transformers in a process of its own: it answers, it breaks, or it never comes back."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kakeya.bench.gpu import transformers_peer
from kakeya.bench.gpu.plan import FULL
from kakeya.bench.gpu.transformers_peer import MeasuredBatch, answer, measured_batch
from kakeya.bench.processes import resident_bytes
from kakeya.errors import PeerFailed

REQUEST = {"shape": "tiny-llama", "device": "cpu", "sessions": 3, "prompt": 5, "tokens": 7}

ANSWERS = """
import json, sys
asked = json.loads(sys.stdin.readline())
sys.stderr.write("a warning\\n" * 9000)  # more than a pipe holds
speed = asked["sessions"] * asked["tokens"] + asked["prompt"]
print(json.dumps({"speed": speed, "attention": asked["device"], "failed": {"default": asked["shape"]}}))
"""
REFUSES = """
input()
print('{"error": "attention default: RuntimeError: the expanded size"}')
"""
RAISES = """
raise RuntimeError("no kernel image is available")
"""
# As the library does: the call waits while its thread, and here another process, is stuck.
HANGS = """
import os, subprocess, sys, threading, time
child = subprocess.Popen(["sleep", "60"])
with open(os.environ["STUCK"], "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
sys.stderr.write("attention default\\n")
sys.stderr.flush()
threading.Thread(target=time.sleep, args=(60,)).start()
"""


def of(program: str, limit_s: float = 30.0) -> MeasuredBatch:
    return measured_batch("a-shape", FULL, 64, torch.device("cuda"), worker=("-c", program), limit_s=limit_s)


def test_one_that_answers_is_believed() -> None:
    batch = of(ANSWERS)
    assert batch == MeasuredBatch(64 * 128 + 64, "cuda", {"default": "a-shape"})
    assert batch.method == "generate_batch, cuda"
    assert MeasuredBatch(1.0, "default", {}).method == "generate_batch"


def test_one_that_breaks_says_why() -> None:
    with pytest.raises(PeerFailed, match="attention default: RuntimeError: the expanded size"):
        of(REFUSES)
    with pytest.raises(PeerFailed, match="generate_batch ended unexpectedly: RuntimeError: no kernel image"):
        of(RAISES)


def test_one_that_hangs_is_killed_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = tmp_path / "stuck"
    monkeypatch.setenv("STUCK", str(stuck))
    began = time.monotonic()
    with pytest.raises(
        PeerFailed, match=r"generate_batch gave no answer within 1 s; the last it said: attention default$"
    ):
        of(HANGS, limit_s=1.0)
    assert time.monotonic() - began < 8
    worker, child = map(int, stuck.read_text().split())
    assert resident_bytes(worker) is None
    assert _is_over(child)


def _is_over(pid: int) -> bool:
    """Gone, or dead and not yet taken note of by whoever inherited it."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


class FakePeer:
    """Takes some attentions, and remembers what was asked of it."""

    takes: tuple[str, ...] = ("default",)
    calls: list[tuple[str, int, int, int]]

    def __init__(self, shape: Any, device: torch.device, attention: str) -> None:
        assert (shape.name, device.type) == ("tiny-llama", "cpu")
        self.attention = attention

    def generate_batch(self, prompts: list[list[int]], tokens: int) -> float:
        self.calls.append((self.attention, len(prompts), len(prompts[0]), tokens))
        if self.attention not in self.takes:
            raise PeerFailed(f"made 0 of {tokens} tokens")
        return 10.0 * tokens


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> type[FakePeer]:
    monkeypatch.setattr(FakePeer, "calls", [], raising=False)
    monkeypatch.setattr(transformers_peer, "Transformers", FakePeer)
    return FakePeer


def test_it_warms_up_and_is_timed_once(peer: type[FakePeer]) -> None:
    assert answer(REQUEST) == {"speed": 70.0, "attention": "default", "failed": {}}
    assert peer.calls == [("default", 3, 5, 8), ("default", 3, 5, 7)]


def test_another_attention_is_tried_when_one_breaks(
    peer: type[FakePeer], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peer, "takes", ("eager",))
    why = "PeerFailed: made 0 of 8 tokens"
    assert answer(REQUEST) == {
        "speed": 70.0,
        "attention": "eager",
        "failed": {"default": why, "paged|sdpa": why},
    }
    assert [call[0] for call in peer.calls] == ["default", "paged|sdpa", "eager", "eager"]
    assert capsys.readouterr().err.splitlines() == [
        "attention default", why, "attention paged|sdpa", why, "attention eager",
    ]  # fmt: skip


def test_when_none_works_all_reasons_are_told(peer: type[FakePeer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "takes", ())
    with pytest.raises(PeerFailed, match=r"^attention default: PeerFailed: ") as failure:
        answer(REQUEST)
    assert str(failure.value).count("made 0 of 8 tokens") == 3


def test_the_program_itself_answers_one_line() -> None:
    with pytest.raises(PeerFailed, match=r"^attention default: KeyError: 'no-such-shape'; attention paged"):
        measured_batch("no-such-shape", FULL, 1, torch.device("cpu"))
