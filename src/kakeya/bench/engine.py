"""`kakeya bench engine`: speed, memory and start of the runtime, alone or beside llama.cpp."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer

from kakeya.bench.benchmark import EngineBenchmark, Quick, Repeats, Results, Run
from kakeya.bench.cases import CHOICES, GREEDY, Case, Plan, Side, Speeds
from kakeya.bench.machine import public_name, public_proposers
from kakeya.bench.peers.llama import LlamaProcess, Peer, require_llama
from kakeya.bench.report import Gate, at_least, at_most, busy, bystanders_gate
from kakeya.bench.runtime_side import OURS, RuntimeSide
from kakeya.bench.startup import chat, launch
from kakeya.bench.stats import Samples, median_of_ratios, ratio
from kakeya.bench.tables import MIB, Chart, Column, Series, Table, over
from kakeya.bench.text import prose
from kakeya.bench.usage import resident_bytes
from kakeya.config import DEFAULT_MODEL
from kakeya.types import ShareBeginnings

PEER = LlamaProcess.name
SPEED = "tokens/s"
# How many times the peer's speed. The default model is small, 4 bits throughout; other files are larger and
# mix their formats.
DEFAULT_MODEL_TARGETS = {
    Case(128): 3.0,
    Case(512): 3.0,
    Case(history=64): 1.25,
    Case(history=4096): 2.0,
    Case(history=16384): 3.0,
    Case(sessions=16, history=64): 2.5,
    Case(sessions=16, history=1024): 2.5,
}
FILE_TARGETS = {
    Case(512): 2.0,
    Case(history=64): 1.2,
    Case(history=4096): 1.5,
    Case(history=16384): 3.0,
    Case(sessions=16, history=64): 2.5,
    Case(sessions=16, history=1024): 2.5,
}
# What sampling keeps of greedy decoding's speed.
SAMPLED_TARGETS = {
    Case(0, sessions, 64, choice=choice): 0.97
    for sessions in (1, 16, 32)
    for choice in CHOICES
    if choice != GREEDY
}
FLAT_HISTORIES = (2048, 16384)
FLAT_LIMIT = 0.97
MEMORY_LIMIT = 1.01
# What a process may have in memory once the model is loaded, beside what it had before, of the model's file.
FILE_LIMIT = 1.1
# In smaller files a tokenizer and scratch memory weigh more than a tenth.
LEAST_JUDGED_FILE_BYTES = 10**9
START_LIMIT_SECONDS = 3.0
# A file of so many bytes is to be loaded in that time, a larger one in proportion.
START_FILE_BYTES = 1.1e9
FIRST_TOKEN_LIMIT_SECONDS = 1.0
CHAT_LIMIT_SECONDS = 5.0
# What we may use of one core while the peer is timed.
QUIET_LIMIT = 0.05

NOT_MEASURED = "not measured in this run"
NO_CHATS = f"{NOT_MEASURED}: without a chat template there are no chats"
NO_PEER = "no peer in this run: use --peers"


@dataclass(frozen=True, kw_only=True)
class Speed(Case):
    """A case with the samples of both sides; `of_greedy` is what sampling keeps of the greedy speed."""

    tokens_per_second: Samples
    peer_tokens_per_second: Samples | None = None
    of_greedy: float | None = None

    @property
    def ratio(self) -> float | None:
        theirs = self.peer_tokens_per_second
        return ratio(self.tokens_per_second.median, theirs.median if theirs else None)


@dataclass(frozen=True)
class Memory:
    """Resident bytes of this process at four moments, what the KV pool takes of them, and the file's size."""

    before_open_bytes: int | None
    after_open_bytes: int | None
    after_warm_up_bytes: int | None
    pool_bytes: int
    at_end_bytes: int | None = None
    file_bytes: int | None = None

    @property
    def of_file(self) -> float | None:
        """What the loaded model takes, as a part of its file: all but the pool and what was there before."""
        if self.before_open_bytes is None or self.after_open_bytes is None:
            return None
        return ratio(self.after_open_bytes - self.before_open_bytes - self.pool_bytes, self.file_bytes)

    @property
    def growth(self) -> float | None:
        return ratio(self.at_end_bytes, self.after_warm_up_bytes)


@dataclass(frozen=True)
class Startup:
    """Fresh processes, timed from launch to a loaded model, and from there to the first token; and from the
    command `kakeya chat` to the first character of its answer."""

    ready_seconds: Samples
    first_token_seconds: Samples
    chat_seconds: Samples = field(default_factory=Samples)


_MEMORY_COLUMNS = [
    Column(name.replace("_", " "), f"{name}_bytes", MIB, ",.1f")
    for name in ("before_open", "after_open", "after_warm_up", "at_end", "pool", "file")
]
_START_COLUMNS = [
    Column("launch to loaded model", "ready_seconds.median", form=".2f"),
    Column("from there to first token", "first_token_seconds.median", form=".2f"),
    Column("kakeya chat to its first character", "chat_seconds.median", form=".2f"),
]


