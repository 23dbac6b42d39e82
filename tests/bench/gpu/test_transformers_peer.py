"""transformers beside us: `generate_batch` in its own process answers, breaks, or never comes back."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kakeya.bench.gpu import transformers_peer
from kakeya.bench.gpu.plan import FULL
from kakeya.bench.gpu.results import Absence, Part, Peer
from kakeya.bench.gpu.shapes import TINY_LLAMA
from kakeya.bench.gpu.transformers_peer import Transformers, answer, batch_rows
from kakeya.bench.stats import Samples
from kakeya.bench.usage import resident_bytes
from kakeya.errors import PeerFailed

CPU = torch.device("cpu")
REQUEST = {"shape": "tiny-llama", "device": "cpu", "sessions": 3, "prompt": 5, "tokens": 7}

ANSWERS = """
import json, sys
asked = json.loads(sys.stdin.readline())
sys.stderr.write("a warning\\n" * 9000)  # more than a pipe holds
speed = asked["sessions"] * asked["tokens"] + asked["prompt"]
failed = {"default": asked["shape"]} if asked["device"] == "cuda" else {}
print(json.dumps({"speed": speed, "attention": "eager" if failed else "default", "failed": failed}))
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


def rows_of(program: str, device: str = "cuda", limit_s: float = 30.0) -> list[Peer | Absence]:
    where = torch.device(device)
    return list(batch_rows("a-shape", FULL, 64, where, "work", worker=("-c", program), limit_s=limit_s))


def test_one_that_answers_is_believed() -> None:
    speed = Samples((64 * 128 + 64,))
    assert rows_of(ANSWERS, "cpu") == [Peer("a-shape", 64, "generate_batch", speed)]
    assert rows_of(ANSWERS) == [
        Peer("a-shape", 64, "generate_batch, eager", speed),
        Absence(Part.TRANSFORMERS, "work, attention default", "a-shape"),
    ]


def test_one_that_hangs_is_killed_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = tmp_path / "stuck"
    monkeypatch.setenv("STUCK", str(stuck))
    began = time.monotonic()
    why = "generate_batch gave no answer within 1 s; the last it said: attention default"
    assert rows_of(HANGS, limit_s=1.0) == [Absence(Part.TRANSFORMERS, "work", why)]
    for pid in map(int, stuck.read_text().split()):
        while resident_bytes(pid) is not None:
            assert time.monotonic() - began < 8
            time.sleep(0.01)


@pytest.mark.parametrize("works", ["default", "eager", "none"])
def test_attentions_are_tried_until_one_works(
    works: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class FakePeer:
        def __init__(self, shape: Any, device: torch.device, attention: str) -> None:
            assert (shape.name, device.type) == ("tiny-llama", "cpu")
            self.attention = attention

        def generate_batch(self, prompts: list[list[int]], tokens: int) -> float:
            calls.append((len(prompts), len(prompts[0]), tokens))
            if self.attention != works:
                raise PeerFailed(f"made 0 of {tokens} tokens")
            return 10.0 * tokens

    calls: list[tuple[int, int, int]] = []
    monkeypatch.setattr(transformers_peer, "Transformers", FakePeer)
    why = "PeerFailed: made 0 of 8 tokens"
    tried = {"default": [], "eager": ["default", "paged|sdpa"], "none": ["default", "paged|sdpa", "eager"]}[
        works
    ]
    if works == "none":
        with pytest.raises(
            PeerFailed, match="; ".join(f"attention {each}: {why}" for each in tried).replace("|", ".")
        ):
            answer(REQUEST)
    else:
        failed = dict.fromkeys(tried, why)
        assert answer(REQUEST) == {"speed": 70.0, "attention": works, "failed": failed}
        assert calls[-2:] == [(3, 5, 8), (3, 5, 7)], "warmed up, then timed once"
        said = [line for each in tried for line in (f"attention {each}", why)]
        assert capsys.readouterr().err.splitlines() == [*said, f"attention {works}"]


def test_the_program_itself_answers_one_line() -> None:
    [row] = batch_rows("no-such-shape", FULL, 1, CPU, "work")
    assert isinstance(row, Absence)
    assert row.why.startswith("attention default: KeyError: 'no-such-shape'; attention paged")


def batch_of(short: int = 0, error: str | None = None) -> float:
    """The speed of two prompts over a model that answers at once, `short` of some tokens."""

    def generate_batch(**asked: Any) -> dict[str, Any]:
        assert asked["inputs"] == [[1, 2], [3, 4]]
        assert set(asked) == {"inputs", "generation_config"}, "no manager is kept"
        made = [0] * (asked["generation_config"].max_new_tokens - short)
        return {name: SimpleNamespace(generated_tokens=made, error=error) for name in "ab"}

    peer = Transformers(TINY_LLAMA, CPU)
    peer._model = SimpleNamespace(generate_batch=generate_batch)
    return peer.generate_batch([[1, 2], (3, 4)], 10)


def test_half_the_work_is_not_counted_as_speed() -> None:
    assert batch_of() > 0
    with pytest.raises(PeerFailed, match=r"made 10 of 20 tokens$"):
        batch_of(5)
    with pytest.raises(PeerFailed, match="made 18 of 20 tokens: out of blocks"):
        batch_of(1, "out of blocks")


def test_transformers_gets_the_attention_that_is_named() -> None:
    peers = [Transformers(TINY_LLAMA, CPU, attention) for attention in ("default", "eager")]
    assert [peer._model.config._attn_implementation for peer in peers] == ["sdpa", "eager"]
