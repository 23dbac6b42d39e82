"""Every metric, moved by real traffic on a tiny model."""

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kakeya.config import CacheConfig, Quotas, RuntimeConfig, StateConfig
from kakeya.engine.proposer import DraftRequest
from kakeya.errors import InvariantViolation, ResourceExhausted, SessionBusy, SessionNotFound
from kakeya.metrics import Metrics
from kakeya.runtime import Runtime
from kakeya.types import Numerics, TokenRange
from support import tiny
from support.tiny import PROMPT, answer, new_session, sequence_of

OpenTiny = Callable[..., Runtime]
NAMES = {
    "kakeya_sessions",
    "kakeya_kv_live_bytes",
    "kakeya_kv_capacity_bytes",
    "kakeya_requests_running",
    "kakeya_requests_waiting",
    "kakeya_prompt_tokens_total",
    "kakeya_cached_tokens_total",
    "kakeya_shared_beginnings_total",
    "kakeya_shared_tokens_total",
    "kakeya_tier_bytes",
    "kakeya_tier_limit_bytes",
    "kakeya_snapshot_lag_tokens",
    "kakeya_damaged_snapshots_total",
    "kakeya_wake_seconds",
    "kakeya_prefix_cache_bytes",
    "kakeya_prefix_cache_evictions_total",
    "kakeya_generation_tokens_total",
    "kakeya_evicted_tokens_total",
    "kakeya_recall_lookups_total",
    "kakeya_recall_pages_total",
    "kakeya_recall_slots_total",
    "kakeya_recall_lookup_seconds",
    "kakeya_recall_seconds",
    "kakeya_time_to_first_token_seconds",
    "kakeya_inter_token_latency_seconds",
    "kakeya_request_duration_seconds",
    "kakeya_queue_time_seconds",
    "kakeya_admission_total",
    "kakeya_draft_tokens_total",
    "kakeya_accepted_tokens_total",
    "kakeya_invariant_violations_total",
}


class Watched:
    """A runtime and what its metrics say."""

    def __init__(self, open_tiny: OpenTiny, *args: object, **options: object) -> None:
        self.metrics = Metrics()
        self.runtime = open_tiny(*args, metrics=self.metrics, **options)

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"kakeya_{name}", labels)

    def becomes(self, name: str, value: float, **labels: str) -> bool:
        """Whether it says so soon: the engine hears of a read event a little later."""
        for _ in range(1000):
            if self.value(name, **labels) == value:
                return True
            time.sleep(0.005)
        return False


@pytest.fixture
def watched(open_tiny: OpenTiny) -> Watched:
    return Watched(open_tiny)


def test_the_names_are_those_of_the_design(watched: Watched) -> None:
    families = re.findall(r"^# TYPE (\S+) (\S+)", watched.metrics.exposition().decode(), re.MULTILINE)
    assert {name for name, _ in families if not name.endswith("_created")} == NAMES


def test_two_sets_of_metrics_do_not_mix(open_tiny: OpenTiny) -> None:
    first, second = Watched(open_tiny), Watched(open_tiny)
    answer(first.runtime, new_session(first.runtime), 2)
    assert first.value("generation_tokens_total") == 2
    assert second.value("generation_tokens_total") == 0


def test_sessions_are_counted_by_state(watched: Watched) -> None:
    runtime = watched.runtime
    idle, busy, broken = new_session(runtime), new_session(runtime), new_session(runtime)
    stream = runtime.generate(busy, 10_000)
    answer(runtime, broken, 2)
    sequence_of(runtime, broken).slab.committed = 99
    with pytest.raises(InvariantViolation):
        runtime.append(broken, [3])
    assert [watched.value("sessions", state=state) for state in ("idle", "generating", "failed")] == [1, 1, 1]
    assert watched.value("invariant_violations_total", invariant="INV-2") == 1
    assert watched.value("invariant_violations_total", invariant="INV-1") == 0
    stream.cancel()
    assert watched.becomes("sessions", 2, state="idle")
    runtime.close_session(idle)
    assert watched.value("sessions", state="idle") == 1