@dataclass(frozen=True)
class EngineResults(Results):
    """Speeds of prompts, of greedy and of sampled decoding; the peer, if there was one; memory and start."""

    prompt: list[Speed]
    decode: list[Speed]
    memory: Memory
    startup: Startup
    sampled: list[Speed] = field(default_factory=list)
    peer: Peer | None = None


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
        self.require_least(repeats=1, longest_history=64, most_sessions=1)

    def check(self, *, picture: bool) -> None:
        super().check(picture=picture)
        if self.peers:
            require_llama()

    def plan(self) -> Plan:
        plan = Plan.quick() if self.quick else Plan.full()
        return plan.limited(self.longest_history, self.most_sessions)

    def run(self, run: Run[EngineResults]) -> EngineResults:
        """Start, load, warm up, then measure group after group, with a partial report after each."""
        from kakeya.runtime import Runtime

        plan = self.plan()
        work = run.work(3 + plan.pieces_of_work(2 if self.peers else 1, self.repeats))
        work.piece(f"starting {self.model} in fresh processes")
        startup = self._startup(min(3, self.repeats))
        work.piece(f"loading {self.model}")
        # Sessions have the same text, and each is to compute it.
        shared = self.engine_config(capacity=plan.sessions_at_once())
        config, before = replace(shared, share_beginnings=ShareBeginnings.OFF), resident_bytes()
        with Runtime.open(self.model, config) as runtime, ExitStack() as stack:
            opened, facts = resident_bytes(), runtime.describe()
            named = {"model": public_name(facts.model), "path": Path(facts.path)}
            drafts = {"proposer": public_proposers(config.proposer)}
            run.facts["engine"] = asdict(runtime.config.resolved()) | drafts
            run.facts["runtime"] = asdict(facts) | named | {"proposer": public_proposers(facts.proposer)}
            ours = RuntimeSide(runtime, runtime.tokenizer.encode(prose()))
            work.piece("warming up")
            for case in plan.largest_of_each_kind():  # so that scratch memory is there
                ours.prepare(case)
                ours.release()  # the next one's history is another session, and there is room for one batch
            file_bytes = weights_on_disk(Path(facts.path))
            memory = Memory(before, opened, resident_bytes(), facts.pool_bytes, file_bytes=file_bytes)
            results = EngineResults([], [], memory, startup)
            peer: LlamaProcess | None = None
            if self.peers:
                require_llama(facts.path)
                peer = stack.enter_context(LlamaProcess(facts.path, facts.threads, ours.text))
            stack.enter_context(run.watching([os.getpid(), *([peer.pid] if peer else ())]))
            sides: list[Side] = [ours, peer] if peer else [ours]
            for speeds in plan.measure(sides, self.repeats, work.piece):
                ended = replace(memory, at_end_bytes=resident_bytes())
                results = concluded(speeds, ended, startup, peer.peer if peer else None)
                run.checkpoint(results)
        return results

    def _startup(self, count: int) -> Startup:
        """So many fresh processes of each kind, in turns. A model without a chat template has no chats."""
        launches, chats = [], []
        for _ in range(count):
            launches.append(launch(self.model, self.engine_config(capacity=1)))
            if launches[-1].chats:
                chats.append(chat(self))
        return Startup(
            Samples.of([each.ready_seconds for each in launches]),
            Samples.of([each.first_token_seconds for each in launches]),
            Samples.of(chats),
        )

    def gates(self, results: EngineResults) -> list[Gate]:
        """The targets. Ratios are judged only where a peer was measured beside us on a quiet machine."""
        peer, noise = results.peer, busy(results.bystanders_share)
        unjudged = noise or NOT_MEASURED
        targets = DEFAULT_MODEL_TARGETS if self.model == DEFAULT_MODEL else FILE_TARGETS
        ratios = {row.label(): row.ratio for row in (*results.prompt, *results.decode) if not noise}
        kept = {row.label(): row.of_greedy for row in results.sampled if not noise}
        our_share = peer.our_cpu_share if peer else None
        return [
            *_speed_gates(targets, f"ratio to {PEER}", ratios, unjudged if peer else NO_PEER),
            _flat_gate(results.decode),
            *_speed_gates(SAMPLED_TARGETS, "part of greedy's speed", kept, unjudged),
            *_behaviour_gates(results),
            at_most("our share of one core while the peer is timed", our_share, QUIET_LIMIT, absent=NO_PEER),
            bystanders_gate(results.bystanders_share),
        ]

    @staticmethod
    def show(results: EngineResults) -> list[Table | Chart]:
        work = [Column("work", lambda row: row.label()), Column(OURS, "tokens_per_second.median")]
        peer = [
            Column(PEER, "peer_tokens_per_second.median"),
            Column("ratio", "ratio", form=".2f", unit="x"),
        ]
        kept = Column("of greedy", "of_greedy", form=".3f")
        title = f"Sampled decoding, {SPEED} (median); ours alone, the peer chooses no tokens"
        speeds, sampled = [*results.prompt, *results.decode], results.sampled
        return [
            Table(f"Speed, {SPEED} (median)", work + peer if results.peer else work, speeds),
            *_speed_charts(results),
            *([Table(title, [*work, kept], sampled), _sampled_chart(sampled)] if sampled else ()),
            Table("Resident memory, MiB", _MEMORY_COLUMNS, [results.memory], labels=0),
            Table("Start of a fresh process, seconds (median)", _START_COLUMNS, [results.startup], labels=0),
        ]


