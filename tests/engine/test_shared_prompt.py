"""Forks of one prompt: it is computed once at any length, and each says what it would have said alone."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor

from kakeya.config import EngineConfig
from kakeya.engine.engine import Engine
from kakeya.engine.recall import TAIL
from kakeya.engine.sequence import TokenSequence
from kakeya.observer import EngineObserver
from kakeya.types import Numerics, SamplingParams, ShareBeginnings, TokenRange
from support import tiny
from support.engines import done_of, tokens_of
from support.recalling import CACHE as WITH_RECALL

PROMPT = [(7 * i + i * i) % 59 + 2 for i in range(90)]
"""Many times what a window of 8 holds."""


@dataclass
class Counted(EngineObserver):
    computed: list[int] = field(default_factory=list)

    def prompt_computed(self, tokens: int) -> None:
        self.computed.append(tokens)


def config_of(**changes: object) -> EngineConfig:
    return tiny.engine_config(
        capacity=6, numerics=Numerics.EXACT, share_beginnings=ShareBeginnings.OFF, **changes
    )


def sampled(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed)


Make = Callable[..., tuple[Engine, Counted]]


@pytest.fixture(scope="module", params=["torch", "mlx"])
def decoder(tiny_llama: Path, request: pytest.FixtureRequest) -> tiny.Model:
    return tiny.load(tiny_llama, config_of(**tiny.COMPUTERS[request.param]))


@pytest.fixture
def make(decoder: tiny.Model, request: pytest.FixtureRequest) -> Make:
    def make(**changes: object) -> tuple[Engine, Counted]:
        config, counted = config_of(**changes), Counted()
        engine = Engine(tiny.make_backend(decoder, config), config, observer=counted).start()
        request.addfinalizer(engine.shutdown)
        return engine, counted

    return make


def forks_of(engine: Engine, count: int, *rest: object) -> list[TokenSequence]:
    """A session with the prompt, and forks of it: nothing is computed yet."""
    original = engine.open("me", [], *rest)
    engine.append(original, PROMPT)
    return [original, *(engine.fork(original) for _ in range(count - 1))]


def alone(engine: Engine, seed: int, tokens: int = 6, more: tuple[int, ...] = ()) -> list[int]:
    sequence = engine.open("me", [])
    engine.append(sequence, [*PROMPT, *more])
    said = tokens_of(engine.generate(sequence, tokens, sampled(seed)))
    engine.close(sequence)
    return said


def test_a_prompt_is_computed_once_for_all_forks(make: Make) -> None:
    engine, counted = make()
    expected = [alone(engine, seed) for seed in range(4)]
    counted.computed.clear()
    sequences = forks_of(engine, 4)
    streams = [engine.generate(each, 6, sampled(seed)) for seed, each in enumerate(sequences)]
    assert [tokens_of(stream) for stream in streams] == expected
    assert sum(counted.computed) == len(PROMPT) + 3  # the last token is each one's own
    assert [each.shared_prompt for each in sequences] == [None] * 4


def test_the_copy_counts_as_cached(make: Make) -> None:
    engine, _ = make()
    streams = [engine.generate(each, 1, sampled(0)) for each in forks_of(engine, 2)]
    assert [done_of(stream).cached_token_count for stream in streams] == [0, len(PROMPT) - 1]


def test_forks_that_ask_later_find_it_computed(make: Make) -> None:
    engine, counted = make()
    first, second = forks_of(engine, 2)
    expected = [alone(engine, seed) for seed in range(2)]
    assert tokens_of(engine.generate(first, 6, sampled(0))) == expected[0]
    counted.computed.clear()
    assert tokens_of(engine.generate(second, 6, sampled(1))) == expected[1]
    assert sum(counted.computed) == 1


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_who_leads_may_go(make: Make, end: str) -> None:
    engine, _ = make()
    expected = [alone(engine, seed) for seed in range(3)]
    sequences = forks_of(engine, 3)
    streams = [engine.generate(each, 6, sampled(seed)) for seed, each in enumerate(sequences)]
    if end == "cancel":
        streams[0].cancel()
    else:
        engine.close(sequences[0])
    assert [tokens_of(stream) for stream in streams[1:]] == expected[1:]


def test_a_fork_that_hears_more_shares_what_came_before(make: Make) -> None:
    engine, counted = make()
    expected = alone(engine, 0), alone(engine, 1, more=(5, 6, 7))
    original, fork = forks_of(engine, 2)
    engine.append(fork, [5, 6, 7])
    counted.computed.clear()
    streams = engine.generate(original, 6, sampled(0)), engine.generate(fork, 6, sampled(1))
    assert tuple(tokens_of(stream) for stream in streams) == expected
    assert sum(counted.computed) == len(PROMPT) + 1 + 3


def test_whoever_has_moved_on_is_not_copied(make: Make) -> None:
    """The fork leads, with more tokens than spare slots: at its end the original's window is overwritten."""
    engine, counted = make(prefill_block=64, max_batch_tokens=256)
    more = tuple(range(3, 43))
    expected = alone(engine, 0), alone(engine, 1, more=more)
    original, fork = forks_of(engine, 2)
    engine.append(fork, more)
    counted.computed.clear()
    assert tokens_of(engine.generate(fork, 6, sampled(1))) == expected[1]
    assert tokens_of(engine.generate(original, 6, sampled(0))) == expected[0]
    assert sum(counted.computed) == 2 * len(PROMPT) + len(more)