def test_bytes_are_what_the_slabs_hold(watched: Watched) -> None:
    runtime = watched.runtime
    facts = runtime.describe()
    assert watched.value("kv_capacity_bytes") == facts.pool_bytes == 4 * facts.session_bytes
    assert watched.value("kv_live_bytes") == 0
    sessions = [new_session(runtime), new_session(runtime)]
    for session in sessions:
        answer(runtime, session, 3)
    held = sum(runtime.info(session).kv_live_bytes for session in sessions)
    assert watched.value("kv_live_bytes") == held == 2 * 7 * facts.bytes_per_token
    for session in sessions:
        runtime.close_session(session)
    assert watched.value("kv_live_bytes") == 0


def test_tokens_are_counted_where_they_come_from(watched: Watched) -> None:
    runtime = watched.runtime
    session = new_session(runtime)
    answer(runtime, session, 4)
    assert watched.value("prompt_tokens_total") == len(PROMPT)
    assert watched.value("cached_tokens_total") == 0
    assert watched.value("generation_tokens_total") == 4
    runtime.append(session, [8])  # computed with the last answer's last token
    answer(runtime, session, 2)
    assert watched.value("prompt_tokens_total") == len(PROMPT) + 2
    assert watched.value("cached_tokens_total") == len(PROMPT) + 3
    assert watched.value("generation_tokens_total") == 6


def test_shared_prefixes_are_counted(open_tiny: OpenTiny) -> None:
    watched = Watched(open_tiny, tiny.engine_config(4, 96, 8, numerics=Numerics.EXACT))
    runtime, prefix = watched.runtime, [5 + index % 50 for index in range(40)]
    for length, shared in ((40, 0), (40, 39), (33, 32)):
        session = runtime.create_session()
        runtime.append(session, prefix[:length])
        answer(runtime, session, 1)
        assert runtime.info(session).shared_tokens == shared
    assert watched.value("shared_beginnings_total") == 2
    assert watched.value("shared_tokens_total") == 39 + 32


def test_evictions_follow_commits(watched: Watched, tmp_path: Path) -> None:
    runtime = watched.runtime
    session = new_session(runtime, [3] * 9)  # the window and the sink hold 10
    assert watched.value("evicted_tokens_total") == 0
    answer(runtime, session, 3)
    runtime.append(session, [4, 5])
    assert watched.value("evicted_tokens_total") == 4
    copy, _ = runtime.fork(session)
    runtime.export_session(session, tmp_path / "saved")
    imported, _ = runtime.import_session(tmp_path / "saved")
    assert watched.value("evicted_tokens_total") == 4
    runtime.append(copy, [6])
    runtime.append(imported, [6])
    assert watched.value("evicted_tokens_total") == 6
    assert runtime.info(copy).dropped_token_count == runtime.info(imported).dropped_token_count == 5


def test_each_request_leaves_its_times(watched: Watched) -> None:
    runtime = watched.runtime
    session = new_session(runtime)
    begun = time.monotonic()
    answer(runtime, session, 5)
    answer(runtime, session, 1)
    elapsed = time.monotonic() - begun
    assert watched.becomes("request_duration_seconds_count", 2)
    for name, count in (
        ("queue_time_seconds", 2),
        ("time_to_first_token_seconds", 2),
        ("inter_token_latency_seconds", 4),
        ("request_duration_seconds", 2),
    ):
        assert watched.value(f"{name}_count") == count
        assert 0 < watched.value(f"{name}_sum") < elapsed
    assert watched.value("queue_time_seconds_sum") < watched.value("time_to_first_token_seconds_sum")
    assert watched.value("time_to_first_token_seconds_sum") < watched.value("request_duration_seconds_sum")


