"""`kakeya bench capacity`: ever more agents at once, each with its own channel and session, all checked."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

import typer

from kakeya.bench.benchmark import EngineBenchmark, Run, numbers
from kakeya.bench.processes import server_process
from kakeya.bench.ramp import CapacityResults, Level, Ramp, Summary
from kakeya.bench.report import Gate, at_least, at_most
from kakeya.bench.stats import ratio
from kakeya.bench.tables import MIB, MS, Chart, Column, Table, figure, figures, listing, over
from kakeya.bench.text import prose
from kakeya.bench.usage import raise_descriptor_limit
from kakeya.config import EngineConfig
from kakeya.errors import ConfigError
from kakeya.options import NumericMode, flags
from kakeya.types import Numerics

# Solo outputs that are all alike could not tell one agent's output from another's.
DISTINCT_NEEDED = 0.5

_ramp = partial(typer.Option, rich_help_panel="The ramp")


class Preset(StrEnum):
    """How far to go: 256 agents with windows as they are, or 2,048 with small ones."""

    LIGHT = "light"
    STRESS = "stress"


# What a preset says where the command line says nothing.
PRESETS: dict[Preset, dict[str, Any]] = {
    Preset.LIGHT: {"levels": "1,16,64,256"},
    Preset.STRESS: {"levels": "256,512,1024,2048", "window": 64, "prompt_len": 8, "gen_tokens": 8},
}


@dataclass(frozen=True)
class Capacity(EngineBenchmark[CapacityResults]):
    """The levels of the ramp and what each agent does. Without `context_len` its window is filled."""

    kind = "capacity"
    title = "Capacity benchmark"
    help = "How many agents at once, every output checked against its solo run."
    results = CapacityResults

    numerics: NumericMode = Numerics.EXACT
    preset: Annotated[Preset, _ramp(help="light: to 256 agents; stress: to 2,048, small windows.")] = (
        Preset.LIGHT
    )
    levels: Annotated[str, _ramp(help="Numbers of agents, rising, with commas.")] = PRESETS[Preset.LIGHT][
        "levels"
    ]
    context_len: Annotated[
        int | None, _ramp(help="Tokens each holds first; what fills the window when left out.")
    ] = None
    prompt_len: Annotated[int, _ramp(help="Tokens each then says.")] = 16
    gen_tokens: Annotated[int, _ramp(help="Tokens each is answered.")] = 16
    capacity: Annotated[
        int | None, _ramp(help="The server's; as many as the highest level when left out.")
    ] = None
    seed: Annotated[int, _ramp(help="Which texts and answers.")] = 0
    rss_limit: Annotated[
        float, typer.Option(help="Gate: the server's peak memory over when it was ready.")
    ] = 1.10

    def __post_init__(self) -> None:
        levels = self.ramp()
        if not levels or min(levels) < 1 or list(levels) != sorted(set(levels)):
            raise ConfigError(f"levels must be rising numbers from 1 on, got {list(levels)}")
        self.require_least(context_len=0, prompt_len=1, gen_tokens=1)

    def presets(self) -> dict[str, Any]:
        return PRESETS[self.preset]

    def check(self, *, picture: bool) -> None:
        self.engine_config(capacity=self.sessions())

    def ramp(self) -> tuple[int, ...]:
        return numbers("levels", self.levels)

    def sessions(self) -> int:
        """The server's capacity."""
        return max(self.ramp()) if self.capacity is None else self.capacity

    def context_tokens(self) -> int:
        return self.sink + self.window if self.context_len is None else self.context_len

    def server_flags(self) -> list[str]:
        """Room for every agent's calls; the engine takes so many generates at once, others queue for them."""
        top = max(self.ramp())
        return flags(
            {
                "max-concurrent-rpcs": 4 * top + 64,
                "max-concurrent": min(top, EngineConfig.max_waiting),
                "admission": "queue",
                "queue-depth": 2 * top,
                "queue-max-wait-s": 0,
            }
        )

    def run(self, run: Run[CapacityResults]) -> CapacityResults:
        """Climb the levels until one is not clean, or until a signal. Raises the limit of open files."""
        return run.asynchronously(self._run(run))

    async def _run(self, run: Run[CapacityResults]) -> CapacityResults:
        descriptors = raise_descriptor_limit(8 * max(self.ramp()) + 512)
        async with server_process(self, self.sessions(), self.server_flags()) as server:
            run.facts |= {
                "sampling": "temperature 1, a seed for each agent",
                "open_files": descriptors,
                "server": server.facts,
                "server_flags": " ".join(self.server_flags()),
            }
            ramp = Ramp(self, run, server, (await server.client.tokenizer).encode(prose()))
            with run.watching([os.getpid(), server.pid]):
                await ramp.climb()
            return ramp.results()

    def gates(self, results: CapacityResults) -> list[Gate]:
        """All levels clean, every output right, and memory as announced."""
        total, nobody = results.summary, "no agent got an output"
        kept = ratio(total.per_session_kv_bytes, total.announced_kv_bytes_per_session)
        errors = float(total.errors) if total.levels_run else None
        clean, peak = float(total.max_concurrent_agents_clean), total.peak_over_ready
        unseen = "the server's memory was not seen"
        return [
            at_least("agents at once, all clean", clean, max(self.ramp()), absent=nobody),
            at_most("errors", errors, 0, absent="no level was run"),
            _wrong_gate(total),
            at_most("KV bytes of a session over the announced ones", kept, 1.0, absent=nobody),
            at_most("server memory, peak over when it was ready", peak, self.rss_limit, absent=unseen),
        ]

    @staticmethod
    def show(results: CapacityResults) -> list[Table | Chart]:
        named = ("class", "phase", "message")
        errors = [
            (row.level, *(error[of] for of in named)) for row in results.levels for error in row.first_errors
        ]
        examples = listing("An example of each error", ("agents", "class", "part", "message"), errors)
        return [
            Table("Agents at once", LEVEL_COLUMNS, results.levels),
            *_charts(results.levels),
            listing("Summary", ("what", "value"), _summary_rows(results), labels=1),
            *([examples] if errors else ()),
        ]


