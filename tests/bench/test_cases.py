import pytest

from kakeya.bench.cases import CHOICES, LEAD_IN, LEAD_OUT, SAMPLED_TURNS, Case, Plan
from kakeya.errors import PeerFailed

GREEDY, TOP_P, PENALTY = CHOICES
PROMPT, DECODE, SAMPLED = Case(8), Case(0, 2, 4, 3), Case(0, 1, 4, 3, TOP_P)


def test_the_full_plan_covers_what_the_targets_name() -> None:
    prompts, alone, short, longer, sampled = Plan.full().groups
    assert prompts == (Case(128), Case(512))
    assert alone == tuple(Case(0, 1, history, 32) for history in (64, 1024, 2048, 4096, 16384))
    for group, history in ((short, 64), (longer, 1024)):
        assert group == tuple(Case(0, sessions, history, 16) for sessions in (8, 16, 32))
    steps = {1: 32, 16: 16, 32: 16}
    assert sampled == tuple(Case(0, n, 64, steps[n], choice) for n in steps for choice in CHOICES)
    assert [choice.is_greedy for choice in CHOICES.values()] == [True, False, False]
    assert [choice.has_penalties for choice in CHOICES.values()] == [False, False, True]
    assert min(LEAD_IN, LEAD_OUT - 1) >= 1, "uncounted rounds frame the counted ones"


def test_a_plan_can_be_limited() -> None:
    plan = Plan.full()
    assert plan.limited(None, None) == plan
    prompts, alone, sampled = plan.limited(1024, 1).groups
    assert [case.label() for case in prompts + alone] == [
        "prompt of 128",
        "prompt of 512",
        "decode, 1 session at history 64",
        "decode, 1 session at history 1,024",
    ]
    assert sampled[2].label() == "decode, 1 session at history 64, top-p and penalty"
    assert {case.sessions for case in sampled} == {1}
    assert Case(0, 16, 64, 3).label() == "decode, 16 sessions at history 64"


def test_a_plan_knows_what_it_needs() -> None:
    assert Plan.full().sessions_at_once() == 33  # 32 copies and the history they come from
    assert Plan.quick().sessions_at_once() == 3
    assert Plan([(PROMPT,)]).sessions_at_once() == 1
    assert Plan([(PROMPT,), (Case(0, 5, 8, 1, GREEDY),)]).sessions_at_once() == 6
    prompt, batch, sampled = Plan.full().largest_of_each_kind()
    assert (prompt, batch, sampled) == (Case(512), Case(0, 32, 1024, 16), Case(0, 32, 64, 16, PENALTY))


class Recorder:
    """A side that writes down what it is asked, in a log shared by both sides."""

    def __init__(self, name: str, log: list[str], fails_at: Case | None = None) -> None:
        self.name, self._log, self._fails_at = name, log, fails_at
        self.prepared: set[Case] = set()

    def prepare(self, case: Case) -> None:
        self.prepared.add(case)

    def measure(self, case: Case) -> float:
        assert case in self.prepared
        if case == self._fails_at:
            raise PeerFailed("broken")
        self._log.append(self.name)
        return float(len(self._log))

    def release(self) -> None:
        self.prepared.clear()


def test_sides_take_turns_that_every_other_time_go_backwards_and_ours_samples_alone() -> None:
    log: list[str] = []
    announced: list[str] = []
    sides = [Recorder("a", log), Recorder("b", log)]
    plan = Plan([(PROMPT, DECODE), (SAMPLED,)])
    *_, speeds = plan.measure(sides, 2, announced.append)
    assert log == ["a", "b", "a", "b", "b", "a", "b", "a"] + 2 * SAMPLED_TURNS * ["a"]
    assert speeds["a", PROMPT] == [1.0, 8.0]
    assert speeds["b", DECODE] == [4.0, 5.0]
    assert {key for key in speeds if key[1] == SAMPLED} == {("a", SAMPLED)}
    assert len(announced) == plan.pieces_of_work(sides=2, repeats=2) == 13 + 2 * SAMPLED_TURNS
    assert sides[0].prepared == sides[1].prepared == set()


def test_everything_is_released_when_a_side_breaks() -> None:
    sides = [Recorder("a", []), Recorder("b", [], fails_at=DECODE)]
    with pytest.raises(PeerFailed):
        list(Plan([(PROMPT, DECODE)]).measure(sides, 1, lambda work: None))
    assert sides[0].prepared == sides[1].prepared == set()
