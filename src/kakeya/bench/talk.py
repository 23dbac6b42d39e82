"""What a conversation comes to in each way that it was held: turns, and figures derived from them. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kakeya.bench.benchmark import Results
from kakeya.bench.stats import known, percentile, ratio, slope

GRPC, RESPONSES, CHAT, UNMATCHED = "grpc", "responses", "chat", "chat-unmatched"
LLAMA, TRANSFORMERS = "llama", "transformers"
# Whose latency the others' is compared with: the first of these that took part.
YARDSTICKS = (RESPONSES, CHAT, GRPC)

TURNS_NEEDED = 10
# How many turns make the head and the tail of a run, where the window may still fill, and where it is full.
HEAD, ENDS = 50, 20
# From this turn on the server has everything it needs, so that its memory is at rest.
SETTLED_TURN = 20
# Of so many samples the median is taken at the end: one spike or one late give-back does not move it.
RSS_TAIL = 20
# A spread of fewer would be 0 whatever they held.
PLATEAU_TURNS_NEEDED = 2
BUCKET_SECONDS = 600.0


@dataclass(frozen=True)
class Turn:
    """One turn, counted from 1: an answer, and what the server's process held afterwards; or an error.

    Seconds are by the client's clock: `latency_s` from the message's text to the last token, `ttft_s` to the
    first one. Tokens are as the server counts them: `prompt_tokens` is the whole history with the new
    message, `cached_tokens` what of it was not computed again, `dropped_tokens` what has left the window.
    None where a way does not tell. After a turn that is `stopped` the way took part no longer.
    """

    turn: int = 0
    t_relative_s: float = 0.0
    latency_s: float | None = None
    ttft_s: float | None = None
    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    cached_tokens: int | None = None
    dropped_tokens: int | None = None
    kv_live_bytes: int | None = None
    server_rss_bytes: int | None = None
    error_class: str | None = None
    error_str: str | None = None
    stopped: bool = False

    @property
    def ok(self) -> bool:
        return self.error_class is None

    @property
    def history_tokens(self) -> int | None:
        return None if self.prompt_tokens is None else self.prompt_tokens + (self.answer_tokens or 0)

    @property
    def computed_tokens(self) -> int | None:
        """What of the prompt had to be computed."""
        return None if self.prompt_tokens is None else self.prompt_tokens - (self.cached_tokens or 0)


def values(turns: Iterable[Turn], of: str) -> list[float]:
    """What was measured of the turns that went well."""
    return known(getattr(turn, of) for turn in turns if turn.ok)


def percentiles(turns: Sequence[Turn]) -> dict[str, float | None]:
    return {
        f"{name}_p{percent}_s": percentile(values(turns, f"{name}_s"), percent)
        for name in ("latency", "ttft")
        for percent in (50, 95)
    }


@dataclass(frozen=True)
class Ends:
    """Medians over the first and the last turns, fewer on short runs; None under 10 turns."""

    turns: int
    first: float | None
    last: float | None

    @property
    def last_over_first(self) -> float | None:
        return ratio(self.last, self.first)

    @property
    def drift(self) -> float | None:
        return None if self.first is None or self.last is None else self.last - self.first


def ends(measured: Sequence[float], most: int = ENDS) -> Ends:
    count = min(most, len(measured) // 2) if len(measured) >= TURNS_NEEDED else 0
    first, last = measured[:count], measured[len(measured) - count :]
    return Ends(count, percentile(first, 50), percentile(last, 50))


@dataclass(frozen=True)
class Rss:
    """A server's resident memory once it has settled: ends, peak, growth and slope.

    The tail is the median of the last 20 samples after the settled one, fewer on short runs.
    """

    settled_bytes: float | None = None
    last_bytes: float | None = None
    last_over_settled: float | None = None
    peak_over_settled: float | None = None
    tail_over_settled: float | None = None
    slope_bytes_per_s: float | None = None

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> "Rss":
        seen = [turn for turn in turns if turn.server_rss_bytes is not None][SETTLED_TURN - 1 :]
        if len(seen) < 2:
            return cls()
        first, *later = values(seen, "server_rss_bytes")
        return cls(
            first,
            later[-1],
            last_over_settled=ratio(later[-1], first),
            peak_over_settled=ratio(max(first, *later), first),
            tail_over_settled=ratio(percentile(later[-RSS_TAIL:], 50), first),
            slope_bytes_per_s=slope([(turn.t_relative_s, turn.server_rss_bytes or 0) for turn in seen]),
        )


@dataclass(frozen=True)
class Talk:
    """The conversation in one way; `window_tokens` is what a session of ours remembers."""

    way: str
    turns: list[Turn]
    window_tokens: int
    software: dict[str, Any] = field(default_factory=dict)
    sessions_opened: int | None = None

    def good(self) -> list[Turn]:
        return [turn for turn in self.turns if turn.ok]

    def past_plateau(self) -> list[Turn]:
        """The turns after which tokens had left the window."""
        return [turn for turn in self.good() if turn.dropped_tokens]

    @property
    def n_turns(self) -> int:
        return len(self.good())

    @property
    def n_errors(self) -> int:
        return len(self.turns) - self.n_turns

    @property
    def stopped_at(self) -> int | None:
        """The turn after which it took part no longer; its error says why."""
        return self.turns[-1].turn if self.turns and self.turns[-1].stopped else None

    @property
    def history_tokens(self) -> float | None:
        return max(values(self.turns, "history_tokens"), default=None)

    @property
    def dropped_tokens(self) -> float | None:
        return max(values(self.turns, "dropped_tokens"), default=None)

    @property
    def mean_answer_tokens(self) -> float | None:
        counts = values(self.turns, "answer_tokens")
        return sum(counts) / len(counts) if counts else None

    @property
    def latency(self) -> Ends:
        return ends(values(self.turns, "latency_s"))

    @property
    def ttft(self) -> Ends:
        return ends(values(self.turns, "ttft_s"))

    @property
    def computed_tokens(self) -> Ends:
        return ends(values(self.turns, "computed_tokens"))

    @property
    def latency_once_full(self) -> Ends:
        """Over the turns that began with more history than a session holds."""
        full = [turn for turn in self.turns if (turn.prompt_tokens or 0) > self.window_tokens]
        return ends(values(full, "latency_s"))

    @property
    def whole_latency(self) -> Ends:
        """Over more turns at both ends, those included in which the window fills."""
        return ends(values(self.turns, "latency_s"), HEAD)

    @property
    def percentiles(self) -> dict[str, float | None]:
        return percentiles(self.turns)

    @property
    def kv_live_bytes(self) -> dict[str, float | None]:
        kept = values(self.turns, "kv_live_bytes")
        mean = sum(kept) / len(kept) if kept else None
        return {"min": min(kept, default=None), "mean": mean, "max": max(kept, default=None)}

    @property
    def kv_spread_after_plateau(self) -> float | None:
        """(max − min) / max of the live bytes once tokens have left the window; None under 2 such turns."""
        kept = values(self.past_plateau(), "kv_live_bytes")
        if len(kept) < PLATEAU_TURNS_NEEDED or not any(kept):
            return None
        return (max(kept) - min(kept)) / max(kept)

    @property
    def server_rss(self) -> Rss:
        return Rss.of(self.good())

    @property
    def buckets_10min(self) -> list[dict[str, Any]]:
        """Stretches of ten minutes, by when turns began; empty ones included."""
        places = [int(turn.t_relative_s // BUCKET_SECONDS) for turn in self.turns]
        pairs = list(zip(places, self.turns, strict=True))
        stretches = [
            [turn for at, turn in pairs if at == place] for place in range(max(places, default=-1) + 1)
        ]
        return [
            {
                "from_s": place * BUCKET_SECONDS,
                "n_turns": sum(turn.ok for turn in turns),
                "n_errors": sum(not turn.ok for turn in turns),
                **percentiles(turns),
                **{f"{name}_max": max(values(turns, name), default=None) for name in BUCKET_MAXIMA},
            }
            for place, turns in enumerate(stretches)
        ]


BUCKET_MAXIMA = ("kv_live_bytes", "history_tokens", "server_rss_bytes")


@dataclass(frozen=True)
class ConversationResults(Results):
    """The conversation in each way, how long it took, and what ended it."""

    ways: list[Talk]
    duration_s: float = 0.0
    ended_by: str | None = None

    def by_name(self) -> dict[str, Talk]:
        return {talk.way: talk for talk in self.ways}

    @property
    def times_ours(self) -> dict[str, float | None]:
        """How many times our latency each took, over the last 20 turns that both did well."""
        ways = self.by_name()
        ours = next((ways[name] for name in YARDSTICKS if name in ways), None)
        return {} if ours is None else {talk.way: beside(talk, ours) for talk in self.ways}

    @property
    def unmatched_over_matched(self) -> dict[str, float | None]:
        """What matching saves, where both took part."""
        ways = self.by_name()
        if not {CHAT, UNMATCHED} <= ways.keys():
            return {}
        sides = [
            {"head": talk.whole_latency.first, "tail": talk.whole_latency.last, **talk.percentiles}
            for talk in (ways[UNMATCHED], ways[CHAT])
        ]
        names = ("head", "tail", "ttft_p50_s", "latency_p50_s")
        return {name: ratio(*(side[name] for side in sides)) for name in names}


def beside(talk: Talk, ours: Talk) -> float | None:
    own = {turn.turn: turn for turn in ours.good()}
    both = [turn for turn in talk.good() if turn.turn in own][-ENDS:]
    theirs, mine = values(both, "latency_s"), values((own[turn.turn] for turn in both), "latency_s")
    return ratio(percentile(theirs, 50), percentile(mine, 50))
