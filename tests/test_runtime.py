"""The runtime over the real default model."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kakeya.config import CacheConfig, EngineConfig
from kakeya.errors import (
    ConfigError,
    InvalidArgument,
    ModelNotFound,
    ResourceExhausted,
    SessionNotFound,
    StateMismatch,
)
from kakeya.runtime import Runtime
from kakeya.types import (
    DoneEvent,
    KernelChoice,
    Numerics,
    SamplingParams,
    ShareBeginnings,
    StopReason,
    TokenEvent,
    WeightFormat,
)
from support import tiny

OpenTiny = Callable[..., Runtime]
CONFIG = EngineConfig(cache=CacheConfig(sink=4, window=64), capacity=3, numerics=Numerics.EXACT)
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]


@pytest.fixture(scope="module")
def runtime(default_model: Path) -> Iterator[Runtime]:
    with Runtime.open(str(default_model), CONFIG) as runtime:
        yield runtime


@pytest.fixture
def session(runtime: Runtime) -> Iterator[str]:
    session_id = runtime.create_session(client_label="a test")
    yield session_id
    runtime.close_session(session_id)


def answer(
    runtime: Runtime, session_id: str, count: int = 24, sampling: SamplingParams | None = None
) -> list[int]:
    events = runtime.generate(session_id, count, sampling)
    return [event.token_id for event in events if isinstance(event, TokenEvent)]


def test_the_default_model_knows_the_capital_of_france(runtime: Runtime, session: str) -> None:
    runtime.append(session, runtime.tokenizer.chat_ids(QUESTION))
    events = list(runtime.generate(session, 32))
    text = runtime.tokenizer.decode([event.token_id for event in events if isinstance(event, TokenEvent)])
    assert "Paris" in text
    assert isinstance(events[-1], DoneEvent)
    assert events[-1].stop_reason is StopReason.EOS


def test_torch_and_native_kernels_agree_on_the_real_model(runtime: Runtime, default_model: Path) -> None:
    tokens = runtime.tokenizer.encode(
        "The history of the city begins with a small settlement on the river. " * 6
    )
    native = runtime.score(tokens).log_softmax(-1)
    config = EngineConfig(cache=CONFIG.cache, kernels=KernelChoice.TORCH)
    with Runtime.open(str(default_model), config) as other:
        torch_only = other.score(tokens).log_softmax(-1)
    divergence = (native.exp() * (native - torch_only)).sum(-1)
    assert divergence.mean() < 0.01
    assert (native.argmax(-1) == torch_only.argmax(-1)).float().mean() > 0.9


def test_info_tells_what_the_session_holds(runtime: Runtime, session: str) -> None:
    empty = runtime.info(session)
    assert (empty.state, empty.client_label, empty.history_length, empty.kv_live_bytes) == (
        "idle",
        "a test",
        0,
        0,
    )
    runtime.append(session, list(range(100, 200)))
    answer(runtime, session, 2, SamplingParams(logit_bias={2: -100.0}))
    full = runtime.info(session)
    assert full.history_length == 102
    assert full.computed_length == 101
    assert full.dropped_token_count == 102 - 68
    assert full.kv_live_bytes == 68 * runtime.describe().bytes_per_token
    assert full.kv_capacity_bytes == runtime.describe().session_bytes
    assert (full.sink, full.window) == (4, 64)
    assert full.cache_invariant_inv1_violations == full.cache_invariant_inv2_violations == 0


def test_a_saved_session_goes_on_bit_for_bit(runtime: Runtime, session: str, tmp_path: Path) -> None:
    runtime.append(session, runtime.tokenizer.chat_ids(QUESTION) * 4)
    answer(runtime, session, 5)
    runtime.export_session(session, tmp_path / "saved", notes="remember me")
    restored, notes = runtime.import_session(tmp_path / "saved")
    assert notes == "remember me"
    sampling = SamplingParams(temperature=0.9, seed=5)
    try:
        assert answer(runtime, restored, 20, sampling) == answer(runtime, session, 20, sampling)
    finally:
        runtime.close_session(restored)


def test_a_session_of_another_geometry_is_refused(
    runtime: Runtime, session: str, default_model: Path, tmp_path: Path
) -> None:
    runtime.export_session(session, tmp_path / "saved")
    config = EngineConfig(cache=CacheConfig(sink=4, window=32), numerics=Numerics.EXACT)
    with Runtime.open(str(default_model), config) as other, pytest.raises(StateMismatch, match="geometry"):
        other.import_session(tmp_path / "saved")
    config = EngineConfig(cache=CONFIG.cache, weights=WeightFormat.INT8)
    with (
        Runtime.open(str(default_model), config) as other,
        pytest.raises(StateMismatch, match="weight format"),
    ):
        other.import_session(tmp_path / "saved")


def test_a_fork_shares_the_past_alone(runtime: Runtime, session: str) -> None:
    runtime.append(session, runtime.tokenizer.chat_ids(QUESTION))
    copy, length = runtime.fork(session)
    assert length == runtime.info(session).history_length
    runtime.append(session, [5, 6])
    assert runtime.info(copy).history_length + 2 == runtime.info(session).history_length
    runtime.close_session(copy)
    with pytest.raises(SessionNotFound):
        runtime.info(copy)


def test_a_session_is_invisible_to_others(runtime: Runtime, session: str) -> None:
    for use in (
        lambda: runtime.append(session, [5], owner="stranger"),
        lambda: runtime.generate(session, 1, owner="stranger"),
        lambda: runtime.info(session, owner="stranger"),
        lambda: runtime.fork(session, owner="stranger"),
        lambda: runtime.close_session(session, owner="stranger"),
        lambda: runtime.info("no such id"),
    ):
        with pytest.raises(SessionNotFound, match="no session"):
            use()
    assert runtime.info(session).history_length == 0


def test_refusals_change_nothing(runtime: Runtime, session: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="49152"):
        runtime.append(session, [5, 49152])
    with pytest.raises(InvalidArgument, match="empty session"):
        runtime.generate(session, 1)
    with pytest.raises(InvalidArgument, match="pinned prefix"):
        runtime.create_session(pinned_prefix_tokens=68)
    with pytest.raises(StateMismatch):
        runtime.import_session(tmp_path / "nothing")
    others = [runtime.create_session(), runtime.create_session()]
    with pytest.raises(ResourceExhausted, match="all 3 sessions"):
        runtime.create_session()
    for other in others:
        runtime.close_session(other)
    assert runtime.info(session).history_length == 0


def test_the_facts_add_up(runtime: Runtime) -> None:
    facts = runtime.describe()
    assert facts.bytes_per_token == 30 * 3 * 64 * 2 * 2
    assert facts.session_bytes == (68 + CONFIG.cache.spare) * facts.bytes_per_token
    assert facts.pool_bytes == 3 * facts.session_bytes
    assert facts.parameters == pytest.approx(134.5e6, rel=0.01)
    assert facts.kernels.startswith("native")
    assert facts.weights == "Q4_1 (layers), Q8_0 (head)"


def test_closing_can_wait_for_what_runs(default_model: Path) -> None:
    runtime = Runtime.open(str(default_model), CONFIG)
    session = runtime.create_session(eos_token_ids=[])
    runtime.append(session, [5, 6, 7])
    stream = runtime.generate(session, 3)
    tokens = [event for event in stream if isinstance(event, TokenEvent)]
    runtime.close(drain_timeout=10)
    assert len(tokens) == 3


def test_documents_need_a_state_directory(runtime: Runtime) -> None:
    assert not runtime.has_documents
    for call in (lambda: runtime.change_documents([]), lambda: runtime.documents("letter")):
        with pytest.raises(ConfigError, match="there is none: set state_dir"):
            call()


def test_an_unknown_model_is_named() -> None:
    with pytest.raises(ModelNotFound, match="no-such-model"):
        Runtime.open("no-such-model")


def test_scores_are_next_token_logits(runtime: Runtime) -> None:
    tokens = runtime.tokenizer.encode("The capital of France is")
    logits = runtime.score(tokens)
    assert logits.shape == (len(tokens), 49152)
    assert runtime.tokenizer.decode([int(logits[-1].argmax())]) == " Paris"
    assert torch.equal(logits, runtime.score(tokens))


def test_a_prefix_is_warm_for_every_owner(open_tiny: OpenTiny) -> None:
    runtime = open_tiny(
        tiny.engine_config(4, 96, 8, numerics=Numerics.EXACT, prefix_cache_bytes=2 * 16 * 512)
    )
    prefix = [5 + index % 50 for index in range(40)]
    runtime.warm(prefix)
    session = runtime.create_session(owner="somebody")
    runtime.append(session, [*prefix, 7], owner="somebody")
    list(runtime.generate(session, 1, owner="somebody"))
    assert runtime.info(session, owner="somebody").shared_tokens == 32
    with pytest.raises(
        ConfigError, match="40 tokens takes 20,480 bytes and does not fit into the 16,384 bytes"
    ):
        runtime.warm([9] * 40)


def test_nothing_is_warm_where_nothing_is_shared(open_tiny: OpenTiny) -> None:
    runtime = open_tiny(tiny.engine_config(share_beginnings=ShareBeginnings.OFF))
    with pytest.raises(ConfigError, match="share_beginnings is off"):
        runtime.warm([5] * 40)
