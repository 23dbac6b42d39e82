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
    beside,
    ends,
)

WINDOW = 100


def said(number: int, latency_s: float = 1.0, **changes: Any) -> Turn:
    """A turn of 10 new tokens in a history that grows by 15."""
    prompt = 15 * number - 5
    fields = {"ttft_s": latency_s / 5, "prompt_tokens": prompt, "answer_tokens": 5}
    return Turn(number, float(number), latency_s, **({**fields, "cached_tokens": prompt - 10} | changes))


def failed(number: int, *, stopped: bool = False) -> Turn:
    return Turn(number, float(number), error_class="RemoteError", error_str="it broke", stopped=stopped)


def talk(turns: list[Turn], way: str = GRPC) -> Talk:
    return Talk(way, turns, WINDOW)


def kept(sizes: list[int], latency: float = 1.0, dropped: int = 1) -> list[Turn]:
    """Turns whose sessions hold so much; the window is full unless nothing was dropped."""
    return [
        said(n, latency, kv_live_bytes=size, dropped_tokens=dropped, server_rss_bytes=10_000)
        for n, size in enumerate(sizes, start=1)
    ]


def steady(*stretches: tuple[int, float]) -> list[Turn]:
    """So many turns of such a latency, one stretch after the other."""
    latencies = [latency for count, latency in stretches for _ in range(count)]
    return [said(n, latency) for n, latency in enumerate(latencies, start=1)]


def judged(ways: dict[str, list[Turn]], share: float | None = 0.0, **limits: float) -> dict[str, Gate]:
    results = ConversationResults([talk(turns, way) for way, turns in ways.items()], bystanders_share=share)
    return {gate.name: gate for gate in Conversation(**limits).gates(results)}


def gate(turns: list[Turn], name: str, share: float | None = None, **limits: float) -> Gate:
    return judged({GRPC: turns}, share, **limits)[f"grpc: {name}"]


def test_a_turn_knows_its_history_and_what_was_computed() -> None:
    turn = Turn(1, 0.0, 1.0, prompt_tokens=30, answer_tokens=4, cached_tokens=20)
    assert (turn.history_tokens, turn.computed_tokens, turn.ok) == (34, 10, True)
    assert Turn(1, 0.0, 1.0, prompt_tokens=30).computed_tokens == 30
    assert (failed(1).ok, failed(1).history_tokens, failed(1).computed_tokens) == (False, None, None)


def test_results_come_back_from_json() -> None:
    results = ConversationResults([talk([said(1), failed(2)])], 2.0, "turns", abort_reason="SIGINT")
    told = as_json(results)
    assert told["ways"][0]["turns"][0]["history_tokens"] == 15
    assert told["ways"][0]["n_errors"] == 1
    assert from_json(ConversationResults, told) == results


def test_a_talk_counts_successes_and_errors() -> None:
    total = talk([*(said(n) for n in range(1, 13)), failed(13), failed(14, stopped=True)])
    assert (total.n_turns, total.n_errors, total.stopped_at) == (12, 2, 14)
    assert (total.history_tokens, total.mean_answer_tokens) == (180, 5)
    assert total.computed_tokens.first == total.computed_tokens.last == 10
    assert total.latency_once_full.turns == 0
    assert talk([failed(1)]).stopped_at is None
    assert talk(kept([400, 600])).kv_live_bytes == {"min": 400, "mean": 500, "max": 600}


def test_percentiles_are_interpolated() -> None:
    total = talk([said(n, float(n)) for n in range(1, 5)]).percentiles
    assert total["latency_p50_s"] == 2.5
    assert total["latency_p95_s"] == pytest.approx(3.85)
    assert total["ttft_p50_s"] == pytest.approx(0.5)
    assert total["ttft_p95_s"] == pytest.approx(0.77)


