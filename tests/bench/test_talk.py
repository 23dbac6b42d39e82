"""What is concluded from the turns of a conversation, and what its gates say."""

from typing import Any

import pytest

from kakeya.bench.conversation import Conversation
from kakeya.bench.report import Gate, as_json, from_json
from kakeya.bench.talk import (
    CHAT,
    GRPC,
    LLAMA,
    RESPONSES,
    TRANSFORMERS,
    UNMATCHED,
    ConversationResults,
    Ends,
    Talk,
    Turn,
    ends,
)

WINDOW = 100
KV, RSS, PREFILL, ERRORS = "kv_bounded", "rss_bounded", "prefill_bounded", "errors"
COMPUTED, FULL = "prompt tokens computed, last over first", "latency once the window is full, last over first"
OTHERS = "share of the machine that others used"


def said(number: int, latency_s: float = 1.0, **changes: Any) -> Turn:
    """A turn of 10 new tokens in a history that grows by 15."""
    prompt = 15 * number - 5
    fields = {"ttft_s": latency_s / 5, "prompt_tokens": prompt, "answer_tokens": 5}
    return Turn(number, float(number), latency_s, **({**fields, "cached_tokens": prompt - 10} | changes))


def failed(number: int, *, stopped: bool = False) -> Turn:
    return Turn(number, float(number), error_class="RemoteError", error_str="it broke", stopped=stopped)


def kept(*sizes: int, dropped: int = 1) -> list[Turn]:
    """Turns whose sessions hold so much; the window is full unless nothing was dropped."""
    return [said(n, kv_live_bytes=size, dropped_tokens=dropped) for n, size in enumerate(sizes, start=1)]


def steady(*stretches: tuple[int, float], **changes: Any) -> list[Turn]:
    """So many turns of such a latency, one stretch after the other."""
    latencies = [latency for count, latency in stretches for _ in range(count)]
    return [said(n, latency, **changes) for n, latency in enumerate(latencies, start=1)]


def with_memory(*stretches: tuple[int, int]) -> list[Turn]:
    sizes = [size for count, size in stretches for _ in range(count)]
    return [said(n, server_rss_bytes=size) for n, size in enumerate(sizes, start=1)]


def judged(ways: dict[str, list[Turn]], share: float | None = 0.0, **limits: float) -> dict[str, Gate]:
    talks = [Talk(way, turns, WINDOW) for way, turns in ways.items()]
    return {
        gate.name: gate
        for gate in Conversation(**limits).gates(ConversationResults(talks, bystanders_share=share))
    }


def test_turns_are_counted_and_come_back_from_json() -> None:
    turns = [*(said(n, float(n)) for n in range(1, 5)), failed(5), failed(6, stopped=True)]
    results = ConversationResults([Talk(GRPC, turns, WINDOW)], 2.0, "turns", abort_reason="SIGINT")
    told = as_json(results)
    assert from_json(ConversationResults, told) == results
    first, talk = told["ways"][0]["turns"][0], told["ways"][0]
    assert (first["history_tokens"], first["computed_tokens"], first["ok"]) == (15, 10, True)
    assert (talk["n_turns"], talk["n_errors"], talk["stopped_at"]) == (4, 2, 6)
    assert (talk["history_tokens"], talk["mean_answer_tokens"]) == (60, 5)
    assert talk["percentiles"] == pytest.approx(
        {"latency_p50_s": 2.5, "latency_p95_s": 3.85, "ttft_p50_s": 0.5, "ttft_p95_s": 0.77}
    )
    assert Talk(GRPC, kept(400, 600), WINDOW).kv_live_bytes == {"min": 400, "mean": 500, "max": 600}
    assert Turn(1, 0.0, 1.0, prompt_tokens=30).computed_tokens == 30
    assert failed(1).history_tokens is failed(1).computed_tokens is None
    assert Talk(GRPC, [failed(1)], WINDOW).stopped_at is None


def test_an_empty_talk_has_no_numbers_and_no_verdict() -> None:
    told = as_json(Talk(GRPC, [], WINDOW))
    assert told["buckets_10min"] == []
    for name in ("percentiles", "kv_live_bytes", "server_rss"):
        assert set(told[name].values()) == {None}
    for name in ("mean_answer_tokens", "history_tokens", "stopped_at", "kv_spread_after_plateau"):
        assert told[name] is None
    assert [gate.passed for gate in judged({GRPC: []}).values()] == [None] * 4


