"""`kakeya bench agents`: many agents at once on one engine.

What they share of a common prefix, whose prompt goes first, and how smooth streams stay beside prompts.
Tokens are random, anew for each repetition, so nothing is shared but what should be.
"""

import os
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kakeya.bench.benchmark import EngineBenchmark, Quick, Repeats, Results, Run
from kakeya.bench.report import Gate, at_least, at_most, busy, bystanders_gate
from kakeya.bench.stats import Samples, percentile, ratio
from kakeya.bench.streams import all_arrivals, arrivals, session, streaming
from kakeya.bench.tables import MS, Chart, Table, figure, figures, listing
from kakeya.types import ShareBeginnings

if TYPE_CHECKING:
    from kakeya.runtime import Runtime

COMMON, OWN = 480, 28
"""Tokens of the system message that agents share, and of what each says itself."""
LATER, CHOICES, PROMPTS, STREAMS, LONG, BESIDE = 5, 4, 16, 4, 8, 6
ANSWER, CROWD_ANSWER = 32, 4
NOT_MEASURED = "not measured in this run"


@dataclass(frozen=True, kw_only=True)
class AgentsResults(Results):
    """Seconds, one sample for each repetition."""

    crowd: int = 0
    first: Samples = field(default_factory=Samples)
    """To the first token of an agent whose prefix nobody has computed."""
    later: Samples = field(default_factory=Samples)
    """The same for agents after it: the median of each repetition."""
    alone: Samples = field(default_factory=Samples)
    """An agent's whole turn where nothing is shared."""
    crowded: Samples = field(default_factory=Samples)
    """All agents of the crowd, created and answered."""
    one_choice: Samples = field(default_factory=Samples)
    four_choices: Samples = field(default_factory=Samples)
    one_prompt: Samples = field(default_factory=Samples)
    """To the first token of one prompt alone."""
    median_prompt: Samples = field(default_factory=Samples)
    last_prompt: Samples = field(default_factory=Samples)
    """Of many prompts at once."""
    short_prompt: Samples = field(default_factory=Samples)
    """To the first token of a short prompt behind long ones."""
    gap: Samples = field(default_factory=Samples)
    """Between tokens of streams beside prompts: the 95th percentile of each repetition."""
    paced: Samples = field(default_factory=Samples)
    """Until all prompts beside streams are computed."""
    unpaced: Samples = field(default_factory=Samples)
    """The same without a limit for the time of a step."""