def test_an_empty_talk_has_no_numbers_and_no_verdict() -> None:
    nothing = talk([])
    assert nothing.percentiles["latency_p50_s"] is nothing.kv_live_bytes["mean"] is None
    assert nothing.mean_answer_tokens is nothing.history_tokens is nothing.stopped_at is None
    assert nothing.buckets_10min == []
    assert [gate.passed for gate in judged({GRPC: []}).values()] == [None] * 4


def test_ends_are_medians_of_the_first_and_last_turns() -> None:
    found = ends([float(n) for n in range(1, 101)])
    assert found == Ends(20, 10.5, 90.5)
    assert found.last_over_first == pytest.approx(90.5 / 10.5)
    assert ends([float(n) for n in range(1, 12)]) == Ends(5, 3.0, 9.0)
    assert ends([1.0] * 9) == Ends(0, None, None)
    assert Ends(0, None, None).last_over_first is Ends(0, None, None).drift is None


def test_the_whole_latency_has_ends_of_fifty_turns() -> None:
    slow_middle = talk(steady((50, 1.0), (30, 9.0), (50, 2.0))).whole_latency
    assert (slow_middle.first, slow_middle.last) == (1.0, 2.0)
    uneven = talk(steady((20, 1.0), (60, 1.5), (20, 3.0))).whole_latency
    assert (uneven.first, uneven.last) == (1.5, 1.5)


def test_turns_count_as_full_when_the_history_is_longer_than_a_session_holds() -> None:
    # From turn 8 on there are more than 100 tokens before the answer.
    assert talk(steady((7, 9.0), (10, 1.0))).latency_once_full == Ends(5, 1.0, 1.0)


def test_prefill_is_bounded_up_to_the_limit() -> None:
    run = steady((50, 1.0), (50, 1.06))
    assert gate(run, "prefill_bounded").passed is False
    assert gate(run, "prefill_bounded", tail_limit=1.07).passed is True
    few = gate(steady((9, 1.0)), "prefill_bounded")
    assert (few.passed, few.reason) == (None, "9 turns went well; 10 are needed")
    faster = talk(steady((10, 2.0), (10, 1.5))).whole_latency
    assert (faster.last_over_first, faster.drift) == (0.75, -0.5)


@pytest.mark.parametrize("share", [None, 0.0, 0.05])
def test_latencies_are_judged_on_a_quiet_machine_and_where_nobody_knows(share: float | None) -> None:
    assert gate(steady((100, 1.0)), "prefill_bounded", share).passed is True
    assert gate(steady((50, 1.0), (50, 2.0)), "prefill_bounded", share).passed is False


def test_on_a_busy_machine_memory_and_errors_are_judged_and_latencies_are_not() -> None:
    run = [*kept([500] * 50), *kept([500] * 50, latency=5.0)]
    verdicts = {name: each.passed for name, each in judged({GRPC: run}, share=0.2).items()}
    assert verdicts == {
        "grpc: kv_bounded": True,
        "grpc: rss_bounded": True,
        "grpc: prefill_bounded": None,
        "grpc: errors": True,
    }
    busy = gate(run, "prefill_bounded", share=0.2)
    assert busy.reason == "others used 20% of the machine, so ratios mean nothing"
    varied = [*kept([500] * 50), *kept([1] * 50), failed(101)]
    assert gate(varied, "kv_bounded", share=0.2).passed is False
    assert gate(varied, "errors", share=0.2).passed is False


def test_failed_turns_are_no_part_of_the_ends() -> None:
    run = [*steady((10, 1.0)), *(failed(n) for n in range(50)), *steady((10, 1.0))]
    assert gate(run, "prefill_bounded").value == 1.0
    assert gate(run, "errors").passed is False


def test_kv_is_judged_past_the_plateau_only() -> None:
    filling = kept([10, 100], dropped=0)
    assert gate(filling + kept([500] * 5), "kv_bounded").passed is True
    varied = filling + kept([500] * 5 + [449] * 5)
    assert gate(varied, "kv_bounded").passed is False
    assert gate(varied, "kv_bounded").value == pytest.approx(0.102)
    assert gate(varied, "kv_bounded", kv_limit=0.2).passed is True
    assert gate(filling, "kv_bounded").reason == "the window never filled"
    assert gate([failed(1)], "kv_bounded").reason == "no turn went well"