def test_a_fork_of_a_fork_waits_too(make: Make) -> None:
    engine, counted = make()
    expected = [alone(engine, seed) for seed in range(3)]
    original, fork = forks_of(engine, 2)
    sequences = [original, fork, engine.fork(fork)]
    counted.computed.clear()
    streams = [engine.generate(each, 6, sampled(seed)) for seed, each in enumerate(sequences)]
    assert [tokens_of(stream) for stream in streams] == expected
    assert sum(counted.computed) == len(PROMPT) + 2


def test_a_lent_fork_computes_for_itself(make: Make) -> None:
    engine, counted = make()
    expected = alone(engine, 1)
    original, fork = forks_of(engine, 2)
    engine.moves.lend(fork)
    engine.moves.stay(fork)
    assert (original.shared_prompt.members, fork.shared_prompt) == ({original}, None)
    assert tokens_of(engine.generate(original, 1, sampled(0)))
    counted.computed.clear()
    assert tokens_of(engine.generate(fork, 6, sampled(1))) == expected
    assert sum(counted.computed) == len(PROMPT)


def test_what_is_computed_is_not_shared(make: Make) -> None:
    engine, _ = make()
    sequence = engine.open("me", [])
    engine.append(sequence, [3])
    assert engine.fork(sequence).shared_prompt is None


LONG = PROMPT * 3
"""So long that its last 128 tokens, which see what was recalled, begin behind the first lap."""
NAMED = TokenRange(20, 24)


def long_forks(engine: Engine, count: int) -> list[TokenSequence]:
    original = engine.open("me", [], None, WITH_RECALL.recall)
    engine.append(original, LONG)
    engine.recall(original, [NAMED])
    return [original, *(engine.fork(original) for _ in range(count - 1))]


def slots_of(engine: Engine, sequence: TokenSequence) -> Tensor:
    """A copy of what its pinned slots hold."""
    return engine.read(
        sequence, lambda each: torch.cat([p.clone() for p in each.slab.by_slot(0, each.slab.sink)])
    )


@pytest.mark.parametrize("at_once", [True, False])
def test_forks_that_recall_share_the_prompt_up_to_there(make: Make, at_once: bool) -> None:
    engine, counted = make(cache=WITH_RECALL)
    (lonely,) = long_forks(engine, 1)
    expected = tokens_of(engine.generate(lonely, 4, sampled(0)))
    counted.computed.clear()
    sequences = long_forks(engine, 3)
    streams = [engine.generate(sequences[0], 4, sampled(0))]
    said = [] if at_once else [tokens_of(streams.pop())]
    streams += [engine.generate(each, 4, sampled(0)) for each in sequences[1:]]
    assert said + [tokens_of(stream) for stream in streams] == [expected] * 3
    at = (len(LONG) - TAIL) // TAIL * TAIL
    assert sum(counted.computed) == len(LONG) + 2 * (len(LONG) - at)
    for each in sequences:
        assert each.slab.recalled == lonely.slab.recalled == (NAMED,)
        assert slots_of(engine, each).equal(slots_of(engine, lonely))


def test_a_fork_that_recalls_something_else_shares_what_comes_before(make: Make) -> None:
    engine, counted = make(cache=WITH_RECALL)

    def answers(*sequences: TokenSequence) -> list[list[int]]:
        engine.recall(sequences[1], [TokenRange(30, 33)])
        return [tokens_of(s) for s in [engine.generate(each, 4, sampled(0)) for each in sequences]]

    apart = answers(*long_forks(engine, 1), *long_forks(engine, 1))
    counted.computed.clear()
    assert answers(*long_forks(engine, 2)) == apart
    assert sum(counted.computed) == 2 * len(LONG) - TAIL


