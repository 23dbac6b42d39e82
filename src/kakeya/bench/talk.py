"""What a conversation comes to in each way that it was held: turns, figures, tables and charts. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from types import SimpleNamespace as Space
from typing import Any

from kakeya.bench.benchmark import Results
from kakeya.bench.stats import known, percentile, ratio, slope
from kakeya.bench.tables import MIB, MS, Chart, Column, Series, Table, figure, figures, listing, over

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
BUCKET_MAXIMA = ("kv_live_bytes", "history_tokens", "server_rss_bytes")


@dataclass(frozen=True)
class Turn:
    """One turn, counted from 1: an answer, or an error. None where a way does not tell.

    Seconds run from the message's text to the last token, `ttft_s` to the first one. `prompt_tokens` is the
    whole history with the new message, `cached_tokens` what of it was not computed again, `dropped_tokens`
    what has left the window. After a turn that is `stopped` the way took part no longer.
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
    def of(cls, turns: Iterable[Turn]) -> "Rss":
        points = [
            (turn.t_relative_s, turn.server_rss_bytes)
            for turn in turns
            if turn.ok and turn.server_rss_bytes is not None
        ][SETTLED_TURN - 1 :]
        if len(points) < 2:
            return cls()
        first, *later = (size for _, size in points)
        return cls(
            first,
            later[-1],
            last_over_settled=ratio(later[-1], first),
            peak_over_settled=ratio(max(first, *later), first),
            tail_over_settled=ratio(percentile(later[-RSS_TAIL:], 50), first),
            slope_bytes_per_s=slope(points),
        )


def _ends_of(name: str, most: int = ENDS) -> property:
    return property(lambda talk: ends(values(talk.turns, name), most))


def _most(name: str) -> property:
    return property(lambda talk: max(values(talk.turns, name), default=None))


