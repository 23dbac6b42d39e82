"""How many tokens are drafted: as many as pay, from what was measured."""

import pytest

from kakeya.engine.draft_length import Acceptance, DraftLength, Offer, Price, StepCosts


def costs(**seconds: float) -> StepCosts:
    """Measured step times by rows, such as r1=1.0."""
    known = StepCosts()
    for rows, value in seconds.items():
        known.learn(int(rows[1:]), value)
    return known


def length(known: StepCosts) -> DraftLength:
    decide = DraftLength()
    decide.costs = known
    return decide


def test_costs_are_interpolated_between_what_was_measured() -> None:
    known = costs(r1=1.0, r5=3.0)
    assert known.seconds(1) == 1.0
    assert known.seconds(3) == pytest.approx(2.0)
    assert known.seconds(5) == 3.0


def test_what_was_not_measured_costs_what_is_known_below_it() -> None:
    assert StepCosts().seconds(9) == 0.0
    assert costs(r1=1.0, r4=2.0).seconds(100) == 2.0
    assert costs(r4=2.0).seconds(1) == 2.0


def test_a_time_follows_the_machine_and_is_forgotten_when_stale() -> None:
    known = costs(r1=1.0, r8=50.0)
    for _ in range(60):
        known.learn(1, 3.0)
    assert known.seconds(1) == pytest.approx(3.0, rel=0.01)
    assert known.seconds(8) == 50.0
    for _ in range(500):
        known.learn(1, 3.0)
    assert known.seconds(8) == pytest.approx(3.0), "tried again, as if nobody had measured it"


def test_longer_steps_of_some_time_ago_can_be_doubted() -> None:
    """Two rows were measured while the machine was slow."""
    known = costs(r2=36.0)
    for _ in range(20):
        known.learn(1, 20.0)
    known.learn(8, 50.0)
    known.doubt(2)
    assert known.seconds(2) == 36.0, "as long as that is not longer than the steps that run"
    known.doubt(1)
    assert known.seconds(2) < 25.0
    assert known.seconds(8) == 50.0, "it was measured just now"


@pytest.mark.parametrize(
    "rows_are, chance, drafted",
    [("free", 0.5, 4), ("free", 0.9, 8), ("free", 0.1, 0), ("dear", 0.9, 0), ("cheap", 0.95, 8)],
)
def test_as_many_are_drafted_as_pay(rows_are: str, chance: float, drafted: int) -> None:
    each = {"free": 0.0, "cheap": 0.1, "dear": 1.0}[rows_are]
    decide = length(costs(**{f"r{rows}": 1.0 + each * (rows - 1) for rows in (1, 2, 3, 4, 5, 6, 8, 10)}))
    assert decide.counts(1, [Offer(chance, 8)]) == [drafted]


def test_a_draft_ends_where_its_tokens_cease_to_pay() -> None:
    decide = length(costs(**{f"r{rows}": 1.0 + 0.25 * (rows - 1) for rows in (1, 2, 3, 4, 5, 6, 8, 10)}))
    (count,) = decide.counts(1, [Offer(0.7, 8)])
    rates = [
        (1 + sum(0.7**place for place in range(1, rows + 1))) / (1 + 0.25 * rows) for rows in range(1, 9)
    ]
    assert count == 1 + rates.index(max(rates))


def test_who_is_right_more_often_drafts_more() -> None:
    decide = length(costs(**{f"r{rows}": 4.0 + 0.3 * rows for rows in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20)}))
    good, bad = decide.counts(2, [Offer(0.95, 8), Offer(0.3, 8)])
    assert good > bad


def test_a_crowd_that_fills_the_machine_drafts_nothing() -> None:
    linear = length(costs(r64=64.0, r128=128.0, r512=512.0, r1024=1024.0))
    assert linear.counts(64, [Offer(0.9, 8)] * 64) == [0] * 64


def test_a_proposer_that_takes_longer_than_it_saves_is_not_asked() -> None:
    decide = length(costs(r1=1.0, r10=1.0))
    assert decide.counts(1, [Offer(0.9, 8)], Price(0.1)) == [8]
    assert decide.counts(1, [Offer(0.9, 8)], Price(1.0)) == [0]


