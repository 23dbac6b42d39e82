"""Shared prefixes: the same tokens as computing gives, whatever sessions did in between."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from kakeya.config import CacheConfig, EngineConfig
from kakeya.engine.backend import Backend
from kakeya.engine.engine import Engine
from kakeya.engine.sequence import TokenSequence
from kakeya.engine.shared_prefixes import GRANULE
from kakeya.observer import UNOBSERVED, EngineObserver
from kakeya.types import (
    BackendChoice,
    KernelChoice,
    Numerics,
    SamplingParams,
    ShareBeginnings,
    TokenEvent,
    TokenRange,
    WeightFormat,
)
from support import gguf_files, tiny
from support.engines import GREEDY, done_of, say

PREFIX = [(7 * i + i * i) % 59 + 2 for i in range(200)]
FEW_BYTES = 4 * GRANULE * 512  # of the tiny model: four granules

MakeEngine = Callable[..., Engine]
Models = dict[str, tiny.Model | Path]  # where the backend reads the model itself, its path


@dataclass
class Heard(EngineObserver):
    """What the engine told of prefixes."""

    copied: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    evicted: int = 0

    def prefix_copied(self, tokens: int) -> None:
        self.copied.append(tokens)

    def prefix_cache(self, held_bytes: int, evicted: int) -> None:
        self.held.append(held_bytes)
        self.evicted += evicted


def config_of(kind: str, **changes: object) -> EngineConfig:
    """Native kernels, MLX, the CUDA backend on a CPU, or torch in its numerics; a first lap of 100 tokens."""
    numerics = Numerics.EXACT if kind in ("exact", "cuda") else Numerics.FAST
    own = {
        "native": {"kernels": KernelChoice.NATIVE, "weights": WeightFormat.AUTO},
        "mlx": {"backend": BackendChoice.MLX},
    }
    return tiny.engine_config(4, 96, 8, capacity=6, numerics=numerics, **(own.get(kind, {}) | changes))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("prefixes")
    llama, mixed = tiny.write_llama(folder / "llama"), gguf_files.write_mixed(folder / "mixed.gguf")
    files: dict[str, Path] = {"native": mixed, "mlx": llama, "exact": llama, "fast": llama}
    return {kind: tiny.load(path, config_of(kind)) for kind, path in files.items()} | {"cuda": llama}


def start(models: Models, kind: str, config: EngineConfig, observer: EngineObserver = UNOBSERVED) -> Engine:
    model = models[kind]
    if isinstance(model, Path):
        backend: Backend = tiny.make_device_backend(model, config)
    else:
        backend = tiny.make_backend(model, config)
    return Engine(backend, config, observer=observer).start()


@pytest.fixture
def make_engine(models: Models) -> Iterator[MakeEngine]:
    engines: list[Engine] = []

    def make(kind: str = "exact", heard: Heard | None = None, **changes: object) -> Engine:
        engines.append(start(models, kind, config_of(kind, **changes), heard or Heard()))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()


def ask(engine: Engine, tokens: Sequence[int], owner: str = "me") -> tuple[TokenSequence, list[int], int]:
    """A new session, its answer of three tokens, and how many of its tokens were cached."""
    sequence = engine.open(owner, [])
    engine.append(sequence, list(tokens))
    events = list(engine.generate(sequence, 3, GREEDY))
    return sequence, [e.token_id for e in events if isinstance(e, TokenEvent)], events[-1].cached_token_count


KINDS = ["native", "mlx", "cuda", "exact", "fast"]
GRAIN = dict.fromkeys(KINDS, GRANULE) | {"fast": 8}


@pytest.mark.parametrize("kind", KINDS)
def test_a_live_session_gives_its_prefix(make_engine: MakeEngine, kind: str) -> None:
    heard = Heard()
    engine, alone = make_engine(kind, heard), make_engine(kind, share_beginnings=ShareBeginnings.OFF)
    first, _, cached = ask(engine, PREFIX[:50])
    assert cached == 0
    _, answer, cached = ask(engine, [*PREFIX[:50], 3, 4, 5])
    # Token by token where a prompt may be cut anywhere, in whole blocks elsewhere.
    assert cached == (48 if kind == "fast" else 50)
    assert heard.copied == [cached]
    assert answer == ask(alone, [*PREFIX[:50], 3, 4, 5])[1]
    assert engine.read(first, lambda sequence: sequence.committed) == 53


@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_session_leaves_its_prefix_in_the_cache(make_engine: MakeEngine, kind: str) -> None:
    heard = Heard()
    engine, alone = make_engine(kind, heard), make_engine(kind, share_beginnings=ShareBeginnings.OFF)
    first, _, _ = ask(engine, PREFIX[:50])
    engine.close(first)
    assert heard.held[-1] > 0
    _, answer, cached = ask(engine, [*PREFIX[:50], 3, 4, 5])
    assert cached == 50 // GRAIN[kind] * GRAIN[kind]
    assert answer == ask(alone, [*PREFIX[:50], 3, 4, 5])[1]


def test_the_same_prompt_again_computes_its_last_token(make_engine: MakeEngine) -> None:
    engine = make_engine()
    _, first, _ = ask(engine, PREFIX[:50])
    _, second, cached = ask(engine, PREFIX[:50])
    assert (second, cached) == (first, 49)


def test_a_history_goes_on_from_what_another_has(make_engine: MakeEngine) -> None:
    """Also behind what it has computed itself."""
    engine = make_engine()
    sequence, answer, _ = ask(engine, PREFIX[:10])
    history = [*PREFIX[:10], *answer]
    ask(engine, [*history, *PREFIX[10:80]])
    engine.append(sequence, PREFIX[10:60])
    assert done_of(engine.generate(sequence, 1, GREEDY)).cached_token_count == len(history) + 49


def test_owners_share_only_when_told(make_engine: MakeEngine) -> None:
    for share, cached in (
        (ShareBeginnings.OWNER, 0),
        (ShareBeginnings.SERVER, 49),
        (ShareBeginnings.OFF, 0),
    ):
        engine = make_engine(share_beginnings=share)
        ask(engine, PREFIX[:50], "one")
        assert ask(engine, PREFIX[:50], "two")[2] == cached


def test_a_session_past_its_first_lap_gives_what_it_pins(make_engine: MakeEngine) -> None:
    engine, alone = make_engine(prefix_cache_bytes=0), make_engine(share_beginnings=ShareBeginnings.OFF)
    long = engine.open("me", [], pinned=40)
    say(engine, long, PREFIX[:150], 3)
    _, answer, cached = ask(engine, PREFIX[:60])
    assert cached == 40
    assert answer == ask(alone, PREFIX[:60])[1]


def test_a_closed_session_past_its_first_lap_leaves_what_it_pins(make_engine: MakeEngine) -> None:
    engine, alone = make_engine(), make_engine(share_beginnings=ShareBeginnings.OFF)
    long = engine.import_state(engine.export_state(outgrown(engine)), "another")
    engine.close(long)
    _, answer, cached = ask(engine, [*PREFIX[:45], 9], "another")
    assert cached == 32
    assert answer == ask(alone, [*PREFIX[:45], 9])[1]


def outgrown(engine: Engine) -> TokenSequence:
    """A session that pins 40 tokens and is past its first lap."""
    sequence = engine.open("me", [], pinned=40)
    say(engine, sequence, PREFIX[:150], 3)
    return sequence


def test_prompts_at_once_compute_their_prefix_once(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batch_tokens=64)
    sequences = [engine.open("me", []) for _ in range(5)]
    for index, sequence in enumerate(sequences):
        engine.append(sequence, [*PREFIX[:60], index + 2])
    streams = [engine.generate(sequence, 2, GREEDY) for sequence in sequences]
    first, *others = sorted(done_of(stream).cached_token_count for stream in streams)
    assert first == 0
    # Less than a granule is computed by all that come in the same step, and copied by whoever comes later.
    assert all(48 <= cached <= 60 for cached in others)


def test_the_least_recently_used_granules_go_first(make_engine: MakeEngine) -> None:
    heard = Heard()
    engine = make_engine("exact", heard, prefix_cache_bytes=FEW_BYTES)
    other = [token % 59 + 2 for token in PREFIX]
    for prefix in (PREFIX, other):
        engine.close(ask(engine, prefix[:40])[0])
    assert heard.held[-1] == FEW_BYTES
    assert heard.evicted == 0
    engine.close(ask(engine, [3] * 40)[0])
    assert heard.evicted == 2
    assert ask(engine, [*other[:40], 5])[2] == 32
    assert ask(engine, [*PREFIX[:40], 5])[2] == 0


def test_no_room_for_a_granule(make_engine: MakeEngine) -> None:
    engine = make_engine(prefix_cache_bytes=0)
    engine.close(ask(engine, PREFIX[:50])[0])
    assert ask(engine, PREFIX[:50])[2] == 0


def test_a_warm_prefix_is_everybodys_and_stays(make_engine: MakeEngine) -> None:
    engine = make_engine(prefix_cache_bytes=FEW_BYTES)
    alone = make_engine(share_beginnings=ShareBeginnings.OFF)
    assert engine.warm(PREFIX[:48])
    for index in range(4):
        engine.close(ask(engine, [index + 5] * 40, "noise")[0])
    for owner in ("one", "two"):
        _, answer, cached = ask(engine, PREFIX[:60], owner)
        assert cached == 48
        assert answer == ask(alone, PREFIX[:60])[1]


def test_a_warm_prefix_stays_though_sessions_have_had_it(make_engine: MakeEngine) -> None:
    """One in the cache that could be evicted, or a live session, must not be in its way."""
    engine = make_engine(prefix_cache_bytes=FEW_BYTES, share_beginnings=ShareBeginnings.SERVER)
    engine.close(ask(engine, PREFIX[:20])[0])
    ask(engine, PREFIX[:40])
    assert engine.warm(PREFIX[:48])
    for index in range(4):
        engine.close(ask(engine, [index + 5] * 40)[0])
    assert ask(engine, [*PREFIX[:48], 9], "another")[2] == 48


def test_a_warm_prefix_that_does_not_fit(make_engine: MakeEngine) -> None:
    engine = make_engine(prefix_cache_bytes=FEW_BYTES)
    assert engine.warm(PREFIX[:48])
    assert engine.warm(PREFIX[:60])
    assert not engine.warm([5] * 40)


def test_a_warm_prefix_longer_than_a_lap(make_engine: MakeEngine) -> None:
    engine = make_engine(prefix_cache_bytes=2 * FEW_BYTES)
    assert engine.warm(PREFIX)
    assert ask(engine, PREFIX)[2] == 96


def test_a_fork_and_an_import_give_their_prefixes(make_engine: MakeEngine) -> None:
    engine = make_engine(prefix_cache_bytes=0)
    first, _, _ = ask(engine, PREFIX[:50])
    copies = [engine.fork(first), engine.import_state(engine.export_state(first), "me")]
    engine.close(first)
    for copy in copies:
        session, _, cached = ask(engine, [*PREFIX[:50], 9])
        assert cached == 50
        engine.close(session)
        engine.close(copy)
    assert ask(engine, [*PREFIX[:50], 9])[2] == 0


def test_a_failed_session_gives_nothing(make_engine: MakeEngine) -> None:
    from kakeya.errors import InvariantViolation

    engine = make_engine()
    first, _, _ = ask(engine, PREFIX[:50])
    engine.read(first, lambda sequence: sequence.fail(InvariantViolation("INV-1", "as a test wants it")))
    assert ask(engine, [*PREFIX[:50], 9])[2] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_session_that_sleeps_leaves_its_prefix_in_the_cache(make_engine: MakeEngine, kind: str) -> None:
    heard = Heard()
    engine, alone = make_engine(kind, heard), make_engine(kind, share_beginnings=ShareBeginnings.OFF)
    first, _, _ = ask(engine, PREFIX[:50])
    engine.moves.lend(first)
    engine.moves.leave(first)
    assert heard.held[-1] > 0
    _, answer, cached = ask(engine, [*PREFIX[:50], 3, 4, 5])
    assert cached == 50 // GRAIN[kind] * GRAIN[kind]
    assert answer == ask(alone, [*PREFIX[:50], 3, 4, 5])[1]


def test_a_session_that_was_lent_and_stays_gives_its_prefix(make_engine: MakeEngine) -> None:
    engine = make_engine(prefix_cache_bytes=0)
    first, _, _ = ask(engine, PREFIX[:50])
    engine.moves.lend(first)
    assert ask(engine, [*PREFIX[:50], 9], "me")[2] == 0
    engine.moves.stay(first)
    assert ask(engine, [*PREFIX[:50], 8], "me")[2] == 50


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("answer_tokens", [1, 70])
def test_a_session_that_outgrows_its_lap_leaves_its_prefix_in_the_cache(
    make_engine: MakeEngine, kind: str, answer_tokens: int
) -> None:
    """By a long prompt, or by what it says."""
    heard, prompt = Heard(), PREFIX[: 150 if answer_tokens == 1 else 60]
    engine, alone = make_engine(kind, heard), make_engine(kind, share_beginnings=ShareBeginnings.OFF)
    sequence = engine.open("me", [])
    say(engine, sequence, prompt, answer_tokens)
    assert engine.read(sequence, lambda each: each.slab.committed) >= 100
    _, answer, cached = ask(engine, [*PREFIX[:50], 3, 4, 5])
    assert cached == 50 // GRAIN[kind] * GRAIN[kind]
    assert answer == ask(alone, [*PREFIX[:50], 3, 4, 5])[1]


def test_a_prompt_of_one_block_is_saved_before_it_overwrites_itself(make_engine: MakeEngine) -> None:
    engine = make_engine(prefill_block=128, max_batch_tokens=256)
    alone = make_engine(share_beginnings=ShareBeginnings.OFF)
    long = ask(engine, PREFIX)[1]
    assert long == ask(alone, PREFIX)[1]
    _, answer, cached = ask(engine, [*PREFIX[:90], 3])
    assert cached == 80
    assert answer == ask(alone, [*PREFIX[:90], 3])[1]


def test_a_lap_ends_with_one_copy_of_what_others_do_not_have(make_engine: MakeEngine) -> None:
    """What a live session has is copied from there, and each granule moves once."""
    heard = Heard()
    engine = make_engine("exact", heard)
    ask(engine, PREFIX[:64])
    sequence = engine.open("me", [])
    say(engine, sequence, PREFIX[:150], 2)
    (held,) = set(heard.held)
    assert held == 2 * GRANULE * 512  # of six granules the other session has four
    say(engine, sequence, PREFIX[:30], 2)
    assert set(heard.held) == {held}


def test_what_a_recall_will_overwrite_is_saved_too(make_engine: MakeEngine) -> None:
    engine = make_engine(cache=CacheConfig(4, 64, 8, 32))
    alone = make_engine(cache=CacheConfig(4, 64, 8, 32), share_beginnings=ShareBeginnings.OFF)
    sequence = engine.open("me", [], 4, 32)
    say(engine, sequence, PREFIX[:150], 3)
    engine.recall(sequence, [TokenRange(40, 60)])
    say(engine, sequence, PREFIX[:30], 3)
    _, answer, cached = ask(engine, [*PREFIX[:50], 3])
    assert cached == 48
    assert answer == ask(alone, [*PREFIX[:50], 3])[1]


def test_of_a_prefix_that_was_copied_the_end_goes_first(make_engine: MakeEngine) -> None:
    heard = Heard()
    engine = make_engine("exact", heard, prefix_cache_bytes=FEW_BYTES)
    engine.close(ask(engine, PREFIX[:50])[0])
    reader, _, cached = ask(engine, [*PREFIX[:50], 9], "me")
    assert cached == 48
    engine.close(ask(engine, [3] * 40)[0])  # takes the free place and one more
    assert heard.evicted == 1
    engine.read(reader, engine._prefixes.forget)
    assert ask(engine, [*PREFIX[:50], 8])[2] == 32


def test_more_granules_than_places_leave_the_start(make_engine: MakeEngine) -> None:
    heard = Heard()
    engine = make_engine("exact", heard, prefix_cache_bytes=FEW_BYTES)
    engine.close(ask(engine, PREFIX[:90])[0])
    assert heard.evicted == 0
    assert ask(engine, [*PREFIX[:90], 9])[2] == 4 * GRANULE


# Whatever happens in between.

prompts = st.tuples(st.sampled_from([0, 16, 20, 33, 64, 90]), st.lists(st.integers(2, 8), max_size=20))
actions = st.lists(
    st.one_of(
        st.tuples(st.just("open"), prompts, st.sampled_from([None, 0, 40])),
        st.tuples(st.just("say"), st.integers(0, 5), prompts),
        st.tuples(st.just("cancel"), st.integers(0, 5), prompts),
        st.tuples(st.just("fork"), st.integers(0, 5)),
        st.tuples(st.just("close"), st.integers(0, 5)),
    ),
    max_size=14,
)
SAMPLED = SamplingParams(temperature=1.0, seed=5)


def play(engine: Engine, script: Sequence[tuple[object, ...]]) -> list[object]:
    """What every session answered; sessions are named by when they came."""
    sessions: list[TokenSequence] = []
    heard: list[object] = []
    for name, *rest in script:
        if name == "open":
            (length, tail), pinned = rest
            if len(sessions) < 5:
                sessions.append(engine.open("me", [], pinned))
                heard.append(say(engine, sessions[-1], [*PREFIX[:length], *tail, 3], 6, SAMPLED))
            continue
        if not sessions:
            continue
        session = sessions[rest[0] % len(sessions)]
        if name == "say":
            length, tail = rest[1]
            heard.append(say(engine, session, [*PREFIX[:length], *tail, 4], 6))
        elif name == "cancel":
            length, tail = rest[1]
            engine.append(session, [*PREFIX[:length], *tail, 4])
            stream = engine.generate(session, 9, SAMPLED)
            heard.append(type(stream.next_event()).__name__)
            stream.cancel()
            list(stream)
            engine.rest(session)
            # How far it came depends on the time; what it says next must not.
            heard.append(engine.read(session, lambda each: each.committed) > 0)
            engine.close(session)
            sessions.remove(session)
        elif name == "fork":
            if len(sessions) < 5:
                sessions.append(engine.fork(session))
        else:
            engine.close(session)
            sessions.remove(session)
    for session in sessions:
        heard.append(say(engine, session, [5], 4))
        engine.close(session)
    return heard


@pytest.mark.unwatched
@pytest.mark.parametrize("kind", KINDS)
@given(script=actions)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_sharing_changes_no_token(models: Models, kind: str, script: Sequence[tuple[object, ...]]) -> None:
    said = []
    for share in (ShareBeginnings.OFF, ShareBeginnings.OWNER):
        config = replace(config_of(kind), share_beginnings=share, prefix_cache_bytes=FEW_BYTES)
        engine = start(models, kind, config)
        try:
            said.append(play(engine, script))
        finally:
            engine.shutdown()
    assert said[0] == said[1]


@pytest.mark.parametrize("kind", KINDS)
def test_copied_slots_have_the_bits_of_computed_ones(models: Models, kind: str) -> None:
    slabs = []
    for share in (ShareBeginnings.OFF, ShareBeginnings.OWNER):
        config = replace(config_of(kind), share_beginnings=share)
        engine = start(models, kind, config)
        try:
            ask(engine, PREFIX[:64])
            second, _, cached = ask(engine, [*PREFIX[:64], 7, 7])
            assert (cached > 0) == (share is ShareBeginnings.OWNER)
            slabs.append(engine.read(second, lambda each: each.slab.storage[:, :, :, :66].clone()))
        finally:
            engine.shutdown()
    assert slabs[0].equal(slabs[1])
