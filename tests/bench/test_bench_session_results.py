import pytest

from kakeya.bench.gates import Gate
from kakeya.bench.session_results import Limits, Turn, aggregate, buckets, ends, session_results

FULL = 1000


def turns(count: int, *, kv: int = 500, latency: float = 0.5, spacing: float = 1.0) -> list[Turn]:
    """Turns whose window filled before the first of them."""
    return [
        Turn(
            t_relative_s=place * spacing,
            user_message_tokens=8,
            latency_s=latency,
            ttft_s=latency / 5,
            n_emitted=4,
            kv_live_bytes=kv,
            history_length=FULL + 12 * place,
            dropped_token_count=12 * place + 1,
            server_rss_bytes=10_000,
        )
        for place in range(count)
    ]


def failed(moment: float = 0.0) -> Turn:
    return Turn(moment, 8, error_class="Unavailable", error_str="gone")


def gate(turns: list[Turn], name: str, limits: Limits | None = None, others: float | None = None) -> Gate:
    _, gates = session_results(turns, 1.0, limits or Limits(), others)
    return next(gate for gate in gates if gate.name == name)


def test_a_turn_tells_its_measurements_or_its_error() -> None:
    good, bad = turns(1)[0].to_dict(), failed(2.0).to_dict()
    assert good["ok"] is True
    assert {"t_relative_s", "latency_s", "ttft_s", "kv_live_bytes", "history_length", "n_emitted"} <= set(
        good
    )
    assert good["dropped_token_count"] == 1
    assert "error_class" not in good
    assert bad == {
        "ok": False,
        "t_relative_s": 2.0,
        "user_message_tokens": 8,
        "error_class": "Unavailable",
        "error_str": "gone",
    }


def test_the_aggregate_counts_successes_and_errors() -> None:
    run = [*turns(4), failed(9.0)]
    total = aggregate(run, 12.5)
    assert (total["n_turns"], total["n_errors"], total["duration_s"]) == (4, 1, 12.5)
    assert total["history_length"] == FULL + 36
    assert total["kv_live_bytes"] == {"min": 500, "mean": 500, "max": 500}


def test_percentiles_are_interpolated() -> None:
    run = [turn for latency in (1.0, 2.0, 3.0, 4.0) for turn in turns(1, latency=latency)]
    total = aggregate(run, 1.0)
    assert total["latency_p50_s"] == 2.5
    assert total["latency_p95_s"] == pytest.approx(3.85)
    assert total["ttft_p50_s"] == pytest.approx(0.5)
    assert total["ttft_p95_s"] == pytest.approx(0.77)


def test_an_empty_run_has_no_numbers_and_no_verdict() -> None:
    results, gates = session_results([], 0.0, Limits(), 0.0)
    total = results["aggregate"]
    assert total["latency_p50_s"] is total["kv_live_bytes"]["mean"] is total["tail_over_head"] is None
    assert total["buckets_10min"] == []
    assert [gate.passed for gate in gates] == [None] * 4


def test_ends_are_fifty_turns_or_half_of_a_short_run() -> None:
    slow_middle = turns(50, latency=1.0) + turns(30, latency=9.0) + turns(50, latency=2.0)
    assert ends(slow_middle) == (1.0, 2.0)
    uneven = turns(20, latency=1.0) + turns(60, latency=1.5) + turns(20, latency=3.0)
    assert ends(uneven) == (1.5, 1.5)
    assert ends(turns(5, latency=1.0) + turns(1, latency=7.0) + turns(5, latency=3.0)) == (1.0, 3.0)
    assert ends(turns(9)) == (None, None)


def test_drift_may_be_negative() -> None:
    total = aggregate(turns(10, latency=2.0) + turns(10, latency=1.5), 1.0)
    assert total["latency_drift_p50_s"] == -0.5
    assert total["tail_over_head"] == 0.75


def test_prefill_is_bounded_up_to_the_limit() -> None:
    run = turns(50, latency=1.0) + turns(50, latency=1.06)
    assert gate(run, "prefill_bounded").passed is False
    assert gate(run, "prefill_bounded", Limits(tail=1.07)).passed is True
    assert gate(turns(100), "prefill_bounded").passed is True
    few = gate(turns(9), "prefill_bounded")
    assert few.passed is None
    assert "9 turns" in few.reason