def _wrong_gate(total: Summary) -> Gate:
    """Judged only when outputs differ enough from agent to agent for a mix-up to be seen."""
    wrong, distinct, solo = float(total.wrong_outputs), total.distinct_solo_outputs, total.solo_outputs
    absent = "" if total.outputs_checked else "no output was checked"
    if total.outputs_checked and not wrong and solo > 1 and distinct < DISTINCT_NEEDED * solo:
        absent = f"only {distinct} of {solo} solo outputs are distinct, so a mix-up could not be seen"
    return at_most("wrong outputs", None if absent else wrong, 0, absent=absent)


LEVEL_COLUMNS = [
    Column("agents", "level"),
    Column("created", "created_ok"),
    Column("answered", "generate_ok"),
    Column("wrong", "wrong_outputs"),
    Column("errors", lambda level: level.error_counts() or "0"),
    Column(
        "create p50 / p95, ms",
        lambda level: figures(level.create_p50_s, level.create_p95_s, scale=MS, form=",.1f"),
    ),
    Column(
        "turn p50 / p95, s", lambda level: figures(level.generate_p50_s, level.generate_p95_s, form=",.2f")
    ),
    Column("tokens/s", "tokens_per_s"),
    Column("KV MiB each", "per_session_kv_bytes", MIB, ",.2f"),
    Column("RSS MiB", "server_rss_bytes", MIB),
    Column("wall, s", "wall_s", form=",.1f"),
]


def _summary_rows(results: CapacityResults) -> list[tuple[str, str]]:
    """The ramp in words, and how busy others kept the machine: its speeds are judged by nobody."""
    total = results.summary
    kept = (total.per_session_kv_bytes, total.announced_kv_bytes_per_session)
    bound, share = figure(total.node_kv_upper_bound, MIB), figure(total.node_kv_share_of_memory, form=".1%")
    rss = (total.server_rss_when_ready, total.server_peak_rss)
    return [
        ("most agents at once, all clean", figure(total.max_concurrent_agents_clean)),
        ("outputs compared with solo runs", figure(total.outputs_checked)),
        ("of these wrong", figure(total.wrong_outputs)),
        ("distinct solo outputs", f"{total.distinct_solo_outputs:,} of {total.solo_outputs:,}"),
        ("KV MiB a session, seen / announced", figures(*kept, scale=MIB, form=",.2f")),
        ("KV MiB of the node at most", f"{bound} ({share} of the memory)"),
        ("server RSS MiB, ready / peak", figures(*rss, scale=MIB)),
        ("share of the machine that others used", figure(results.bystanders_share, form=".1%")),
        ("the ramp ended", total.stopped_by or "not yet"),
    ]


def _charts(levels: Sequence[Level]) -> list[Chart]:
    labels = [f"{each.level:,}" for each in levels]
    turn = {"p50": "generate_p50_s", "p95": "generate_p95_s"}
    opening = {"p50": "create_p50_s", "p95": "create_p95_s"}
    speed, memory = {"all agents together": "tokens_per_s"}, {"server resident memory": "server_rss_bytes"}
    return [
        over("Generated tokens a second", "tokens/s", "agents", labels, levels, speed, picture=True),
        over("A turn", "s", "agents", labels, levels, turn),
        over("Opening a session", "ms", "agents", labels, levels, opening, MS),
        over("Memory", "MiB", "agents", labels, levels, memory, MIB),
    ]