def test_what_watching_takes_is_not_the_price_of_plain_decoding() -> None:
    decide = DraftLength()
    decide.learn(1, 1, 1.0, watched=False)
    decide.learn(1, 1, 1.5, watched=True)
    decide.learn(1, 3, 1.8, watched=True)
    assert (decide.costs.seconds(1), decide.watching) == (1.0, 0.5)
    assert decide.costs.seconds(3) == pytest.approx(1.3)
    offer = Offer(0.5, 2)  # 1.75 tokens, in 1.3 seconds or in 1.8
    assert decide.counts(1, [offer]) == [2]
    assert decide.counts(1, [offer], Price(a_step=decide.watching)) == [0]


def test_one_measurement_alone_is_not_sure() -> None:
    known = costs(r1=1.0)
    assert not known.is_sure(1)
    for _ in range(3):
        known.learn(1, 1.0)
    assert known.is_sure(1)
    assert not known.is_sure(2)
    for _ in range(600):
        known.learn(8, 1.0)
    assert not known.is_sure(1), "that was long ago"


def test_a_chance_follows_the_last_guesses() -> None:
    record = Acceptance()
    assert record.chance == 0.0
    record.count(right=30, wrong=0)
    assert record.chance > 0.9
    for _ in range(12):
        record.count(right=0, wrong=1)
    assert record.chance < 0.3


def test_what_is_not_drafted_is_compared_with_what_comes() -> None:
    record = Acceptance()
    for token in (5, 6):
        record.watched = 3, [token, 9]
        record.watch([1, 2, 3])
        assert record.watched is not None, "nothing has come yet"
        record.watch([1, 2, 3, 5])
        assert record.watched is None
    right_then_wrong = Acceptance()
    right_then_wrong.count(1, 1)
    assert record.chance == right_then_wrong.chance
    late = Acceptance(watched=(1, [5, 6, 7, 8]))
    late.watch([4, 5, 6, 0, 8])
    expected = Acceptance()
    expected.count(2, 1)
    assert late.chance == expected.chance


def test_who_was_wrong_too_often_is_asked_now_and_then() -> None:
    record = Acceptance()

    def asked(least: float, streams: int) -> list[int]:
        return [position for position in range(40) if not record.naps(position, least, streams)]

    assert asked(0.2, streams=1) == list(range(0, 40, 4))
    assert asked(0.2, streams=10) == [0, 10, 20, 30]
    assert asked(0.2, streams=99) == [0, 16, 32]
    record.count(right=5, wrong=0)
    assert asked(0.2, streams=1) == list(range(40))
    assert len(asked(0.9, streams=1)) == 10, "where a row must be right more often than that"


def test_few_guesses_are_believed_less_than_many() -> None:
    few, many = Acceptance(right=2.0, judged=4.0), Acceptance(right=5.0, judged=10.0)
    assert few.chance == many.chance == 0.5
    assert few.sure_chance == pytest.approx(0.25)
    assert many.sure_chance == pytest.approx(0.5 - 0.1 * 2.5**0.5)
    assert Acceptance(right=3.0, judged=3.0).sure_chance == 1.0
    assert Acceptance(right=1.0 + 1e-9, judged=1.0).sure_chance >= 1.0, "rounded up"


def test_in_a_crowd_a_guess_must_be_right_more_often() -> None:
    lone, crowd = length(costs(r1=1.0, r2=1.0, r3=1.5)), length(costs(r16=1.0, r20=1.2, r24=1.25))
    assert lone.least_chance(1) == 0.2, "a second row costs nothing"
    assert crowd.least_chance(16) == pytest.approx(16 * 0.25 / 8), "where rows cost least"
    assert length(costs(r1=0.0, r2=1.0)).least_chance(1) == 0.2, "too quick for the clock"
    assert length(costs()).least_chance(1) == length(costs(r16=1.0)).least_chance(16) == 0.2, (
        "nothing is known"
    )