def test_requests_run_from_their_first_step_to_their_last_event(watched: Watched) -> None:
    runtime = watched.runtime
    streams = [runtime.generate(new_session(runtime), 10_000) for _ in range(2)]
    assert watched.becomes("requests_running", 2)
    assert watched.value("requests_waiting") == 0
    for stream in streams:
        stream.cancel()
    assert watched.becomes("requests_running", 0)
    assert watched.value("requests_waiting") == 0


def test_a_request_without_a_place_in_a_step_waits(open_tiny: OpenTiny) -> None:
    config = tiny.engine_config(threads=1, max_batch_tokens=8)
    watched = Watched(open_tiny, config)
    runtime = watched.runtime
    seen: list[tuple[float | None, float | None]] = []
    run = runtime._engine._backend.run

    def look(*args: object) -> object:
        seen.append((watched.value("requests_waiting"), watched.value("requests_running")))
        return run(*args)

    runtime._engine._backend.run = look
    sessions = [new_session(runtime, [3] * 8) for _ in range(3)]

    # Accepted while nothing is computed, so that all three are there at the first step.
    for stream in runtime._engine._inbox.ask(lambda: [start(runtime, session) for session in sessions]):
        list(stream)
    assert seen[0] == (2, 1)
    assert seen[1] == (1, 2)
    assert watched.becomes("requests_running", 0)


def start(runtime: Runtime, session_id: str) -> object:
    """A generate, accepted on the engine thread itself."""
    from kakeya.engine.request import Request
    from kakeya.engine.stream import EventStream
    from kakeya.types import SamplingParams

    stream = EventStream(runtime._engine._inbox.wake)
    runtime._engine._queue(Request(sequence_of(runtime, session_id), stream, 1, SamplingParams()))
    return stream


def test_a_request_cancelled_while_it_waits_runs_no_more(open_tiny: OpenTiny) -> None:
    watched = Watched(open_tiny)
    runtime = watched.runtime
    session = new_session(runtime)

    def start_and_cancel() -> None:
        start(runtime, session).cancel()

    runtime._engine._inbox.ask(start_and_cancel)
    assert watched.becomes("requests_waiting", 0)
    assert watched.becomes("request_duration_seconds_count", 1)
    assert watched.value("requests_running") == 0
    assert watched.value("queue_time_seconds_count") == 0


def test_admission_counts_each_result(open_tiny: OpenTiny) -> None:
    watched = Watched(open_tiny, settings=RuntimeConfig(None, Quotas(max_concurrent_requests=1)))
    runtime = watched.runtime
    first, second = new_session(runtime), new_session(runtime)
    stream = runtime.generate(first, 10_000, request_id="a")
    for refused, session in ((ResourceExhausted, second), (SessionNotFound, "no such"), (SessionBusy, first)):
        with pytest.raises(refused):
            runtime.generate(session, 1, request_id="a")
    stream.cancel()
    list(stream)
    for _ in range(2):
        answer(runtime, second, 1, request_id="b")
    counted = {name: watched.value("admission_total", result=name) for name in ("accepted", "exhausted")}
    assert counted == {"accepted": 2, "exhausted": 1}
    assert watched.value("admission_total", result="not_found") == 1
    assert watched.value("admission_total", result="busy") is None  # a repeat is not a new request


class Prophet:
    """Knows what comes next, and gets every second guess wrong."""

    name = "prophet"
    is_free = False
    max_draft = 2
    hidden_layers = ()

    def __init__(self, text: list[int]) -> None:
        self.text = text

    def new_state(self) -> "Prophet":
        return self

    def propose(self, requests: list[DraftRequest]) -> list[list[int]]:
        return [self._guess(len(request.tokens))[: request.limit] for request in requests]

    def observe(self, *args: object) -> None: ...

    def rollback(self, length: int) -> None: ...

    def close(self) -> None: ...

    def _guess(self, position: int) -> list[int]:
        right, wrong = [*self.text, 0, 0][position : position + 2]
        return [right, (wrong + 1) % tiny.VOCAB]