def test_ends_are_medians_of_the_first_and_last_turns() -> None:
    found = ends([float(n) for n in range(1, 101)])
    assert found == Ends(20, 10.5, 90.5)
    assert (found.last_over_first, found.drift) == (pytest.approx(90.5 / 10.5), 80)
    assert ends([float(n) for n in range(1, 12)]) == Ends(5, 3.0, 9.0)
    nothing = ends([1.0] * 9)
    assert nothing == Ends(0, None, None)
    assert nothing.last_over_first is nothing.drift is None
    # The whole latency has ends of fifty turns.
    whole = Talk(GRPC, steady((20, 1.0), (60, 1.5), (20, 3.0)), WINDOW).whole_latency
    assert whole == Ends(50, 1.5, 1.5)
    # From turn 8 on there are more than 100 tokens before the answer.
    assert Talk(GRPC, steady((7, 9.0), (10, 1.0)), WINDOW).latency_once_full == Ends(5, 1.0, 1.0)


SLOWER = steady((50, 1.0), (50, 1.06))
FILLING = kept(10, 100, dropped=0)
VARIED = FILLING + kept(*[500] * 5, *[449] * 5)
BUSY = "others used 20% of the machine, so ratios mean nothing"


@pytest.mark.parametrize(
    ("turns", "name", "how", "passed", "told"),
    [
        (SLOWER, PREFILL, {}, False, 1.06),
        (SLOWER, PREFILL, {"tail_limit": 1.07}, True, 1.06),
        (SLOWER, PREFILL, {"share": 0.05}, False, 1.06),
        (SLOWER, PREFILL, {"share": None}, False, 1.06),
        (SLOWER, PREFILL, {"share": 0.2}, None, BUSY),
        (steady((9, 1.0)), PREFILL, {}, None, "9 turns went well; 10 are needed"),
        ([*steady((10, 1.0)), *map(failed, range(50)), *steady((10, 1.0))], PREFILL, {}, True, 1.0),
        ([*SLOWER, failed(101)], ERRORS, {"share": 0.2}, False, 1.0),
        ([], ERRORS, {}, None, "there was no turn"),
        (FILLING + kept(*[500] * 5), KV, {}, True, 0.0),
        (VARIED, KV, {"share": 0.2}, False, 0.102),
        (VARIED, KV, {"kv_limit": 0.2}, True, 0.102),
        (FILLING, KV, {}, None, "the window never filled"),
        ([failed(1)], KV, {}, None, "no turn went well"),
        (FILLING + kept(500), KV, {}, None, "the window was full in fewer than 2 turns"),
        (FILLING + kept(500, 400), KV, {}, False, 0.2),
        (kept(*[0] * 5), KV, {}, False, 0.0),
        (kept(0, dropped=0), KV, {}, False, 0.0),
        # A measurement that turns into nothing once the window is full is no bound either.
        (kept(7, dropped=0) + kept(*[0] * 5), KV, {}, False, 0.0),
        (with_memory((20, 1)), RSS, {}, None, "the server's memory was not seen in more than 20 turns"),
        (steady((50, 1.0)), RSS, {}, None, "the server's memory was not seen in more than 20 turns"),
        (with_memory((20, 1000), (30, 1020)), RSS, {"share": 0.2}, False, 1.02),
        (with_memory((20, 1000), (30, 1020)), RSS, {"rss_limit": 1.02}, True, 1.02),
    ],
)  # fmt: skip
def test_gates_of_a_session(
    turns: list[Turn], name: str, how: dict[str, Any], passed: bool | None, told: str | float
) -> None:
    gate = judged({GRPC: turns}, **how)[f"grpc: {name}"]
    assert gate.passed is passed
    assert (gate.reason if isinstance(told, str) else gate.value) == (
        told if isinstance(told, str) else pytest.approx(told)
    )


@pytest.mark.parametrize(
    ("sizes", "last", "peak", "tail", "passed"),
    [
        ([(40, 1000), (1, 1500)], 1.5, 1.5, 1.0, True),
        ([(20, 1000), (30, 1200), (1, 1000)], 1.0, 1.2, 1.2, False),
        ([(20, 1000), (30, 5000), (20, 1005)], 1.005, 5.0, 1.005, True),
        ([(20, 1000), (30, 900)], 0.9, 1.0, 0.9, True),
        ([(20, 1000), (1, 1100)], 1.1, 1.1, 1.1, False),
        ([(19, 1), (10, 1000)], 1.0, 1.0, 1.0, True),
    ],
    ids=["a spike", "a late give-back", "a hill", "shrinking", "short", "settled at turn 20"],
)
def test_one_sample_does_not_decide_on_memory(
    sizes: list[tuple[int, int]], last: float, peak: float, tail: float, passed: bool
) -> None:
    rss = Talk(GRPC, with_memory(*sizes), WINDOW).server_rss
    assert (rss.settled_bytes, rss.last_bytes) == (1000, sizes[-1][1])
    assert (rss.last_over_settled, rss.peak_over_settled, rss.tail_over_settled) == (last, peak, tail)
    verdict = judged({GRPC: with_memory(*sizes)})["grpc: rss_bounded"]
    assert (verdict.value, verdict.passed) == (tail, passed)


