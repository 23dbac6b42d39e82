"""Prometheus metrics: what the engine and the sessions do, counted as it happens.

`Metrics` is the engine's observer. Gauges that describe sessions are read from the sessions when the metrics
are scraped.
"""

import time
from collections import deque
from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kakeya.observer import EngineObserver, SearchResult
from kakeya.types import TierFacts

SESSION_STATES = ("idle", "generating", "failed", "host", "disk")
# A laptop's decode step takes milliseconds, a long prompt on it minutes.
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_REQUEST_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

# Generates whose waits are remembered one by one.
_RECENT = 256


class Metrics(EngineObserver):
    """The metrics of one server, on a new registry unless one is given."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self._recent: deque[tuple[float, float]] = deque(maxlen=_RECENT)
        self._requests()
        self._tokens()
        self._sessions()

    def _requests(self) -> None:
        gauge, counter = partial(Gauge, registry=self.registry), partial(Counter, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry, buckets=_REQUEST_BUCKETS)
        self._running = gauge("kakeya_requests_running", "Generates computed or read")
        self._waiting = gauge("kakeya_requests_waiting", "Generates not yet in any step")
        self._admission = counter("kakeya_admission", "Generates accepted or refused at the door", ["result"])
        self._queue_time = histogram(
            "kakeya_queue_time_seconds", "From a generate's acceptance to its first step"
        )
        self._first_token = histogram(
            "kakeya_time_to_first_token_seconds", "From a generate's acceptance to its first token"
        )
        self._token_gap = histogram(
            "kakeya_inter_token_latency_seconds",
            "Between one token of a generate and the next",
            buckets=_TOKEN_BUCKETS,
        )
        self._duration = histogram(
            "kakeya_request_duration_seconds", "From a generate's acceptance to its last event"
        )

    def _tokens(self) -> None:
        gauge, counter = partial(Gauge, registry=self.registry), partial(Counter, registry=self.registry)
        self._prompt = counter("kakeya_prompt_tokens", "Prompt tokens computed")
        self._cached = counter("kakeya_cached_tokens", "Tokens of history that a generate found computed")
        self._prefixes = counter("kakeya_shared_beginnings", "Prompts whose prefix was copied")
        self._shared = counter("kakeya_shared_tokens", "Prompt tokens that were copied instead of computed")
        self._prefix_bytes = gauge("kakeya_prefix_cache_bytes", "Bytes that the prefix cache holds")
        self._prefix_evictions = counter(
            "kakeya_prefix_cache_evictions", "Granules that left the prefix cache"
        )
        self._generated = counter("kakeya_generation_tokens", "Tokens generated")
        self._evicted = counter("kakeya_evicted_tokens", "Tokens that left a window")
        self._recall()
        self._drafted = counter("kakeya_draft_tokens", "Guessed tokens that were verified", ["proposer"])
        self._accepted = counter(
            "kakeya_accepted_tokens", "Guessed tokens that the verifier kept", ["proposer"]
        )

    def _recall(self) -> None:
        counter = partial(Counter, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry, buckets=_TOKEN_BUCKETS)
        self._lookups = counter(
            "kakeya_recall_lookups", "Searches of a session's past, by result", ["result"]
        )
        for result in SearchResult:
            self._lookups.labels(result.value)
        self._recalled_pages = counter("kakeya_recall_pages", "Ranges of the past that turns brought back")
        self._recalled_slots = counter("kakeya_recall_slots", "Slots that were computed for them")
        self._lookup_time = histogram("kakeya_recall_lookup_seconds", "What a search took")
        self._recall_time = histogram(
            "kakeya_recall_seconds", "What it took to compute what was brought back"
        )

    def _sessions(self) -> None:
        gauge, counter = partial(Gauge, registry=self.registry), partial(Counter, registry=self.registry)
        self._session_count = gauge("kakeya_sessions", "Sessions by state", ["state"])
        self._live_bytes = gauge(
            "kakeya_kv_live_bytes", "Bytes of keys and values that sessions can attend to"
        )
        self._capacity_bytes = gauge(
            "kakeya_kv_capacity_bytes", "Bytes of the pool of slabs, fixed at the start"
        )
        self._violations = counter(
            "kakeya_invariant_violations", "Sessions failed because their bookkeeping broke", ["invariant"]
        )
        self._tier_bytes = gauge("kakeya_tier_bytes", "Bytes that sleeping sessions take", ["tier"])
        self._tier_limits = gauge("kakeya_tier_limit_bytes", "Bytes that they may take", ["tier"])
        self._snapshot_lag = gauge(
            "kakeya_snapshot_lag_tokens", "The most tokens a session would compute again after a crash"
        )
        self._damaged = counter("kakeya_damaged_snapshots", "Stored snapshots that had to be computed again")
        self._wakes = Histogram(
            "kakeya_wake_seconds",
            "From a call on a sleeping session to its slab",
            ["tier"],
            registry=self.registry,
            buckets=_TOKEN_BUCKETS,
        )
        for invariant in ("INV-1", "INV-2", "INV-4"):
            self._violations.labels(invariant)

    def exposition(self) -> bytes:
        """Everything, in the text format that Prometheus reads."""
        return generate_latest(self.registry)

    def watch_sessions(
        self, count: Callable[[str], int], live_bytes: Callable[[], int], capacity_bytes: int
    ) -> None:
        """Have the session gauges read from these functions at each scrape."""
        for state in SESSION_STATES:
            self._session_count.labels(state).set_function(partial(count, state))
        self._live_bytes.set_function(live_bytes)
        self._capacity_bytes.set(capacity_bytes)

    def watch_tiers(self, tiers: Callable[[], TierFacts | None]) -> None:
        """Have the gauges of sleeping sessions read from this function at each scrape, if any can sleep."""
        if tiers() is None:
            return

        def read(name: str) -> float:
            facts = tiers()
            return 0.0 if facts is None else float(getattr(facts, name))

        for tier in ("host", "disk"):
            self._tier_bytes.labels(tier).set_function(partial(read, f"{tier}_bytes"))
            self._tier_limits.labels(tier).set_function(partial(read, f"{tier}_limit"))
        self._snapshot_lag.set_function(partial(read, "lag_tokens"))

    def recent_queue_seconds(self, within_s: float) -> float:
        """The longest that a generate waited which had its first step in so many seconds."""
        since = time.monotonic() - within_s
        return max((seconds for at, seconds in tuple(self._recent) if at >= since), default=0.0)

    # The engine's events.

    def request_queued(self) -> None:
        self._waiting.inc()

    def request_started(self, queue_seconds: float, cached_tokens: int) -> None:
        self._waiting.dec()
        self._running.inc()
        self._queue_time.observe(queue_seconds)
        self._recent.append((time.monotonic(), queue_seconds))
        self._cached.inc(cached_tokens)

    def prompt_computed(self, tokens: int) -> None:
        self._prompt.inc(tokens)

    def prefix_copied(self, tokens: int) -> None:
        self._prefixes.inc()
        self._shared.inc(tokens)

    def prefix_cache(self, held_bytes: int, evicted: int) -> None:
        self._prefix_bytes.set(held_bytes)
        self._prefix_evictions.inc(evicted)

    def first_token(self, seconds: float) -> None:
        self._generated.inc()
        self._first_token.observe(seconds)

    def next_token(self, seconds: float) -> None:
        self._generated.inc()
        self._token_gap.observe(seconds)

    def drafts(self, proposer: str, proposed: int, accepted: int) -> None:
        self._drafted.labels(proposer).inc(proposed)
        self._accepted.labels(proposer).inc(accepted)

    def recall_searched(self, seconds: float, result: SearchResult) -> None:
        self._lookups.labels(result.value).inc()
        self._lookup_time.observe(seconds)

    def recalled(self, ranges: int, slots: int, seconds: float) -> None:
        self._recalled_pages.inc(ranges)
        self._recalled_slots.inc(slots)
        self._recall_time.observe(seconds)

    def tokens_evicted(self, tokens: int) -> None:
        self._evicted.inc(tokens)

    def request_ended(self, seconds: float, *, started: bool) -> None:
        (self._running if started else self._waiting).dec()
        self._duration.observe(seconds)

    def invariant_violated(self, invariant: str) -> None:
        self._violations.labels(invariant).inc()

    def session_woken(self, place: str, seconds: float) -> None:
        self._wakes.labels(place).observe(seconds)

    @property
    def mean_wake_seconds(self) -> float | None:
        """What a wake took on average, wherever the session slept; None when none woke."""
        read = self.registry.get_sample_value
        tiers = [{"tier": "host"}, {"tier": "disk"}]
        count, total = (
            sum(read(f"kakeya_wake_seconds_{what}", tier) or 0.0 for tier in tiers)
            for what in ("count", "sum")
        )
        return total / count if count else None

    def snapshot_damaged(self) -> None:
        self._damaged.inc()

    def admission(self, result: str) -> None:
        self._admission.labels(result).inc()


class ProposerMetrics:
    """The metrics of `kakeya propose`, on a new registry unless one is given."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        gauge, counter = partial(Gauge, registry=self.registry), partial(Counter, registry=self.registry)
        self._streams = gauge("kakeya_proposer_streams", "Verifiers that are connected")
        self._sessions = gauge("kakeya_proposer_sessions", "Sessions of all verifiers")
        self._told = counter("kakeya_proposer_told_tokens", "Tokens of histories that verifiers have told")
        self._guessed = counter("kakeya_proposer_guessed_tokens", "Tokens guessed", ["proposer"])
        self._discarded = counter(
            "kakeya_proposer_discarded_tokens",
            "Guessed tokens that were wrong, or followed one that was",
        )

    def watch(self, streams: Callable[[], int], sessions: Callable[[], int]) -> None:
        """Have the gauges read from these functions at each scrape."""
        self._streams.set_function(streams)
        self._sessions.set_function(sessions)

    def told(self, tokens: int) -> None:
        self._told.inc(tokens)

    def guessed(self, proposer: str, tokens: int) -> None:
        self._guessed.labels(proposer).inc(tokens)

    def discarded(self, tokens: int) -> None:
        self._discarded.inc(tokens)


class BridgeMetrics:
    """The metrics of `kakeya bridge serve`, on a new registry unless one is given."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self._running = Gauge(
            "kakeya_bridge_running", "Runs that are going on, 0 or 1", registry=self.registry
        )
        self._runs = Counter(
            "kakeya_bridge_runs", "Runs that ended", ["preset", "state"], registry=self.registry
        )

    def started(self) -> None:
        self._running.set(1)

    def ended(self, preset: str, state: str) -> None:
        self._running.set(0)
        self._runs.labels(preset, state).inc()
