"""`kakeya bench engine`: speed, memory and start of the runtime, alone or beside llama.cpp."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kakeya.bench.benchmark import EngineBenchmark, Quick, Repeats, Results, Run, Work
from kakeya.bench.cases import LEAD_IN, LEAD_OUT, Case, Plan, Side, Speeds, run_group
from kakeya.bench.machine import public_name
from kakeya.bench.peers.llama import LlamaProcess, require_llama
from kakeya.bench.processes import resident_bytes
from kakeya.bench.report import Gate, at_least, at_most, busy, bystanders_gate
from kakeya.bench.startup import launch
from kakeya.bench.stats import Samples, median_of_ratios, ratio
from kakeya.bench.tables import MIB, Chart, Column, Series, Table, listing, over
from kakeya.bench.text import prose, stretch
from kakeya.config import DEFAULT_MODEL
from kakeya.errors import ConfigError
from kakeya.types import Event, SamplingParams, TokenEvent

if TYPE_CHECKING:
    from kakeya.runtime import Runtime

OURS, PEER = "kakeya", "llama.cpp"
SPEED = "tokens/s"
GREEDY = "greedy"
# The ways of choosing tokens that are compared.
CHOICES = {
    GREEDY: SamplingParams(),
    "top-p": SamplingParams(temperature=0.7, top_p=0.95),
    "top-p and penalty": SamplingParams(temperature=0.7, top_p=0.95, repetition_penalty=1.1),
}


def _targets(prompts: Mapping[int, float], decodes: Mapping[tuple[int, int], float]) -> dict[Case, float]:
    """How many times the peer's speed: prompts by tokens, decoding by (sessions, history)."""
    targets = {Case(tokens=tokens): limit for tokens, limit in prompts.items()}
    return targets | {Case(sessions=shape[0], history=shape[1]): limit for shape, limit in decodes.items()}


# The default model is small, 4 bits throughout; other files are larger and mix their formats.
DEFAULT_MODEL_TARGETS = _targets(
    {128: 3.0, 512: 3.0}, {(1, 64): 1.25, (1, 4096): 2.0, (1, 16384): 3.0, (16, 64): 2.5, (16, 1024): 2.5}
)
FILE_TARGETS = _targets(
    {512: 2.0}, {(1, 64): 1.2, (1, 4096): 1.5, (1, 16384): 3.0, (16, 64): 2.5, (16, 1024): 2.5}
)
# Sessions that sample at this history, and what they keep of greedy decoding's speed.
SAMPLED_SESSIONS, SAMPLED_HISTORY = (1, 16, 32), 64
SAMPLED_LIMIT = 0.97
FLAT_HISTORIES = (2048, 16384)
FLAT_LIMIT = 0.97
MEMORY_LIMIT = 1.01
START_LIMIT_SECONDS = 5.0
FIRST_TOKEN_LIMIT_SECONDS = 1.0
# What we may use of one core while the peer is timed.
QUIET_LIMIT = 0.05

NOT_MEASURED = "not measured in this run"
NO_PEER = "no peer in this run: use --peers"


def full_plan(repeats: int) -> Plan:
    """What the targets are stated for."""
    return _plan(
        (128, 512), (64, 1024, 2048, 4096, 16384), (8, 16, 32), (64, 1024), (32, 16), (1, 16, 32), repeats
    )


def quick_plan(repeats: int) -> Plan:
    """A few seconds of the same kinds of work, to see that everything runs."""
    return _plan((32,), (16, 64), (2,), (16,), (4, 4), (1, 2), repeats)


def _plan(
    prompts: Sequence[int],
    histories: Sequence[int],
    sessions: Sequence[int],
    shared_histories: Sequence[int],
    steps: tuple[int, int],
    sampled_sessions: Sequence[int],
    repeats: int,
) -> Plan:
    alone, together = steps
    groups = [
        tuple(Case(tokens=tokens) for tokens in prompts),
        tuple(Case(history=history, steps=alone) for history in histories),
        *(
            tuple(Case(sessions=count, history=history, steps=together) for count in sessions)
            for history in shared_histories
        ),
    ]
    sampled = tuple(
        Case(0, count, histories[0], 2 * (alone if count == 1 else together), choice)
        for count in sampled_sessions
        for choice in CHOICES
    )
    return Plan(tuple(groups), repeats, sampled)