def test_memory_has_a_slope() -> None:
    growing = with_memory(*((1, 1000 + 10 * place) for place in range(40)))
    assert Talk(GRPC, growing, WINDOW).server_rss.slope_bytes_per_s == pytest.approx(10)


def test_buckets_are_ten_minutes_each() -> None:
    begun = [Turn(n, 200.0 * n, 0.5, prompt_tokens=10 * n, answer_tokens=2) for n in range(3)]
    late = Turn(4, 1900.0, error_class="Unavailable", error_str="gone")
    rows = Talk(GRPC, [*begun, late], WINDOW).buckets_10min
    counts = [(row["from_s"], row["n_turns"], row["n_errors"]) for row in rows]
    assert counts == [(0, 3, 0), (600, 0, 0), (1200, 0, 0), (1800, 0, 1)]
    assert (rows[0]["latency_p50_s"], rows[0]["history_tokens_max"]) == (0.5, 22)
    assert rows[1]["latency_p50_s"] is rows[1]["kv_live_bytes_max"] is None


def test_ways_are_compared_over_turns_that_both_did() -> None:
    def times(**ways: list[Turn]) -> dict[str, float | None]:
        return ConversationResults([Talk(way, turns, WINDOW) for way, turns in ways.items()]).times_ours

    ours = [said(n, 1.0 if n < 50 else 100.0) for n in range(1, 80)]
    theirs = [*steady((19, 2.0), (20, 3.0)), failed(40, stopped=True)]
    assert times(chat=ours, llama=theirs) == {CHAT: 1.0, LLAMA: 3.0}
    assert times(grpc=[said(1)], chat=[said(1, 4.0)], responses=[said(1, 2.0)]) == {
        GRPC: 0.5, CHAT: 2.0, RESPONSES: 1.0
    }  # fmt: skip
    assert times(chat=[failed(1)], llama=[]) == {CHAT: None, LLAMA: None}
    assert times(llama=theirs) == {}


def test_what_matching_saves() -> None:
    unmatched = Talk(UNMATCHED, [said(n, 1.0 + n) for n in range(1, 61)], WINDOW)
    matched = Talk(CHAT, steady((60, 1.0)), WINDOW)
    both = ConversationResults([matched, unmatched]).unmatched_over_matched
    assert (both["head"], both["tail"], both["latency_p50_s"]) == (16.5, 46.5, 31.5)
    assert ConversationResults([unmatched]).unmatched_over_matched == {}


FLAT = steady((60, 1.0))
GROWING = [said(n, 1 + 0.1 * n, cached_tokens=0) for n in range(1, 61)]


def test_which_ways_have_which_gates() -> None:
    gates = judged(
        {RESPONSES: FLAT, CHAT: FLAT, UNMATCHED: GROWING, LLAMA: GROWING, TRANSFORMERS: [failed(1)]}
    )
    assert {name: gate.passed for name, gate in gates.items()} == dict.fromkeys(
        [
            *(f"{way}: {name}" for way in (RESPONSES, CHAT) for name in (PREFILL, COMPUTED, FULL)),
            *(f"{way}: errors" for way in (RESPONSES, CHAT, UNMATCHED)),
            OTHERS,
        ],
        True,
    )
    assert judged({GRPC: FLAT}).keys() == {f"grpc: {name}" for name in (KV, RSS, PREFILL, ERRORS)}


@pytest.mark.parametrize(
    ("turns", "how", "verdicts"),
    [
        (GROWING, {}, {COMPUTED: False, FULL: False, PREFILL: False, ERRORS: True}),
        (GROWING, {"flat_limit": 100.0, "tail_limit": 100.0}, {COMPUTED: False, FULL: True, PREFILL: True}),
        (GROWING, {"share": 0.5}, {COMPUTED: False, FULL: "others used 50%", PREFILL: "others used 50%"}),
        ([*FLAT, failed(61)], {}, {COMPUTED: True, FULL: True, PREFILL: True, ERRORS: False}),
        (FLAT[:7], {}, {COMPUTED: "7 turns went well", FULL: "fewer than 10 turns", PREFILL: "7 turns"}),
    ],
)
def test_gates_of_ways_over_http(turns: list[Turn], how: dict[str, Any], verdicts: dict[str, Any]) -> None:
    gates = judged({RESPONSES: turns, UNMATCHED: []}, **how)
    for name, wanted in verdicts.items():
        gate = gates[f"{RESPONSES}: {name}"]
        assert gate.reason.startswith(wanted) if isinstance(wanted, str) else gate.passed is wanted
    assert gates[OTHERS].passed is ("share" not in how)
    assert gates[f"{UNMATCHED}: errors"].passed is None