def test_drafts_are_counted_with_what_became_of_them(open_tiny: OpenTiny) -> None:
    plain = open_tiny()
    *tokens, _ = answer(plain, new_session(plain), 12)
    watched = Watched(open_tiny, proposers=[Prophet(PROMPT + [token.token_id for token in tokens])])
    *drafted, done = answer(watched.runtime, new_session(watched.runtime), 12)
    assert drafted == tokens
    assert watched.value("draft_tokens_total", proposer="prophet") == done.proposed_draft_tokens
    assert watched.value("accepted_tokens_total", proposer="prophet") == done.accepted_draft_tokens
    assert 0 < done.accepted_draft_tokens < done.proposed_draft_tokens
    assert watched.value("generation_tokens_total") == 12


def test_recall_is_counted(open_tiny: OpenTiny) -> None:
    cache = CacheConfig(sink=2, window=8, spare=4, recall=6)
    watched = Watched(open_tiny, config=tiny.engine_config(cache=cache, threads=1))
    session_id = new_session(watched.runtime, list(range(2, 60)) * 4, recall_tokens=6)
    watched.runtime.recall(session_id, [TokenRange(20, 22), TokenRange(30, 32)])
    done = answer(watched.runtime, session_id, 2)[-1]
    assert watched.value("recall_pages_total") == 2
    assert watched.value("recall_slots_total") == 6  # four tokens, and half of them once more
    assert watched.value("recall_seconds_count") == 1
    assert 0 < watched.value("recall_seconds_sum") <= done.recall_duration_seconds
    assert watched.value("prompt_tokens_total") == 4 * 58


def test_sleeping_sessions(open_tiny: OpenTiny, tmp_path: Path) -> None:
    """States, wakes by tier, bytes and how much a crash would cost: each moves with what really happens."""
    metrics, state = Metrics(), StateConfig(tmp_path, host_tier_bytes=2**20, snapshot_tokens=10**6)
    settings = RuntimeConfig(session_idle_ttl_s=None, state=state)
    runtime = open_tiny(tiny.engine_config(threads=1, capacity=1), metrics=metrics, settings=settings)
    assert metrics.mean_wake_seconds is None
    read = metrics.registry.get_sample_value
    first = new_session(runtime)
    answer(runtime, first, 4)
    computed = runtime.info(first).computed_length
    assert read("kakeya_snapshot_lag_tokens") == computed > 0
    second = new_session(runtime)
    assert [read("kakeya_sessions", {"state": each}) for each in ("idle", "host", "disk")] == [1, 1, 0]
    assert read("kakeya_tier_bytes", {"tier": "host"}) == runtime.tiers().host_bytes > 0  # type: ignore[union-attr]
    assert read("kakeya_tier_limit_bytes", {"tier": "host"}) == 2**20
    runtime.append(first, [])
    assert read("kakeya_wake_seconds_count", {"tier": "host"}) == 1
    runtime._keeping._tiers.settle_down(runtime._store.get(second, "local"))  # type: ignore[attr-defined]
    assert [read("kakeya_sessions", {"state": each}) for each in ("idle", "host", "disk")] == [1, 0, 1]
    assert read("kakeya_tier_bytes", {"tier": "disk"}) == runtime.tiers().disk_bytes > 0  # type: ignore[union-attr]
    runtime.append(second, [])
    assert read("kakeya_wake_seconds_count", {"tier": "disk"}) == 1
    assert metrics.mean_wake_seconds is not None
    assert 0 < metrics.mean_wake_seconds < 60


def test_the_longest_wait_of_late_is_known() -> None:
    metrics = Metrics()
    assert metrics.recent_queue_seconds(60.0) == 0.0
    for seconds in (0.5, 2.0, 1.0):
        metrics.request_started(seconds, 0)
    assert metrics.recent_queue_seconds(60.0) == 2.0
    assert metrics.recent_queue_seconds(-1.0) == 0.0