@dataclass(frozen=True)
class Speed:
    """A case with the samples of both sides; `of_greedy` is what sampling keeps of the greedy speed."""

    tokens_per_second: Samples
    peer_tokens_per_second: Samples | None = None
    tokens: int = 0
    sessions: int = 1
    history: int = 0
    choice: str | None = None
    of_greedy: float | None = None

    @property
    def ratio(self) -> float | None:
        theirs = self.peer_tokens_per_second
        return ratio(self.tokens_per_second.median, theirs.median if theirs else None)

    def case(self) -> Case:
        return Case(self.tokens, self.sessions, self.history, choice=self.choice)

    def label(self) -> str:
        return self.case().label


@dataclass(frozen=True)
class Peer:
    """The library, how it ran each case, what we used of a core meanwhile, and its memory at most."""

    library: str
    system: str = ""
    flash_attention: dict[str, bool] = field(default_factory=dict)
    our_cpu_share: float = 0.0
    resident_bytes: int | None = None


@dataclass(frozen=True)
class Memory:
    """Resident bytes of this process at four moments, and what the KV pool takes of them."""

    before_open_bytes: int | None
    after_open_bytes: int | None
    after_warm_up_bytes: int | None
    pool_bytes: int
    at_end_bytes: int | None = None

    @property
    def growth(self) -> float | None:
        return ratio(self.at_end_bytes, self.after_warm_up_bytes)


@dataclass(frozen=True)
class Startup:
    """Fresh processes, timed from launch to a loaded model, and from there to the first token."""

    ready_seconds: Samples
    first_token_seconds: Samples


@dataclass(frozen=True)
class EngineResults(Results):
    """Speeds of prompts, of greedy and of sampled decoding; the peer, if there was one; memory and start."""

    prompt: list[Speed]
    decode: list[Speed]
    memory: Memory
    startup: Startup
    sampled: list[Speed] = field(default_factory=list)
    peer: Peer | None = None

    def decoded(self, sessions: int, history: int) -> float | None:
        """The speed measured for so many sessions at that history."""
        wanted = Case(sessions=sessions, history=history)
        return next((row.tokens_per_second.median for row in self.decode if row.case() == wanted), None)