def test_forks_of_a_session_that_has_recalled_share_its_next_prompt(make: Make) -> None:
    engine, counted = make(cache=WITH_RECALL)

    def second_turn(count: int) -> list[list[int]]:
        (original,) = long_forks(engine, 1)
        assert tokens_of(engine.generate(original, 2, sampled(0)))
        engine.append(original, LONG)
        engine.recall(original, [TokenRange(30, 33)])
        sequences = [original, *(engine.fork(original) for _ in range(count - 1))]
        counted.computed.clear()
        said = [tokens_of(s) for s in [engine.generate(each, 4, sampled(0)) for each in sequences]]
        for each in sequences:
            engine.close(each)
        return said

    (expected,) = second_turn(1)
    alone = sum(counted.computed)
    assert second_turn(3) == [expected] * 3
    assert sum(counted.computed) < alone + 2 * 2 * TAIL


def recalling_forks(engine: Engine, count: int) -> list[TokenSequence]:
    """They could recall, but all of this prompt is in sight."""
    original = engine.open("me", [], None, WITH_RECALL.recall)
    engine.append(original, PROMPT[: WITH_RECALL.capacity])
    return [original, *(engine.fork(original) for _ in range(count - 1))]


def test_a_prompt_that_cannot_recall_yet_is_computed_once(make: Make) -> None:
    engine, counted = make(cache=WITH_RECALL)
    (lonely,) = recalling_forks(engine, 1)
    expected = tokens_of(engine.generate(lonely, 4, sampled(0)))
    counted.computed.clear()
    streams = [engine.generate(each, 4, sampled(0)) for each in recalling_forks(engine, 3)]
    assert [tokens_of(stream) for stream in streams] == [expected] * 3
    assert sum(counted.computed) == WITH_RECALL.capacity + 2


@pytest.mark.parametrize("first", [0, 1])
def test_a_fork_that_goes_on_and_recalls_takes_nothing_from_the_other(make: Make, first: int) -> None:
    """One says more and names what it wants to see again, the other asks as it is."""
    engine, _ = make(cache=WITH_RECALL)
    more = PROMPT[WITH_RECALL.capacity :] * 4

    def answers(*sequences: TokenSequence) -> list[list[int]]:
        engine.append(sequences[first], more)
        engine.recall(sequences[first], [TokenRange(20, 24)])
        streams = [engine.generate(each, 4, sampled(0)) for each in sequences]
        return [tokens_of(stream) for stream in streams]

    apart = answers(*recalling_forks(engine, 1), *recalling_forks(engine, 1))
    assert answers(*recalling_forks(engine, 2)) == apart


@pytest.mark.unwatched
@pytest.mark.parametrize("recalls", [False, True])
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_fork_says_what_it_would_have_said_alone(
    make: Make, recalls: bool, data: st.DataObject
) -> None:
    """Forks taken, told more, started, cancelled and closed in any order."""

    def opened(engine: Engine) -> TokenSequence:
        if not recalls:
            return forks_of(engine, 1)[0]
        original = engine.open("me", [], None, WITH_RECALL.recall)
        engine.append(original, LONG)
        engine.recall(original, [NAMED], remember=True)
        return original

    changes = {"cache": WITH_RECALL} if recalls else {}
    engine, _ = make(**changes)
    first = opened(engine)
    members = dict(enumerate([first, *(engine.fork(first) for _ in range(3))]))
    more: dict[int, tuple[int, ...]] = dict.fromkeys(members, ())
    started = {}
    for _ in range(data.draw(st.integers(1, 10))):
        index = data.draw(st.sampled_from(sorted(members)))
        act = data.draw(st.sampled_from(["say", "start", "cancel", "close"]))
        if act == "say" and index not in started:
            tokens = data.draw(st.lists(st.integers(2, 50), max_size=30))
            engine.append(members[index], tokens)
            more[index] += tuple(tokens)
        elif act == "start" and index not in started:
            started[index] = engine.generate(members[index], 4, sampled(index))
        elif act == "cancel" and index in started:
            started.pop(index).cancel()
            del members[index]
        elif act == "close" and len(members) > 1 and index not in started:
            engine.close(members.pop(index))
        if not members:
            break
    said = {index: tokens_of(stream) for index, stream in started.items()}
    engine.shutdown()
    solo, _ = make(**changes)
    for index, tokens in said.items():
        lonely = opened(solo)
        solo.append(lonely, more[index])
        assert tokens == tokens_of(solo.generate(lonely, 4, sampled(index)))
        solo.close(lonely)
