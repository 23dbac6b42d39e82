import pytest

from kakeya.bench.cases import Case, Plan, run_group
from kakeya.bench.engine import CHOICES, full_plan, quick_plan
from kakeya.bench.text import prose, stretch
from kakeya.errors import PeerFailed


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


CASES = (Case(8), Case(0, 2, 4, 3))


def test_a_plan_can_be_limited() -> None:
    plan = full_plan(3)
    assert plan.limited(None, None) == plan
    short = plan.limited(1024, 1)
    assert [case.label for case in short.cases] == [
        "prompt of 128",
        "prompt of 512",
        "decode, 1 session at history 64",
        "decode, 1 session at history 1,024",
    ]
    assert {case.sessions for case in short.sampled} == {1}
    assert short.repeats == 3


def test_full_plan_covers_what_the_targets_name() -> None:
    cases = full_plan(5).cases
    assert [case.tokens for case in cases if case.is_prompt] == [128, 512]
    decodes = {(case.sessions, case.history) for case in cases if not case.is_prompt}
    assert {(1, history) for history in (64, 1024, 2048, 4096, 16384)} <= decodes
    assert {(sessions, history) for sessions in (8, 16, 32) for history in (64, 1024)} <= decodes


def test_sampling_is_measured_beside_greedy_decoding() -> None:
    sampled = full_plan(5).sampled
    shapes = [(case.sessions, case.history, case.choice) for case in sampled]
    assert shapes == [(sessions, 64, choice) for sessions in (1, 16, 32) for choice in CHOICES]
    assert len({case.steps for case in sampled if case.sessions == 16}) == 1
    greedy, *others = CHOICES.values()
    assert greedy.is_greedy
    assert not any(choice.is_greedy for choice in others)
    assert [choice.has_penalties for choice in others] == [False, True]


def test_plan_knows_how_many_sessions_exist_at_once() -> None:
    assert full_plan(1).most_sessions == 33  # 32 copies and the history they come from
    assert quick_plan(1).most_sessions == 3
    assert Plan(((Case(8),),), 1).most_sessions == 1
    assert Plan(((Case(8),),), 1, (Case(0, 5, 8, 1, "greedy"),)).most_sessions == 6


def test_largest_work_of_each_kind() -> None:
    prompt, batch, sampled = full_plan(1).largest_of_each_kind
    assert (prompt, batch) == (Case(512), Case(0, 32, 1024, 16))
    assert sampled.label == "decode, 32 sessions at history 64, top-p and penalty"
    assert len(Plan(((Case(8), Case(0, 1, 8, 1)),), 1).largest_of_each_kind) == 2


def test_labels_are_words() -> None:
    assert Case(1024).label == "prompt of 1,024"
    assert Case(0, 1, 64, 3).label == "decode, 1 session at history 64"
    assert Case(0, 16, 64, 3).label == "decode, 16 sessions at history 64"
    assert Case(0, 1, 64, 3, "top-p").label == "decode, 1 session at history 64, top-p"


def test_sides_take_turns_and_swap_who_is_first() -> None:
    log: list[str] = []
    announced: list[str] = []
    sides = [Recorder("a", log), Recorder("b", log)]
    speeds = run_group(sides, CASES, 2, announced.append)
    assert log == ["a", "b", "a", "b", "b", "a", "b", "a"]
    assert speeds["a", CASES[0]] == [1.0, 6.0]
    assert speeds["b", CASES[1]] == [4.0, 7.0]
    assert len(announced) == Plan((CASES,), 2).pieces_of_work(sides=2)
    sampled = Plan((CASES,), 2, (Case(0, 1, 4, 3, "greedy"),))
    assert sampled.pieces_of_work(sides=2) == len(announced) + 3
    assert sides[0].prepared == sides[1].prepared == set()


def test_everything_is_released_when_a_side_breaks() -> None:
    sides = [Recorder("a", []), Recorder("b", [], fails_at=CASES[1])]
    with pytest.raises(PeerFailed):
        run_group(sides, CASES, 1, lambda work: None)
    assert sides[0].prepared == sides[1].prepared == set()


def test_text_begins_again_when_it_ends() -> None:
    assert stretch([1, 2, 3], 0, 7) == [1, 2, 3, 1, 2, 3, 1]
    assert stretch([1, 2, 3], 5, 3) == [3, 1, 2]


def test_prose_is_long_plain_english() -> None:
    assert len(prose()) > 12_000
    assert prose().isascii()
