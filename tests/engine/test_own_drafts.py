"""How many tokens a backend drafts by itself: what pays, by chances and costs."""

import itertools

from kakeya.engine.own_drafts import OwnDrafts

COUNTS = (3, 7)
SECONDS = {0: 1.0, 3: 1.6, 7: 2.2}


def drafts() -> OwnDrafts:
    return OwnDrafts(COUNTS, most_sessions=8)


def run(
    own: OwnDrafts, steps: int, right: int, sessions: int = 1, seconds: dict[int, float] = SECONDS
) -> list[int]:
    """Steps of which every session keeps up to `right` guesses; how many were drafted in each."""
    counts = []
    for _ in range(steps):
        count = own.count(sessions)
        own.learn(sessions, count, seconds[count])
        for _ in range(sessions if count else 0):
            own.judged(count, min(right, count))
        counts.append(count)
    return counts


def test_every_number_is_tried_and_the_fastest_is_kept() -> None:
    counts = run(drafts(), 100, right=7)
    assert set(counts[:12]) == {0, 3, 7}
    assert counts[12:] == [7] * 88


def test_a_short_draft_is_taken_where_a_long_one_is_never_right() -> None:
    assert set(run(drafts(), 200, right=3)[100:]) == {3}


def test_nothing_is_drafted_that_does_not_pay_and_little_is_tried() -> None:
    counts = run(drafts(), 4000, right=0)
    assert set(counts[100:]) == {0, 3}
    lost = sum(SECONDS[count] - SECONDS[0] for count in counts[3000:])
    assert lost < 0.006 * len(counts[3000:])


def test_who_is_often_right_is_tried_as_often_as_ever() -> None:
    """One guess alone does not pay here, but it may soon be two."""
    counts = run(drafts(), 4000, right=1, seconds={0: 1.0, 3: 2.5, 7: 3.5})
    trials = [at for at in range(2000, 4000) if counts[at] and not counts[at - 1]]
    assert {later - earlier for earlier, later in itertools.pairwise(trials)} == {256 + 8}


def test_drafting_comes_back_when_guesses_become_right() -> None:
    own = drafts()
    run(own, 1000, right=0)
    assert run(own, 2000, right=7)[-1] == 7


def test_a_crowd_for_which_it_costs_too_much_drafts_nothing() -> None:
    """The same guesses pay for one session and not for eight."""
    own = drafts()
    dear = {0: 1.0, 3: 5.0, 7: 9.0}
    for _ in range(5):
        alone, together = run(own, 50, right=7), run(own, 50, right=7, sessions=8, seconds=dear)
    assert set(alone) == {7}
    assert set(together) <= {0, 3}
    assert together.count(0) > 40


def test_more_sessions_than_a_step_holds_draft_nothing() -> None:
    own = drafts()
    assert own.count(9) == 0
    own.learn(9, 0, 1.0)
    assert run(own, 1, right=0) == [0]
