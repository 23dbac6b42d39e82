"""What `bench turns` and `bench http-session` conclude from turns."""

from typing import Any

import pytest

from kakeya.bench.http_session_results import as_session_turn, http_session_gates, http_session_results
from kakeya.bench.turns_results import (
    LLAMA,
    MATCHED,
    RESPONSES,
    TRANSFORMERS,
    UNMATCHED,
    Answered,
    Turn,
    answers,
    beside,
    ends,
    once_full,
    summary,
    turns_gates,
    turns_results,
)


def answered(number: int, latency_s: float = 1.0, **changes: Any) -> Turn:
    """A turn of 10 new tokens in a history that grows by 15."""
    prompt = 15 * number - 5
    fields = {"ttft_s": 0.5, "prompt_tokens": prompt, "answer_tokens": 5, "cached_tokens": prompt - 10}
    return Turn(number, float(number), Answered(latency_s, **(fields | changes)))


def failed(number: int, *, stopped: bool = False) -> Turn:
    return Turn(number, float(number), None, "RemoteError", "it broke", stopped)


def test_an_answer_knows_its_history_and_what_was_computed() -> None:
    answer = Answered(1.0, 0.5, prompt_tokens=30, answer_tokens=4, cached_tokens=20)
    assert (answer.history_tokens, answer.computed_tokens) == (34, 10)
    assert Answered(1.0, None, 30, 4).computed_tokens == 30


def test_a_turn_tells_what_applies_to_it() -> None:
    assert answered(2, ttft_s=None).to_dict() == {
        "turn": 2,
        "t_relative_s": 2.0,
        "ok": True,
        "latency_s": 1.0,
        "prompt_tokens": 25,
        "answer_tokens": 5,
        "cached_tokens": 15,
    }
    assert failed(3, stopped=True).to_dict() == {
        "turn": 3,
        "t_relative_s": 3.0,
        "ok": False,
        "error_class": "RemoteError",
        "error_str": "it broke",
        "stopped": True,
    }


def test_ends_are_medians_of_the_first_and_last_turns() -> None:
    good = answers([answered(number, float(number)) for number in range(1, 101)])
    assert ends(good, lambda each: each.latency_s) == {
        "turns": 20,
        "first": 10.5,
        "last": 90.5,
        "last_over_first": pytest.approx(90.5 / 10.5),
    }


def test_short_runs_have_shorter_ends_and_the_shortest_none() -> None:
    good = answers([answered(number, float(number)) for number in range(1, 12)])
    assert ends(good, lambda each: each.latency_s)["turns"] == 5
    assert ends(good, lambda each: each.latency_s)["last"] == 9
    nothing = {"turns": 0, "first": None, "last": None, "last_over_first": None}
    assert ends(good[:9], lambda each: each.latency_s) == nothing
    assert ends(good, lambda each: None) == nothing


def test_a_summary_counts_what_went_well() -> None:
    turns = [*(answered(number) for number in range(1, 13)), failed(13), failed(14, stopped=True)]
    total = summary(turns, slab_tokens=100)
    assert (total["n_turns"], total["n_errors"]) == (12, 2)
    assert total["history_tokens"] == 15 * 12
    assert total["mean_answer_tokens"] == 5
    assert total["stopped"] == {"turn": 14, "why": "it broke"}
    assert total["computed_tokens"]["first"] == total["computed_tokens"]["last"] == 10
    assert total["latency_once_full"]["turns"] == 0


def test_a_summary_of_nothing_is_empty() -> None:
    total = summary([], slab_tokens=100)
    assert (total["n_turns"], total["stopped"], total["history_tokens"]) == (0, None, None)
    assert total["mean_answer_tokens"] is None
    assert summary([failed(1)], 100)["stopped"] is None


def test_turns_count_as_full_when_the_history_is_longer_than_a_slab() -> None:
    good = answers([answered(number) for number in range(1, 5)])
    assert [each.prompt_tokens for each in once_full(good, 25)] == [40, 55]


def test_beside_compares_only_turns_that_both_did() -> None:
    ours = [answered(number, 1.0 if number < 50 else 100.0) for number in range(1, 80)]
    slower = [answered(number, 3.0 if number >= 20 else 2.0) for number in range(1, 40)]
    theirs = [*slower, failed(40, stopped=True)]
    assert beside(theirs, ours) == 3.0
    assert beside(theirs, [failed(1)]) is None
    assert beside([], ours) is None


def test_without_responses_the_matched_chat_is_the_yardstick() -> None:
    turns = {MATCHED: [answered(1, 2.0)], LLAMA: [answered(1, 5.0)]}
    rows = turns_results(turns, 100)
    assert [row["contestant"] for row in rows] == [MATCHED, LLAMA]
    assert rows[1]["summary"]["times_ours_at_its_end"] == 2.5
    assert turns_results({LLAMA: [answered(1)]}, 100)[0]["summary"]["times_ours_at_its_end"] is None