@pytest.mark.parametrize("others", [None, 0.0, 0.05])
def test_latencies_are_judged_on_a_quiet_machine_and_where_nobody_knows(others: float | None) -> None:
    assert gate(turns(100), "prefill_bounded", others=others).passed is True
    slower = turns(50, latency=1.0) + turns(50, latency=2.0)
    assert gate(slower, "prefill_bounded", others=others).passed is False


@pytest.mark.parametrize("latency", [0.5, 5.0])
def test_on_a_busy_machine_memory_and_errors_are_judged_and_latencies_are_not(latency: float) -> None:
    run = [*turns(50), *turns(50, latency=latency)]
    results, gates = session_results(run, 1.0, Limits(), 0.2)
    assert {each.name: each.passed for each in gates} == {
        "kv_bounded": True,
        "prefill_bounded": None,
        "rss_bounded": True,
        "errors": True,
    }
    busy = gate(run, "prefill_bounded", others=0.2)
    assert busy.value is None
    assert busy.reason == "others used 20% of the machine, so ratios mean nothing"
    assert results["aggregate"]["prefill_bounded"] is None
    assert results["aggregate"]["tail_over_head"] == latency / 0.5
    varied = [*turns(50), *turns(50, kv=1), failed()]
    assert gate(varied, "kv_bounded", others=0.2).passed is False
    assert gate(varied, "errors", others=0.2).passed is False
    leaking = with_memory([1000 + 10 * place for place in range(40)])
    assert gate(leaking, "rss_bounded", others=0.2).passed is False


def test_failed_turns_are_no_part_of_the_ends() -> None:
    run = [*turns(10, latency=1.0), *(failed() for _ in range(50)), *turns(10, latency=1.0)]
    assert gate(run, "prefill_bounded").value == 1.0
    assert gate(run, "errors").passed is False


def test_kv_is_judged_past_the_plateau_only() -> None:
    filling = [Turn(0.0, 8, latency_s=1.0, kv_live_bytes=kv, dropped_token_count=0) for kv in (10, 100)]
    assert gate(filling + turns(5), "kv_bounded").passed is True
    varied = gate(filling + turns(5) + turns(5, kv=449), "kv_bounded")
    assert varied.passed is False
    assert varied.value == pytest.approx(0.102)
    assert gate(filling + turns(5) + turns(5, kv=449), "kv_bounded", Limits(kv=0.2)).passed is True
    unfilled = gate(filling, "kv_bounded")
    assert unfilled.passed is None
    assert unfilled.reason == "the window never filled"
    assert gate([failed()], "kv_bounded").reason == "no turn went well"


def test_one_turn_past_the_plateau_has_no_spread() -> None:
    filling = [Turn(0.0, 8, latency_s=1.0, kv_live_bytes=kv, dropped_token_count=0) for kv in (10, 100)]
    one = gate(filling + turns(1), "kv_bounded")
    assert one.passed is one.value is None
    assert one.reason == "the window was full in fewer than 2 turns"
    assert aggregate(filling + turns(1), 1.0)["kv_spread_after_plateau"] is None
    assert gate(filling + turns(2), "kv_bounded").passed is True
    assert gate(filling + turns(1) + turns(1, kv=400), "kv_bounded").value == pytest.approx(0.2)


def test_kv_of_all_zeros_fails() -> None:
    assert gate(turns(5, kv=0), "kv_bounded").passed is False
    unfilled = [Turn(0.0, 8, latency_s=1.0, kv_live_bytes=0, dropped_token_count=0)]
    assert gate(unfilled, "kv_bounded").passed is False
    # A measurement that turns into nothing once the window is full is no bound either.
    before = Turn(0.0, 8, latency_s=1.0, kv_live_bytes=7, dropped_token_count=0)
    assert gate([before, *turns(5, kv=0)], "kv_bounded").passed is False