@dataclass(frozen=True)
class Talk:
    """The conversation in one way; `window_tokens` is what a session of ours remembers."""

    way: str
    turns: list[Turn]
    window_tokens: int
    software: dict[str, Any] = field(default_factory=dict)
    sessions_opened: int | None = None

    history_tokens = _most("history_tokens")
    dropped_tokens = _most("dropped_tokens")
    latency = _ends_of("latency_s")
    ttft = _ends_of("ttft_s")
    computed_tokens = _ends_of("computed_tokens")
    # Over more turns at both ends, those included in which the window fills.
    whole_latency = _ends_of("latency_s", HEAD)

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
    def mean_answer_tokens(self) -> float | None:
        counts = values(self.turns, "answer_tokens")
        return fmean(counts) if counts else None

    @property
    def latency_once_full(self) -> Ends:
        """Over the turns that began with more history than a session holds."""
        full = [turn for turn in self.turns if (turn.prompt_tokens or 0) > self.window_tokens]
        return ends(values(full, "latency_s"))

    @property
    def percentiles(self) -> dict[str, float | None]:
        return percentiles(self.turns)

    @property
    def kv_live_bytes(self) -> dict[str, float | None]:
        kept = values(self.turns, "kv_live_bytes")
        mean = fmean(kept) if kept else None
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
        return Rss.of(self.turns)

    @property
    def buckets_10min(self) -> list[dict[str, Any]]:
        """Stretches of ten minutes, by when turns began; empty ones included."""
        stretches: list[list[Turn]] = []
        for turn in self.turns:
            place = int(turn.t_relative_s // BUCKET_SECONDS)
            stretches += ([] for _ in range(place + 1 - len(stretches)))
            stretches[place].append(turn)
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


def shown(results: ConversationResults) -> list[Table | Chart]:
    """The conversation as tables and charts."""
    times_ours = results.times_ours
    beside_ours = Column("× ours", lambda talk: times_ours.get(talk.way), form=".2f")
    columns = [*ENDS_COLUMNS, beside_ours, Column("ended", _ended)]
    buckets = [Space(way=talk.way, **bucket) for talk in results.ways for bucket in talk.buckets_10min]
    software = [
        (talk.way, ", ".join(f"{name} {value}" for name, value in talk.software.items()))
        for talk in results.ways
    ]
    errors = [
        (talk.way, turn.turn, f"{turn.t_relative_s:,.1f}", f"{turn.error_class}: {turn.error_str}")
        for talk in results.ways
        for turn in talk.turns
        if not turn.ok
    ]
    return [
        Table(f"Latency, medians of the first and last {ENDS} turns", columns, results.ways),
        *_charts(results),
        Table("The whole conversation", WHOLE_COLUMNS, results.ways),
        listing("The run", ("what", "value"), _run_rows(results), labels=1),
        Table("By 10 minutes", BUCKET_COLUMNS, buckets),
        listing("Who took part", ("way", "what"), software),
        *([listing("The first errors", ("way", "turn", "second", "message"), errors[:20])] if errors else ()),
    ]


def _ended(talk: Talk) -> str:
    if talk.stopped_at:
        return f"stopped at turn {talk.stopped_at}"
    return f"{talk.n_errors} errors" if talk.n_errors else "well"


def _p50_p95(talk: Talk, name: str) -> str:
    return figures(*(talk.percentiles[f"{name}_p{rank}_s"] for rank in (50, 95)), scale=MS, form=",.1f")


def _memory(talk: Talk) -> str:
    rss = talk.server_rss
    return figures(rss.peak_over_settled, rss.tail_over_settled, rss.last_over_settled, form=".4f")


ENDS_COLUMNS = [
    Column("way", "way"),
    Column("turns", "n_turns"),
    Column("first, ms", "latency.first", MS),
    Column("last, ms", "latency.last", MS),
    Column("last/first", "latency.last_over_first", form=".2f"),
    Column("first token, ms", "ttft.last", MS),
    Column("computed, first", "computed_tokens.first"),
    Column("last", "computed_tokens.last"),
    Column("history", "history_tokens"),
    Column("answer", "mean_answer_tokens", form=".1f"),
]
WHOLE_COLUMNS = [
    Column("way", "way"),
    Column("latency p50 / p95, ms", lambda talk: _p50_p95(talk, "latency")),
    Column("first token p50 / p95, ms", lambda talk: _p50_p95(talk, "ttft")),
    Column(f"first {HEAD}, ms", "whole_latency.first", MS, ",.1f"),
    Column(f"last {HEAD}, ms", "whole_latency.last", MS, ",.1f"),
    Column("last over first", "whole_latency.last_over_first", form=".3f"),
    Column("least KV MiB", lambda talk: talk.kv_live_bytes["min"], MIB, ",.2f"),
    Column("most", lambda talk: talk.kv_live_bytes["max"], MIB, ",.2f"),
    Column(f"memory over turn {SETTLED_TURN}'s: peak / last {RSS_TAIL} turns / last turn", _memory),
    Column("its slope, KiB a minute", "server_rss.slope_bytes_per_s", 60 / 1024, "+,.1f"),
]
BUCKET_COLUMNS = [
    Column("way", "way"),
    Column("from minute", "from_s", 1 / 60),
    Column("turns", "n_turns"),
    Column("errors", "n_errors"),
    Column("latency p50, ms", "latency_p50_s", MS, ",.1f"),
    Column("p95, ms", "latency_p95_s", MS, ",.1f"),
    Column("KV MiB", "kv_live_bytes_max", MIB, ",.2f"),
    Column("history", "history_tokens_max"),
    Column("RSS MiB", "server_rss_bytes_max", MIB, ",.1f"),
]


def _run_rows(results: ConversationResults) -> list[tuple[str, str]]:
    aborted = results.abort_reason and f"aborted: {results.abort_reason}"
    matching = results.unmatched_over_matched.items()
    opened = known(talk.sessions_opened for talk in results.ways)
    return [
        ("ended by", results.ended_by or aborted or "not yet"),
        ("seconds", figure(results.duration_s, form=",.1f")),
        ("share of the machine that others used", figure(results.bystanders_share, form=".1%")),
        *((f"unmatched over matched, {name}", figure(value, form=".2f")) for name, value in matching),
        *(("sessions opened", figure(count)) for count in opened),
    ]


def _charts(results: ConversationResults) -> list[Chart]:
    """Over turns all ways beside each other; a session over gRPC, which may be long, over its history."""
    ways = results.by_name()
    alone = list(ways) == [GRPC]
    stops = {name: _ended(talk) for name, talk in ways.items() if talk.stopped_at}
    how = {"log_y": True, "ends": stops, "picture": not alone}
    return [
        _over_turns(ways, "Latency per turn", "seconds", "latency_s", **how),
        _over_turns(ways, "Prompt tokens computed per turn", "tokens", "computed_tokens"),
        *(_history_charts(ways[GRPC].good(), picture=alone) if GRPC in ways else ()),
    ]


def _over_turns(ways: Mapping[str, Talk], title: str, unit: str, of: str, **how: Any) -> Chart:
    """A line for each way, with a gap where a turn went wrong."""
    numbers = range(1, max((len(talk.turns) for talk in ways.values()), default=0) + 1)
    lines = []
    for name, talk in ways.items():
        found = {turn.turn: getattr(turn, of) for turn in talk.good()}
        lines.append(Series(name, [found.get(number) for number in numbers]))
    return Chart(title, unit, "turn", [float(number) for number in numbers], lines, **how)


def _history_charts(turns: Sequence[Turn], *, picture: bool) -> list[Chart]:
    axis = "thousand tokens of history"
    at = [(turn.history_tokens or 0) / 1000 for turn in turns]
    latency = {"latency": "latency_s", "first token": "ttft_s"}
    kept, memory = {"live KV bytes": "kv_live_bytes"}, {"server resident memory": "server_rss_bytes"}
    return [
        over("Latency over history", "ms", axis, at, turns, latency, MS, picture=picture),
        over("KV memory", "MiB", axis, at, turns, kept, MIB),
        over("Server memory", "MiB", axis, at, turns, memory, MIB),
    ]