@dataclass(frozen=True)
class Agents(EngineBenchmark[AgentsResults]):
    """The engine, and how many agents come at once."""

    kind = "agents"
    title = "Agents benchmark"
    help = "Many agents at once on one engine: what they share, who goes first, how smooth streams stay."
    results = AgentsResults

    crowd: Annotated[int, typer.Option(help="Agents that come at once with one system message.")] = 256
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each of many prompts at once.")] = 1000
    repeats: Repeats = 3
    quick: Quick = False

    def __post_init__(self) -> None:
        self.require_least(crowd=1, prompt_tokens=100, repeats=1)

    def presets(self) -> dict[str, Any]:
        return {"crowd": 8, "prompt_tokens": 100, "repeats": 1} if self.quick else {}

    def run(self, run: Run[AgentsResults]) -> AgentsResults:
        from kakeya.runtime import Runtime  # torch takes a second to import

        config = self.engine_config(capacity=max(self.crowd, PROMPTS, STREAMS + BESIDE))
        few = replace(config, capacity=STREAMS + BESIDE)
        with ExitStack() as stack:

            def opened(config: Any) -> Runtime:
                return stack.enter_context(Runtime.open(self.model, config))

            scene = _Scene(
                self,
                opened(config),
                opened(replace(few, share_beginnings=ShareBeginnings.OFF)),
                opened(replace(few, max_stall_ms=0)),
            )
            work, results = run.work(self.repeats), AgentsResults(crowd=self.crowd)
            stack.enter_context(run.watching([os.getpid()]))
            for number in range(self.repeats):
                work.piece(f"repetition {number + 1}")
                results = _joined(results, scene.measure())
                run.checkpoint(results)
        return results

    def gates(self, results: AgentsResults) -> list[Gate]:
        noise = busy(results.bystanders_share, "latencies")
        r, absent = results, noise or NOT_MEASURED

        def over(above: Samples, below: Samples, times: float = 1) -> float | None:
            found = ratio(above.median, below.median)
            return None if noise or found is None else found / times

        short, gap = (None if noise else each.median for each in (r.short_prompt, r.gap))
        return [
            at_most("later agents' first token over the first's", over(r.later, r.first), 0.2, absent=absent),
            at_most(
                f"{r.crowd} agents over as many alone",
                over(r.crowded, r.alone, r.crowd or 1),
                0.35,
                absent=absent,
            ),
            at_most("four choices over one", over(r.four_choices, r.one_choice), 1.5, absent=absent),
            at_most(
                f"{PROMPTS} prompts at once: median first token over the last",
                over(r.median_prompt, r.last_prompt),
                0.6,
                absent=absent,
            ),
            at_most(
                f"the last over {PROMPTS} prompts one by one",
                over(r.last_prompt, r.one_prompt, PROMPTS),
                1.1,
                absent=absent,
            ),
            at_most(f"first token of 50 tokens behind {LONG} long prompts, s", short, 0.4, absent=absent),
            at_most("gap of streams beside prompts (p95), s", gap, 0.05, absent=absent),
            at_least("speed of these prompts over unlimited", over(r.unpaced, r.paced), 0.9, absent=absent),
            bystanders_gate(results.bystanders_share),
        ]

    @staticmethod
    def show(results: AgentsResults) -> list[Table | Chart]:
        r = results
        rows = [
            ("first token: first agent / later ones, ms", _of(MS, r.first, r.later)),
            (f"{r.crowd} agents, created and answered, s", _of(1, r.crowded, form=".1f")),
            ("one agent where nothing is shared, ms", _of(MS, r.alone)),
            ("one choice / four choices, ms", _of(MS, r.one_choice, r.four_choices)),
            (
                f"one prompt / {PROMPTS} at once, median / last, ms",
                _of(MS, r.one_prompt, r.median_prompt, r.last_prompt),
            ),
            (f"50 tokens behind {LONG} long prompts, ms", _of(MS, r.short_prompt)),
            ("gap of streams beside prompts, p95, ms", _of(MS, r.gap, form=".1f")),
            ("these prompts, with the limit / without, s", _of(1, r.paced, r.unpaced, form=".2f")),
            ("share of the machine that others used", figure(r.bystanders_share, form=".1%")),
        ]
        return [listing("Agents", ("what", "median"), rows, labels=1)]


def _of(scale: float, *samples: Samples, form: str = ",.0f") -> str:
    return figures(*(each.median for each in samples), scale=scale, form=form)


def _joined(results: AgentsResults, seconds: dict[str, float]) -> AgentsResults:
    more: dict[str, Any] = {
        name: Samples((*getattr(results, name).samples, value)) for name, value in seconds.items()
    }
    return replace(results, **more)


