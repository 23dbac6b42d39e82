"""What `kakeya serve` says when it serves."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kakeya.cli.console import Screen
from kakeya.cli.serve_banner import Banner
from kakeya.config import StateConfig
from kakeya.logs import LogFormat
from kakeya.serving.config import ServerConfig
from kakeya.types import Durability, RuntimeFacts

FACTS = RuntimeFacts(
    model="m",
    path="/m.gguf",
    family="llama",
    parameters=1000,
    weights="Q4_1",
    dtype="bfloat16",
    numerics="fast",
    kernels="native",
    threads=2,
    sink=4,
    window=1024,
    capacity=3,
    bytes_per_token=10,
    session_bytes=10_280,
    pool_bytes=30_840,
)


Said = Callable[..., str]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    def said(facts: RuntimeFacts = FACTS, state: StateConfig | None = None) -> str:
        banner = Banner(Screen(), ServerConfig(), None, LogFormat.TEXT, state)
        banner.show(facts, "127.0.0.1:1", None, None)
        return "".join(capsys.readouterr())

    return said


def test_what_is_off_is_not_told(said: Said) -> None:
    assert "session   10,280 bytes: sink 4 + window 1,024, 10 bytes per token" in said()
    for word in ("shares", "recalls", "drafts", "keeps", "http", "metrics"):
        assert f"  {word} " not in said()


def test_recall_and_a_proposer_say_what_they_take(said: Said) -> None:
    facts = replace(
        FACTS, recall=256, recall_bytes=2000, proposer="model", draft_tokens=8, proposer_bytes=3000
    )
    assert "window 1,024 + recall 256" in said(facts)
    assert "recalls   up to 256 tokens that left a window, with 2.0 kB, taken now" in said(facts)
    assert "drafts    up to 8 tokens where it pays, by model, 3.0 kB, taken now" in said(facts)


@pytest.mark.parametrize(
    ("durability", "survives"),
    [
        (Durability.NONE, "a clean end of the server"),
        (Durability.PROCESS, "a crash of the server"),
        (Durability.POWER, "a loss of power"),
    ],
)
def test_sessions_that_are_kept_say_where_and_over_what(
    said: Said, durability: Durability, survives: str
) -> None:
    state = StateConfig(Path("/state"), durability, host_tier_bytes=10**9, disk_tier_bytes=2 * 10**9)
    kept = f"sessions in /state, over {survives}; asleep at most 1.0 GB in memory and 2.0 GB on disk"
    assert f"keeps     {kept}" in said(state=state)
    assert "/state, encrypted, over" in said(state=replace(state, key_file=Path("/key")))