def test_verdicts_stand_in_the_aggregate() -> None:
    results, _ = session_results(turns(100), 1.0, Limits(), 0.01)
    assert results["bystanders_share"] == 0.01
    assert results["aggregate"]["kv_bounded"] is True
    assert results["aggregate"]["prefill_bounded"] is True
    assert results["aggregate"]["rss_bounded"] is True
    assert len(results["turns"]) == 100


def with_memory(sizes: list[int]) -> list[Turn]:
    return [
        Turn(float(place), 8, latency_s=1.0, kv_live_bytes=5, dropped_token_count=1, server_rss_bytes=size)
        for place, size in enumerate(sizes)
    ]


def test_memory_is_judged_from_turn_twenty_on() -> None:
    settled = with_memory([*range(1, 20), *([1000] * 10)])
    total = aggregate(settled, 1.0)["server_rss"]
    assert total["settled_bytes"] == total["last_bytes"] == 1000
    assert total["slope_bytes_per_s"] == 0
    growing = with_memory([1000 + 10 * place for place in range(40)])
    total = aggregate(growing, 1.0)["server_rss"]
    assert total["settled_bytes"] == 1190
    assert total["slope_bytes_per_s"] == pytest.approx(10)
    assert gate(growing, "rss_bounded").passed is False
    assert gate(settled, "rss_bounded").passed is True


@pytest.mark.parametrize(
    ("sizes", "last", "peak", "tail", "passed"),
    [
        ([*([1000] * 40), 1500], 1.5, 1.5, 1.0, True),
        ([*([1000] * 20), *([1200] * 30), 1000], 1.0, 1.2, 1.2, False),
    ],
    ids=["a spike", "a late give-back"],
)
def test_one_sample_does_not_decide_on_memory(
    sizes: list[int], last: float, peak: float, tail: float, passed: bool
) -> None:
    total = aggregate(with_memory(sizes), 1.0)["server_rss"]
    assert total["last_over_settled"] == last
    assert total["peak_over_settled"] == peak
    assert total["tail_over_settled"] == tail
    judged = gate(with_memory(sizes), "rss_bounded")
    assert (judged.value, judged.passed) == (tail, passed)


def test_the_tail_of_memory_is_twenty_samples_after_the_settled_one() -> None:
    earlier = with_memory([*([1000] * 20), *([5000] * 30), *([1005] * 20)])
    assert aggregate(earlier, 1.0)["server_rss"]["tail_over_settled"] == 1.005
    shrinking = aggregate(with_memory([*([1000] * 20), *([900] * 30)]), 1.0)["server_rss"]
    assert (shrinking["peak_over_settled"], shrinking["tail_over_settled"]) == (1.0, 0.9)
    # Neither the turns before it nor the settled one itself make a short run look flat.
    short = with_memory([*([1000] * 20), 1100])
    total = aggregate(short, 1.0)["server_rss"]
    assert total["tail_over_settled"] == total["peak_over_settled"] == 1.1
    assert gate(short, "rss_bounded").passed is False


def test_unseen_memory_is_not_judged() -> None:
    blind = [Turn(0.0, 8, latency_s=1.0) for _ in range(50)]
    assert set(aggregate(blind, 1.0)["server_rss"].values()) == {None}
    assert set(aggregate(with_memory([1] * 20), 1.0)["server_rss"].values()) == {None}
    assert gate(blind, "rss_bounded").passed is None
    assert gate(with_memory([1] * 20), "rss_bounded").passed is None


def test_buckets_are_ten_minutes_each() -> None:
    run = [*turns(3, spacing=200.0), failed(1900.0)]
    rows = buckets(run)
    assert [row["from_s"] for row in rows] == [0, 600, 1200, 1800]
    assert [row["n_turns"] for row in rows] == [3, 0, 0, 0]
    assert [row["n_errors"] for row in rows] == [0, 0, 0, 1]
    assert rows[0]["latency_p50_s"] == 0.5
    assert rows[0]["history_length"] == FULL + 24
    assert rows[1]["latency_p50_s"] is rows[1]["kv_live_bytes_max"] is None