def test_one_turn_past_the_plateau_has_no_spread() -> None:
    filling = kept([10, 100], dropped=0)
    one = gate(filling + kept([500]), "kv_bounded")
    assert (one.passed, one.reason) == (None, "the window was full in fewer than 2 turns")
    assert gate(filling + kept([500, 400]), "kv_bounded").value == pytest.approx(0.2)


def test_kv_of_all_zeros_fails() -> None:
    assert gate(kept([0] * 5), "kv_bounded").passed is False
    assert gate(kept([0], dropped=0), "kv_bounded").passed is False
    # A measurement that turns into nothing once the window is full is no bound either.
    assert gate(kept([7], dropped=0) + kept([0] * 5), "kv_bounded").passed is False


def with_memory(sizes: list[int]) -> list[Turn]:
    return [said(n, server_rss_bytes=size) for n, size in enumerate(sizes, start=1)]


def test_memory_is_judged_from_turn_twenty_on() -> None:
    settled = with_memory([*range(1, 20), *([1000] * 10)])
    rss = talk(settled).server_rss
    assert (rss.settled_bytes, rss.last_bytes, rss.slope_bytes_per_s) == (1000, 1000, 0)
    growing = with_memory([1000 + 10 * place for place in range(40)])
    rss = talk(growing).server_rss
    assert rss.settled_bytes == 1190
    assert rss.slope_bytes_per_s == pytest.approx(10)
    assert gate(growing, "rss_bounded").passed is False
    assert gate(growing, "rss_bounded", share=0.2, rss_limit=2).passed is True
    assert gate(settled, "rss_bounded").passed is True


@pytest.mark.parametrize(
    ("sizes", "last", "peak", "tail", "passed"),
    [
        ([*([1000] * 40), 1500], 1.5, 1.5, 1.0, True),
        ([*([1000] * 20), *([1200] * 30), 1000], 1.0, 1.2, 1.2, False),
        ([*([1000] * 20), *([5000] * 30), *([1005] * 20)], 1.005, 5.0, 1.005, True),
        ([*([1000] * 20), *([900] * 30)], 0.9, 1.0, 0.9, True),
        ([*([1000] * 20), 1100], 1.1, 1.1, 1.1, False),
    ],
    ids=["a spike", "a late give-back", "a hill", "shrinking", "short"],
)
def test_one_sample_does_not_decide_on_memory(
    sizes: list[int], last: float, peak: float, tail: float, passed: bool
) -> None:
    rss = talk(with_memory(sizes)).server_rss
    assert (rss.last_over_settled, rss.peak_over_settled, rss.tail_over_settled) == (last, peak, tail)
    verdict = gate(with_memory(sizes), "rss_bounded")
    assert (verdict.value, verdict.passed) == (tail, passed)


@pytest.mark.parametrize("turns", [steady((50, 1.0)), with_memory([1] * 20)])
def test_unseen_memory_is_not_judged(turns: list[Turn]) -> None:
    assert set(as_json(talk(turns).server_rss).values()) == {None}
    assert gate(turns, "rss_bounded").passed is None


def test_buckets_are_ten_minutes_each() -> None:
    begun = [Turn(n, 200.0 * n, 0.5, prompt_tokens=10 * n, answer_tokens=2) for n in range(3)]
    late = Turn(4, 1900.0, error_class="Unavailable", error_str="gone")
    rows = talk([*begun, late]).buckets_10min
    assert [row["from_s"] for row in rows] == [0, 600, 1200, 1800]
    assert [row["n_turns"] for row in rows] == [3, 0, 0, 0]
    assert [row["n_errors"] for row in rows] == [0, 0, 0, 1]
    assert (rows[0]["latency_p50_s"], rows[0]["history_tokens_max"]) == (0.5, 22)
    assert rows[1]["latency_p50_s"] is rows[1]["kv_live_bytes_max"] is None