@dataclass(frozen=True)
class Engine(EngineBenchmark[EngineResults]):
    """What to measure and on what."""

    kind = "engine"
    title = "Engine benchmark"
    help = "Speed, memory and start of the engine."
    results = EngineResults

    peers: Annotated[bool, typer.Option("--peers", help="Measure llama.cpp beside us, in turns.")] = False
    repeats: Repeats = 5
    quick: Quick = False
    longest_history: Annotated[int | None, typer.Option(help="Leave out longer histories.")] = None
    most_sessions: Annotated[int | None, typer.Option(help="Leave out more sessions at once.")] = None

    def __post_init__(self) -> None:
        for name, least in (("repeats", 1), ("longest_history", 64), ("most_sessions", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                said = f"{name.replace('_', '-')} must be at least {least}, or nothing is left to measure"
                raise ConfigError(f"{said}; got {value}")

    def check(self, *, picture: bool) -> None:
        super().check(picture=picture)
        if self.peers:
            require_llama()

    def plan(self) -> Plan:
        plan = quick_plan(self.repeats) if self.quick else full_plan(self.repeats)
        return plan.limited(self.longest_history, self.most_sessions)

    def run(self, run: Run[EngineResults]) -> EngineResults:
        """Start, load, warm up, then measure group after group, with a partial report after each."""
        from kakeya.runtime import Runtime

        plan = self.plan()
        work = run.work(3 + plan.pieces_of_work(sides=2 if self.peers else 1))
        work.piece(f"starting {self.model} in fresh processes")
        startup = self._startup()
        work.piece(f"loading {self.model}")
        config, before = self.engine_config(capacity=plan.most_sessions), resident_bytes()
        with Runtime.open(self.model, config) as runtime:
            opened = resident_bytes()
            run.facts |= {"engine": asdict(runtime.config.resolved()), "runtime": _runtime_facts(runtime)}
            ours = RuntimeSide(runtime, runtime.tokenizer.encode(prose()))
            work.piece("warming up")
            _warm_up(ours, plan)
            memory = Memory(before, opened, resident_bytes(), runtime.describe().pool_bytes)
            with self._sides(runtime, ours) as sides:
                peer = next((side for side in sides if isinstance(side, LlamaProcess)), None)
                with run.watching([os.getpid(), *([peer.pid] if peer else ())]):
                    results = EngineResults([], [], memory, startup)
                    for speeds in _measured(sides, plan, work):
                        ended = replace(memory, at_end_bytes=resident_bytes())
                        results = _concluded(plan, speeds, ended, startup, peer)
                        run.checkpoint(results)
        return results

    def _startup(self) -> Startup:
        config = self.engine_config(capacity=1)
        times = [launch(self.model, config) for _ in range(min(3, self.repeats))]
        return Startup(*(Samples(each) for each in zip(*times, strict=True)))

    @contextmanager
    def _sides(self, runtime: "Runtime", ours: "RuntimeSide") -> Iterator[Sequence[Side]]:
        if not self.peers:
            yield (ours,)
            return
        facts = runtime.describe()
        require_llama(facts.path)
        with LlamaProcess(facts.path, facts.threads, ours.text) as peer:
            yield (ours, peer)

    def gates(self, results: EngineResults) -> list[Gate]:
        """The targets. Ratios are judged only where a peer was measured beside us on a quiet machine."""
        targets = DEFAULT_MODEL_TARGETS if self.model == DEFAULT_MODEL else FILE_TARGETS
        noise, peer = busy(results.bystanders_share), results.peer
        ratios = {row.case(): row.ratio for row in (*results.prompt, *results.decode) if not noise}
        absent = NO_PEER if peer is None else noise or NOT_MEASURED
        near, far = FLAT_HISTORIES
        flat = ratio(results.decoded(1, far), results.decoded(1, near))
        name = f"decode speed at history {far:,} over {near:,}"
        our_share = peer.our_cpu_share if peer else None
        return [
            *(
                at_least(f"{case.label}, ratio to {PEER}", ratios.get(case), limit, absent=absent)
                for case, limit in targets.items()
            ),
            at_least(name, flat, FLAT_LIMIT, absent="both histories must be measured"),
            *_sampling_gates(results.sampled, noise),
            *_behaviour_gates(results),
            at_most("our share of one core while the peer is timed", our_share, QUIET_LIMIT, absent=NO_PEER),
            bystanders_gate(results.bystanders_share),
        ]

    @staticmethod
    def show(results: EngineResults) -> list[Table | Chart]:
        columns = [
            Column("work", lambda row: row.label()),
            Column(OURS, "tokens_per_second.median"),
            Column(PEER, "peer_tokens_per_second.median"),
            Column("ratio", "ratio", form=".2f", unit="x"),
        ]
        speeds = [*results.prompt, *results.decode]
        shown: list[Table | Chart] = [
            Table(f"Speed, {SPEED} (median)", columns if results.peer else columns[:2], speeds),
            *_speed_charts(results),
        ]
        if results.sampled:
            kept = Column("of greedy", "of_greedy", form=".3f")
            title = f"Sampled decoding, {SPEED} (median); ours alone, the peer chooses no tokens"
            shown += [Table(title, [*columns[:2], kept], results.sampled), _sampled_chart(results.sampled)]
        return [*shown, _memory_table(results.memory), _startup_table(results.startup)]


def _warm_up(ours: "RuntimeSide", plan: Plan) -> None:
    """One untimed pass through the largest work of each kind, so that scratch memory is there."""
    for case in plan.largest_of_each_kind:
        ours.prepare(case)
        ours.release()  # the next one's history is another session, and there is room for one batch only


def _measured(sides: Sequence[Side], plan: Plan, work: Work) -> Iterator[Speeds]:
    """All speeds so far, after each group of cases. The first side is ours."""
    speeds: Speeds = {}
    for group in plan.groups:
        speeds |= run_group(sides, group, plan.repeats, work.piece)
        yield speeds
    speeds |= run_group(sides[:1], plan.sampled, plan.repeats, work.piece)
    yield speeds


def _concluded(
    plan: Plan, speeds: Speeds, memory: Memory, startup: Startup, peer: LlamaProcess | None
) -> EngineResults:
    """What has been measured so far."""
    rows = [_row(case, speeds) for case in plan.cases if (OURS, case) in speeds]
    decodes = [row for row in rows if not row.tokens]
    decodes.sort(key=lambda row: (row.history if row.sessions > 1 else 0, row.sessions, row.history))
    found = None
    if peer is not None:
        found = Peer(
            **peer.facts,
            flash_attention=dict(peer.flash_attention),
            our_cpu_share=peer.our_cpu_share,
            resident_bytes=peer.resident_bytes,
        )
    sampled = [_sampled_row(case, speeds) for case in plan.sampled if (OURS, case) in speeds]
    return EngineResults([row for row in rows if row.tokens], decodes, memory, startup, sampled, found)


def _row(case: Case, speeds: Speeds) -> Speed:
    theirs = speeds.get((PEER, case))
    return Speed(
        Samples.of(speeds[OURS, case]),
        None if theirs is None else Samples.of(theirs),
        case.tokens,
        case.sessions,
        case.history,
        case.choice,
    )


def _sampled_row(case: Case, speeds: Speeds) -> Speed:
    greedy = speeds[OURS, replace(case, choice=GREEDY)]
    return replace(_row(case, speeds), of_greedy=median_of_ratios(speeds[OURS, case], greedy))


def _runtime_facts(runtime: "Runtime") -> dict[str, Any]:
    facts = asdict(runtime.describe())
    return {**facts, "model": public_name(facts["model"]), "path": Path(facts["path"])}


def _sampling_gates(sampled: Sequence[Speed], noise: str | None) -> list[Gate]:
    kept = {row.case(): row.of_greedy for row in sampled if not noise}
    cases = [
        Case(sessions=sessions, history=SAMPLED_HISTORY, choice=choice)
        for sessions in SAMPLED_SESSIONS
        for choice in CHOICES
        if choice != GREEDY
    ]
    return [
        at_least(
            f"{case.label}, part of greedy's speed",
            kept.get(case),
            SAMPLED_LIMIT,
            absent=noise or NOT_MEASURED,
        )
        for case in cases
    ]


def _behaviour_gates(results: EngineResults) -> list[Gate]:
    """Memory does not grow and, with one session each, is not more than the peer's; the start is quick."""
    growth, startup, peer = results.memory.growth, results.startup, results.peer
    # More sessions take more of ours, which is there from the start.
    alone = all(row.sessions == 1 for row in results.decode)
    beside = ratio(results.memory.at_end_bytes, peer.resident_bytes) if peer and alone else None
    no_beside = "judged with one session each: use --most-sessions 1" if peer else NO_PEER
    ready, first = startup.ready_seconds.median, startup.first_token_seconds.median
    launched, answered = "seconds from launch to a loaded model", "seconds from there to the first token"
    return [
        at_most("resident memory, end over warm-up", growth, MEMORY_LIMIT, absent=NOT_MEASURED),
        at_most(f"resident memory over {PEER}'s", beside, 1.0, absent=no_beside),
        at_most(launched, ready, START_LIMIT_SECONDS, absent=NOT_MEASURED),
        at_most(answered, first, FIRST_TOKEN_LIMIT_SECONDS, absent=NOT_MEASURED),
    ]


def _memory_table(memory: Memory) -> Table:
    moments = ("before_open", "after_open", "after_warm_up", "at_end", "pool")
    columns = [
        Column("moment", lambda moment: moment.replace("_", " ")),
        Column("MiB", lambda moment: getattr(memory, f"{moment}_bytes"), MIB, ",.1f"),
    ]
    return Table("Resident memory", columns, moments)


def _startup_table(startup: Startup) -> Table:
    ready, first = (
        f"{each.median or 0:.2f}" for each in (startup.ready_seconds, startup.first_token_seconds)
    )
    rows = [("launch to loaded model", ready), ("from there to first token", first)]
    return listing("Start of a fresh process (median)", ("step", "seconds"), rows, labels=1)


def _speed_charts(results: EngineResults) -> list[Chart]:
    alone = [row for row in results.decode if row.sessions == 1]
    charts = [
        _chart("Prompt", "prompt tokens", results.prompt, "tokens", bars=True),
        _chart("One session", "tokens of history", alone, "history", picture=True),
    ]
    for history in sorted({row.history for row in results.decode if row.sessions > 1}):
        rows = [row for row in results.decode if row.history == history]
        charts.append(
            _chart("Sessions together", f"sessions at history {history:,}", rows, "sessions", bars=True)
        )
    return charts


def _chart(title: str, x_title: str, rows: Sequence[Speed], place: str, **how: bool) -> Chart:
    series = {OURS: "tokens_per_second.median", PEER: "peer_tokens_per_second.median"}
    if not any(row.peer_tokens_per_second for row in rows):
        del series[PEER]
    return over(title, SPEED, x_title, [f"{getattr(row, place):,}" for row in rows], rows, series, **how)


def _sampled_chart(sampled: Sequence[Speed]) -> Chart:
    sessions = dict.fromkeys(f"{row.sessions:,}" for row in sampled)
    series = [
        Series(str(choice), [row.tokens_per_second.median for row in sampled if row.choice == choice])
        for choice in dict.fromkeys(row.choice for row in sampled)
    ]
    return Chart("Sampled decoding", SPEED, "sessions", list(sessions), series, bars=True)


class RuntimeSide:
    """Our side: the runtime called directly. Histories are computed once and forked for every repetition.

    Decoding never stops early and is greedy unless a case says otherwise. The choice of tokens and the
    delivery of events are part of the time.
    """

    name = OURS

    def __init__(self, runtime: "Runtime", text: Sequence[int]) -> None:
        self._runtime = runtime
        self.text = text
        self._held: dict[int, str] = {}

    def prepare(self, case: Case) -> None:
        if not case.is_prompt and case.history not in self._held:
            self._held[case.history] = self._session_with(case.history)
            # Appended tokens wait until a generate computes them.
            _drain(iter(self._runtime.generate(self._held[case.history], 1)))
        self.measure(case)

    def measure(self, case: Case) -> float:
        return self._prompt(case) if case.is_prompt else self._decode(case)

    def release(self) -> None:
        for session_id in self._held.values():
            self._runtime.close_session(session_id)
        self._held.clear()

    def _session_with(self, tokens: int) -> str:
        session_id = self._runtime.create_session(client_label="bench", eos_token_ids=[])
        self._runtime.append(session_id, stretch(self.text, 0, tokens))
        return session_id

    def _prompt(self, case: Case) -> float:
        session_id = self._session_with(case.tokens)
        try:
            began = time.perf_counter()
            events = iter(self._runtime.generate(session_id, 1))
            _next_token(events)
            seconds = time.perf_counter() - began
            _drain(events)
            return case.tokens / seconds
        finally:
            self._runtime.close_session(session_id)

    def _decode(self, case: Case) -> float:
        copies = [self._runtime.fork(self._held[case.history])[0] for _ in range(case.sessions)]
        try:
            rounds = LEAD_IN + case.steps + LEAD_OUT
            sampling = CHOICES[case.choice or GREEDY]
            streams = [
                iter(self._runtime.generate(copy, rounds, replace(sampling, seed=seed)))
                for seed, copy in enumerate(copies)
            ]
            stamps = _round_times(streams, rounds)
            seconds = stamps[LEAD_IN + case.steps - 1] - stamps[LEAD_IN - 1]
            return case.sessions * case.steps / seconds
        finally:
            for copy in copies:
                self._runtime.close_session(copy)


def _round_times(streams: Sequence[Iterator[Event]], rounds: int) -> list[float]:
    """When each round was complete: every stream had delivered one more token.

    One reader takes from all streams in turn, so that reading costs one thread, not one a session.
    """
    stamps = []
    for _ in range(rounds):
        for events in streams:
            _next_token(events)
        stamps.append(time.perf_counter())
    for events in streams:
        _drain(events)
    return stamps


def _next_token(events: Iterator[Event]) -> None:
    next(event for event in events if isinstance(event, TokenEvent))


def _drain(events: Iterator[Event]) -> None:
    for _ in events:
        pass