class _Scene:
    """Three engines over one model: as served, without sharing, and without a limit for steps."""

    def __init__(self, bench: Agents, served: "Runtime", unshared: "Runtime", unpaced: "Runtime") -> None:
        self._bench, self._served, self._unshared, self._unpaced = bench, served, unshared, unpaced
        self._chance = random.Random(0)
        for runtime in (served, unshared, unpaced):
            _first_tokens(runtime, [self._text(COMMON)] * 2)  # threads, pages and costs of rows

    def measure(self) -> dict[str, float]:
        """One repetition: seconds by the name of the result."""
        long = 4 * self._bench.prompt_tokens
        return {
            **self._later_agents(),
            **self._a_crowd(),
            **self._choices(),
            **self._many_prompts(),
            "short_prompt": _behind(self._served, self._texts(LONG, long), self._text(50)),
            **self._streams(),
        }

    def _text(self, length: int) -> list[int]:
        size = self._served.model_config.vocab_size
        return [self._chance.randrange(size) for _ in range(length)]

    def _texts(self, count: int, length: int) -> list[list[int]]:
        return [self._text(length) for _ in range(count)]

    def _agents(self, count: int) -> list[list[int]]:
        common = self._text(COMMON)
        return [[*common, *self._text(OWN)] for _ in range(count)]

    def _later_agents(self) -> dict[str, float]:
        taken = [_first_tokens(self._served, [agent])[0] for agent in self._agents(1 + LATER)]
        return {"first": taken[0], "later": statistics.median(taken[1:])}

    def _a_crowd(self) -> dict[str, float]:
        alone = [_turns(self._unshared, [agent], CROWD_ANSWER) for agent in self._agents(3)]
        crowded = _turns(self._served, self._agents(self._bench.crowd), CROWD_ANSWER)
        return {"alone": statistics.median(alone), "crowded": crowded}

    def _choices(self) -> dict[str, float]:
        one = _turns(self._served, [self._text(500)], ANSWER)
        return {"one_choice": one, "four_choices": _forked(self._served, self._text(500))}

    def _many_prompts(self) -> dict[str, float]:
        length = self._bench.prompt_tokens
        (one,) = _first_tokens(self._served, [self._text(length)])
        taken = sorted(_first_tokens(self._served, self._texts(PROMPTS, length)))
        return {"one_prompt": one, "median_prompt": statistics.median(taken), "last_prompt": taken[-1]}

    def _streams(self) -> dict[str, float]:
        prompts = self._texts(BESIDE, 2 * self._bench.prompt_tokens)
        unpaced, _ = _beside_streams(self._unpaced, prompts)
        paced, gaps = _beside_streams(self._served, prompts)
        return {"unpaced": unpaced, "paced": paced, "gap": percentile(gaps, 95) or 0.0}


def _first_tokens(runtime: "Runtime", prompts: Sequence[Sequence[int]]) -> list[float]:
    """Seconds to each prompt's first token, when all come at once."""
    with ExitStack() as stack:
        sessions = [stack.enter_context(session(runtime, prompt)) for prompt in prompts]
        began = time.perf_counter()
        came = all_arrivals([runtime.generate(session_id, 1) for session_id in sessions])
    return [first - began for (first,) in came]


def _turns(runtime: "Runtime", prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Seconds in which sessions are created, told and answered, all at once."""
    began = time.perf_counter()
    with ExitStack() as stack:
        sessions = [stack.enter_context(session(runtime, prompt)) for prompt in prompts]
        came = all_arrivals([runtime.generate(session_id, tokens) for session_id in sessions])
    return max(times[-1] for times in came) - began


def _forked(runtime: "Runtime", prompt: Sequence[int]) -> float:
    """Seconds in which a prompt is answered several times, by forks of one session."""
    began = time.perf_counter()
    with ExitStack() as stack:
        sessions = [stack.enter_context(session(runtime, prompt))]
        for _ in range(CHOICES - 1):
            fork, _ = runtime.fork(sessions[0])
            stack.callback(runtime.close_session, fork)
            sessions.append(fork)
        came = all_arrivals([runtime.generate(session_id, ANSWER) for session_id in sessions])
    return max(times[-1] for times in came) - began


def _behind(runtime: "Runtime", long: Sequence[Sequence[int]], short: Sequence[int]) -> float:
    """Seconds to the first token of a short prompt that comes while long ones are computed."""
    with ExitStack() as stack:
        waiting = [runtime.generate(stack.enter_context(session(runtime, prompt)), 1) for prompt in long]
        session_id = stack.enter_context(session(runtime, short))
        time.sleep(0.2)  # the long ones are on their way
        began = time.perf_counter()
        (first,) = arrivals(runtime.generate(session_id, 1))
        for stream in waiting:
            stream.cancel()
            list(stream)
    return first - began


def _beside_streams(runtime: "Runtime", prompts: Sequence[Sequence[int]]) -> tuple[float, list[float]]:
    """Seconds until prompts are computed beside streams, and the gaps between the streams' tokens."""
    with streaming(runtime, [[2, 3, 4 + number] for number in range(STREAMS)]) as gaps:
        began = time.perf_counter()
        taken = max(_first_tokens(runtime, prompts))
    return taken, gaps(began, began + taken)