def test_beside_compares_only_turns_that_both_did() -> None:
    ours = talk([said(n, 1.0 if n < 50 else 100.0) for n in range(1, 80)])
    theirs = talk([*(said(n, 3.0 if n >= 20 else 2.0) for n in range(1, 40)), failed(40, stopped=True)])
    assert beside(theirs, ours) == 3.0
    assert beside(theirs, talk([failed(1)])) is None
    assert beside(talk([]), ours) is None


def test_the_yardstick_is_one_of_ours() -> None:
    def times(*ways: tuple[str, float]) -> dict[str, float | None]:
        return ConversationResults([talk([said(1, latency)], way) for way, latency in ways]).times_ours

    assert times((CHAT, 2.0), (LLAMA, 5.0)) == {CHAT: 1.0, LLAMA: 2.5}
    assert times((GRPC, 1.0), (CHAT, 4.0), (RESPONSES, 2.0)) == {GRPC: 0.5, CHAT: 2.0, RESPONSES: 1.0}
    assert times((LLAMA, 5.0)) == {}


def test_what_matching_saves() -> None:
    unmatched = talk([said(n, 1.0 + n) for n in range(1, 61)], UNMATCHED)
    both = ConversationResults([talk(steady((60, 1.0)), CHAT), unmatched]).unmatched_over_matched
    assert (both["head"], both["tail"], both["latency_p50_s"]) == (16.5, 46.5, 31.5)
    assert ConversationResults([unmatched]).unmatched_over_matched == {}


def growing(latency: float = 0.0, cached: bool = True, count: int = 60) -> list[Turn]:
    """Turns whose latency grows by so much with each."""
    changes = {} if cached else {"cached_tokens": 0}
    return [said(n, 1 + latency * n, **changes) for n in range(1, count + 1)]


COMPUTED, FULL = "prompt tokens computed, last over first", "latency once the window is full, last over first"


def test_gates_of_a_flat_run_pass() -> None:
    slower = growing(0.1, cached=False)
    gates = judged({RESPONSES: growing(), CHAT: growing(), UNMATCHED: slower, LLAMA: slower})
    assert [each.passed for each in gates.values()] == [True] * len(gates)
    assert set(gates) == {
        *(f"{way}: {name}" for way in (RESPONSES, CHAT) for name in ("prefill_bounded", COMPUTED, FULL)),
        *(f"{way}: errors" for way in (RESPONSES, CHAT, UNMATCHED)),
        "share of the machine that others used",
    }


def test_growing_turns_fail_the_gates() -> None:
    gates = judged({RESPONSES: growing(0.1, cached=False), CHAT: [*growing(), failed(61)]})
    failures = {name for name, each in gates.items() if each.passed is False}
    assert failures == {f"{RESPONSES}: {name}" for name in (COMPUTED, FULL, "prefill_bounded")} | {
        f"{CHAT}: errors"
    }
    assert judged({RESPONSES: growing(0.1)}, flat_limit=100.0)[f"{RESPONSES}: {FULL}"].passed


def test_what_cannot_be_judged_says_why() -> None:
    busy = judged({RESPONSES: growing(0.1), CHAT: growing()}, share=0.5)
    assert busy[f"{RESPONSES}: {FULL}"].passed is None
    assert busy[f"{RESPONSES}: {FULL}"].reason.startswith("others used 50%")
    assert busy["share of the machine that others used"].passed is False
    short = judged({RESPONSES: growing(count=7), UNMATCHED: []}, share=None)
    assert short[f"{RESPONSES}: {FULL}"].reason.startswith("fewer than 10 turns")
    assert short[f"{RESPONSES}: {COMPUTED}"].passed is None
    assert short["share of the machine that others used"].passed is None
    assert short[f"{UNMATCHED}: errors"].passed is None


def test_peers_are_judged_by_nothing() -> None:
    gates = judged({GRPC: growing(), TRANSFORMERS: [*growing(0.5), failed(61)]})
    assert not any(name.startswith(TRANSFORMERS) for name in gates)