def test_drafts_must_be_faster_than_a_device_that_runs_ahead() -> None:
    decide, offers = length(costs(r1=1.0, r2=1.0, r4=1.1)), [Offer(0.9, 3)]
    assert decide.counts(1, offers) == [3]
    decide.learn(1, 1, 0.5, ahead=True)
    assert decide.counts(1, offers) == [3]
    decide.learn(1, 1, 0.1, ahead=True)
    assert decide.counts(1, offers) == [3], "one quick step alone is little to go by"
    for _ in range(20):
        decide.learn(1, 1, 0.1, ahead=True)
    assert decide.counts(1, offers) == [0]


def tries(record: Acceptance, steps: range) -> list[int]:
    """The steps in which it takes heart, always in vain."""
    found = []
    for step in steps:
        record.take_heart(step)
        if record.chance > 0.5:
            found.append(step)
            for _ in range(20):
                record.count(right=0, wrong=1)
    return found


def test_tries_become_seldom_until_one_pays() -> None:
    record = Acceptance()
    assert tries(record, range(1, 2049)) == [32, 64, 128, 256, 512, 1024, 1536, 2048]
    for step in range(2049, 2060):
        record.is_asked(step)
    assert tries(record, range(2060, 2200)) == [2080, 2112, 2176]


def test_sessions_whose_tries_are_seldom_are_tried_together() -> None:
    old, young = Acceptance(), Acceptance()
    tries(old, range(1, 700))
    tries(young, range(333, 700))
    later = range(700, 4000)
    assert set(tries(young, later)) >= set(tries(old, later)) == {1024, 1536, 2048, 2560, 3072, 3584}


def test_a_draft_is_near_after_one_has_paid_and_before_a_try() -> None:
    record = Acceptance()
    assert all(record.is_near(step) for step in range(1, 33)), "nobody has tried it"
    tries(record, range(1, 520))
    near = [step for step in range(520, 1025) if record.is_near(step)]
    assert near == list(range(960, 1024))
    record.is_asked(600)
    assert [step for step in range(600, 900) if record.is_near(step)] == list(range(600, 608))


def test_a_session_begins_with_what_came_out_in_others() -> None:
    overall = Acceptance(right=1.5, pause=256)
    begun = overall.for_a_session()
    assert (begun.chance, begun.pause) == (0.5, 256)
    assert not begun.is_near(200)


def test_what_was_not_measured_is_tried_by_degrees() -> None:
    assert length(costs()).counts(1, [Offer(0.95, 8)]) == [0], "nothing is known"
    young = length(costs(r1=1.0))
    found = []
    for _ in range(6):
        (count,) = young.counts(1, [Offer(0.95, 8)])
        found.append(count)
        young.costs.learn(1 + count, 1.0)
    assert found == [1, 3, 7, 8, 8, 8]
    crowd = length(costs(r16=1.0))
    assert sum(crowd.counts(16, [Offer(0.95, 8)] * 16)) == 4, "of many rows a few more"


def test_what_a_draft_saves_pays_for_its_preparation() -> None:
    decide = length(costs(r1=1.0, r2=1.0))
    assert decide.saving(1, Offer(0.8, 1), Price(0.2)) == pytest.approx(1 - 1.2 / 1.8)
    assert decide.saving(1, Offer(0.8, 1), Price(1.0)) < 0


def test_to_wait_pays_as_long_as_a_token_is_cheaper_by_it() -> None:
    decide = length(costs(r1=1.0, r3=1.2))
    kept = 0.8 + 0.64
    assert decide.worth(1, 0.8, 2) == pytest.approx(1.0 - 1.2 / (1 + kept))
    assert decide.worth(1, 0.8, 2) > decide.worth(1, 0.4, 2) > decide.worth(1, 0.1, 2) == 0.0
    assert length(costs(r1=1.0, r2=2.0)).worth(1, 0.5, 1) == 0.0, "rows that cost as much as steps"
    crowd = length(costs(r1=1.0, r16=1.0, r18=1.0))
    assert crowd.worth(16, 0.8, 2) < crowd.worth(1, 0.8, 2) / 4, "all of them would wait for one"


def test_what_works_ahead_is_given_another_try_and_silence_counts_against_it() -> None:
    acceptance = Acceptance()
    acceptance.hope()
    assert acceptance.chance > 0.2
    for _ in range(30):
        acceptance.missed()
    assert acceptance.chance < 0.2
    trusted = Acceptance(right=2.9)
    trusted.hope()
    assert trusted.right == 2.9