def judged(turns: dict[str, list[Turn]], others: float | None = 0.0, limit: float = 1.05) -> dict[str, Any]:
    results = {"contestants": turns_results(turns, 100), "bystanders_share": others}
    return {gate.name: gate for gate in turns_gates(results, limit)}


def talk(latency: float = 0.0, cached: bool = True, count: int = 60) -> list[Turn]:
    """Turns whose latency grows by so much with each."""
    changes = {} if cached else {"cached_tokens": 0}
    return [answered(number, 1 + latency * number, **changes) for number in range(1, count + 1)]


def test_gates_of_a_flat_run_pass() -> None:
    growing = talk(0.1, cached=False)
    gates = judged({RESPONSES: talk(), MATCHED: talk(), UNMATCHED: growing, LLAMA: growing})
    assert [gate.passed for gate in gates.values()] == [True] * len(gates)
    assert not any(name.startswith((LLAMA, f"{UNMATCHED}: lat")) for name in gates)


def test_growing_turns_fail_the_gates() -> None:
    gates = judged({RESPONSES: talk(0.1, cached=False), MATCHED: [*talk(), failed(61)]})
    assert gates[f"{RESPONSES}: prompt tokens computed, last over first"].passed is False
    assert gates[f"{RESPONSES}: latency once the window is full, last over first"].passed is False
    assert gates[f"{MATCHED}: prompt tokens computed, last over first"].passed is True
    assert gates[f"{RESPONSES}: errors"].passed is True
    assert gates[f"{MATCHED}: errors"].passed is False
    assert judged({RESPONSES: talk(0.1)}, limit=100.0)[
        f"{RESPONSES}: latency once the window is full, last over first"
    ].passed


def test_what_cannot_be_judged_says_why() -> None:
    latency = f"{RESPONSES}: latency once the window is full, last over first"
    busy = judged({RESPONSES: talk(0.1)}, others=0.5)
    assert busy[latency].passed is None
    assert "others used 50%" in busy[latency].reason
    assert busy["share of the machine that others used"].passed is False
    short = judged({RESPONSES: talk(count=7)}, others=None)
    assert short[latency].reason.startswith("fewer than 10 turns")
    assert short[f"{RESPONSES}: prompt tokens computed, last over first"].passed is None
    assert short["share of the machine that others used"].passed is None
    assert judged({RESPONSES: []})[f"{RESPONSES}: errors"].passed is None


def test_a_turn_over_http_is_a_turn_of_a_session() -> None:
    turn = as_session_turn(answered(3, dropped_tokens=7), message_tokens=8)
    assert turn.to_dict() == {
        "ok": True,
        "t_relative_s": 3.0,
        "user_message_tokens": 8,
        "latency_s": 1.0,
        "ttft_s": 0.5,
        "n_emitted": 5,
        "history_length": 45,
        "dropped_token_count": 7,
    }
    assert as_session_turn(failed(1), 8).to_dict()["error_str"] == "it broke"


def test_both_sides_are_aggregated_and_compared() -> None:
    turns = {MATCHED: talk(), UNMATCHED: [answered(n, 1.0 + n) for n in range(1, 61)]}
    results = http_session_results(turns, 60.0, message_tokens=8, slab_tokens=100)
    matched, unmatched = (row["aggregate"] for row in results["contestants"])
    assert matched["tail_over_head"] == 1.0
    assert (unmatched["head_latency_p50_s"], unmatched["tail_latency_p50_s"]) == (16.5, 46.5)
    assert results["unmatched_over_matched"]["tail_latency_p50_s"] == 46.5
    assert not {"kv_live_bytes", "server_rss"} & matched.keys()
    assert len(results["contestants"][0]["turns"]) == 60
    gates = {gate.name: gate.passed for gate in http_session_gates({**results, "bystanders_share": 0.05})}
    assert gates == {"prefill_bounded": True, f"{MATCHED}: errors": True, f"{UNMATCHED}: errors": True}


def test_http_session_gates_fail_and_abstain() -> None:
    broken = {MATCHED: talk(0.1), UNMATCHED: [*talk(), failed(61)]}
    results = http_session_results(broken, 60.0, 8, 100)
    unknown = http_session_gates({**results, "bystanders_share": None})
    assert [gate.passed for gate in unknown] == [False, True, False]
    busy = http_session_gates({**results, "bystanders_share": 0.3})
    assert [gate.passed for gate in busy] == [None, True, False]
    assert busy[0].reason == "others used 30% of the machine, so ratios mean nothing"
    empty = http_session_results({MATCHED: [], UNMATCHED: []}, 0.0, 8, 100)
    nothing = http_session_gates({**empty, "bystanders_share": 0.0})
    assert [gate.passed for gate in nothing] == [None, None, None]


def test_transformers_is_judged_by_nothing() -> None:
    assert not any(name.startswith(TRANSFORMERS) for name in judged({TRANSFORMERS: talk(0.5)}))