def concluded(speeds: Speeds, memory: Memory, startup: Startup, peer: Peer | None) -> EngineResults:
    """What has been measured so far."""
    rows = [_row(case, speeds) for side, case in speeds if side == OURS]
    greedy = [row for row in rows if not row.choice]
    decodes = [row for row in greedy if not row.tokens]
    decodes.sort(key=lambda row: (row.history if row.sessions > 1 else 0, row.sessions, row.history))
    prompts, sampled = [row for row in greedy if row.tokens], [row for row in rows if row.choice]
    return EngineResults(prompts, decodes, memory, startup, sampled, peer)


def _row(case: Case, speeds: Speeds) -> Speed:
    ours, theirs = speeds[OURS, case], speeds.get((PEER, case))
    greedy = speeds[OURS, replace(case, choice=GREEDY)] if case.choice else []
    return Speed(
        **vars(case),
        tokens_per_second=Samples.of(ours),
        peer_tokens_per_second=None if theirs is None else Samples.of(theirs),
        of_greedy=median_of_ratios(ours, greedy) if case.choice else None,
    )


def _speed_gates(
    targets: dict[Case, float], what: str, found: dict[str, float | None], absent: str
) -> list[Gate]:
    return [
        at_least(f"{case.label()}, {what}", found.get(case.label()), limit, absent=absent)
        for case, limit in targets.items()
    ]


def _flat_gate(decode: Sequence[Speed]) -> Gate:
    speeds = {row.label(): row.tokens_per_second.median for row in decode}
    near, far = (speeds.get(Case(history=history).label()) for history in FLAT_HISTORIES)
    name = "decode speed at history {1:,} over {0:,}".format(*FLAT_HISTORIES)
    return at_least(name, ratio(far, near), FLAT_LIMIT, absent="both histories must be measured")


def _behaviour_gates(results: EngineResults) -> list[Gate]:
    """Memory does not grow, is little more than the file, and with one session each not more than the peer's;
    the start is quick."""
    memory, startup, peer = results.memory, results.startup, results.peer
    # More sessions take more of ours, which is there from the start.
    alone = all(row.sessions == 1 for row in results.decode)
    beside = ratio(memory.at_end_bytes, peer.resident_bytes) if peer and alone else None
    no_beside = "judged with one session each: use --most-sessions 1" if peer else NO_PEER
    ready, first = startup.ready_seconds.median, startup.first_token_seconds.median
    launched, answered = "seconds from launch to a loaded model", "seconds from there to the first token"
    start_limit = START_LIMIT_SECONDS * max(1.0, (memory.file_bytes or 0) / START_FILE_BYTES)
    chatted = "seconds from `kakeya chat` to the first character of its answer"
    return [
        at_most("resident memory, end over warm-up", memory.growth, MEMORY_LIMIT, absent=NOT_MEASURED),
        _file_gate(memory),
        at_most(f"resident memory over {PEER}'s", beside, 1.0, absent=no_beside),
        at_most(launched, ready, start_limit, absent=NOT_MEASURED),
        at_most(answered, first, FIRST_TOKEN_LIMIT_SECONDS, absent=NOT_MEASURED),
        at_most(chatted, startup.chat_seconds.median, CHAT_LIMIT_SECONDS, absent=NO_CHATS),
    ]


def _file_gate(memory: Memory) -> Gate:
    name, size = "memory of the loaded model over its file", memory.file_bytes
    if size is not None and size < LEAST_JUDGED_FILE_BYTES:
        small = f"judged from {LEAST_JUDGED_FILE_BYTES / 1e9:g} GB on: a tokenizer takes as much in any model"
        return at_most(name, None, FILE_LIMIT, absent=small)
    return at_most(name, memory.of_file, FILE_LIMIT, absent=NOT_MEASURED)


def weights_on_disk(path: Path) -> int:
    """The size of a model's weights: of its file, of all parts of a split one, or of a directory's."""
    split = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", path.name)
    if path.is_dir():
        parts = list(path.glob("*.safetensors"))
    elif split:
        count = split[2]
        parts = [path.with_name(f"{split[1]}-{n:05}-of-{count}.gguf") for n in range(1, int(count) + 1)]
    else:
        parts = [path]
    return sum(part.stat().st_size for part in parts)


def _speed_charts(results: EngineResults) -> Iterator[Chart]:
    alone = [row for row in results.decode if row.sessions == 1]
    yield _chart("Prompt", "prompt tokens", results.prompt, "tokens", bars=True)
    yield _chart("One session", "tokens of history", alone, "history", picture=True)
    for history in sorted({row.history for row in results.decode if row.sessions > 1}):
        rows = [row for row in results.decode if row.history == history]
        yield _chart("Sessions together", f"sessions at history {history:,}", rows, "sessions", bars=True)


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
