"""`kakeya bench engine`: speed, memory and start of the runtime, alone or beside a peer."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from kakeya.bench.engine_results import (
    DEFAULT_MODEL_TARGETS,
    FILE_TARGETS,
    Memory,
    engine_gates,
    memory_results,
    sampled_results,
    speed_results,
    startup_results,
)
from kakeya.bench.machine import Bystanders, machine_facts, public_name, resident_bytes
from kakeya.bench.ours import RuntimeSide
from kakeya.bench.peers import PeerProcess, require_peer
from kakeya.bench.plan import Plan, Side, Speeds, announcements, run_group
from kakeya.bench.prose import prose
from kakeya.bench.report import Report, now
from kakeya.bench.startup import measure_startup
from kakeya.config import DEFAULT_MODEL, EngineConfig
from kakeya.runtime import Runtime


@dataclass(frozen=True)
class EngineBench:
    """What to measure and on what. `config.capacity` is raised to what the plan needs."""

    model: str
    config: EngineConfig
    plan: Plan
    peers: bool = False

    @property
    def pieces_of_work(self) -> int:
        """How many times `run` will call `announce`."""
        return 3 + announcements(self.plan, sides=2 if self.peers else 1)


def run(
    bench: EngineBench, announce: Callable[[str], None], checkpoint: Callable[[Report], object]
) -> Report:
    """Measure everything and return the finished report.

    `announce` is called with each piece of work as it begins, `checkpoint` with a partial report after
    each group of cases. Raises ConfigError when a peer is asked for and absent, PeerFailed when it breaks.
    """
    if bench.peers:
        require_peer()
    announce(f"starting {bench.model} in fresh processes")
    startup = measure_startup(
        bench.model, replace(bench.config, capacity=1), repeats=min(3, bench.plan.repeats)
    )
    announce(f"loading {bench.model}")
    before = resident_bytes()
    with Runtime.open(bench.model, _roomy(bench)) as runtime:
        opened = resident_bytes()
        ours = RuntimeSide(runtime, runtime.tokenizer.encode(prose()))
        report = Report("engine", _settings(bench, runtime), machine_facts())
        announce("warming up")
        _warm_up(ours, bench.plan)
        memory = Memory(before, opened, resident_bytes(), runtime.describe().pool_bytes)
        with _sides(bench, runtime, ours) as sides:
            bystanders = Bystanders([os.getpid(), *(peer.pid for peer in _peers(sides))])
            for speeds in _measured(sides, bench.plan, announce):
                results = {
                    **speed_results(bench.plan.cases, speeds),
                    "sampled": sampled_results(bench.plan.sampled, speeds),
                    "peer": _peer_results(sides),
                    "memory": memory_results(memory, at_end=resident_bytes()),
                    "startup": startup_results(startup),
                    "bystanders_share": bystanders.share(),
                }
                report = replace(report, results=results)
                checkpoint(report)
    targets = DEFAULT_MODEL_TARGETS if bench.model == DEFAULT_MODEL else FILE_TARGETS
    return replace(report, gates=engine_gates(report.results, targets), finished_at=now())


def _roomy(bench: EngineBench) -> EngineConfig:
    return replace(bench.config, capacity=max(bench.config.capacity, bench.plan.most_sessions))


def _warm_up(ours: RuntimeSide, plan: Plan) -> None:
    """One untimed pass through the largest work of each kind, so that scratch memory is there."""
    for case in plan.largest_of_each_kind:
        ours.prepare(case)
        ours.release()  # the next one's history is another session, and there is room for one batch only


@contextmanager
def _sides(bench: EngineBench, runtime: Runtime, ours: RuntimeSide) -> Iterator[Sequence[Side]]:
    if not bench.peers:
        yield (ours,)
        return
    facts = runtime.describe()
    require_peer(facts.path)
    with PeerProcess(facts.path, facts.threads, ours.text) as peer:
        yield (ours, peer)


def _measured(sides: Sequence[Side], plan: Plan, announce: Callable[[str], None]) -> Iterator[Speeds]:
    """All speeds so far, after each group of cases. The first side is ours."""
    speeds: Speeds = {}
    for group in plan.groups:
        speeds |= run_group(sides, group, plan.repeats, announce)
        yield speeds
    speeds |= run_group(sides[:1], plan.sampled, plan.repeats, announce)
    yield speeds


def _settings(bench: EngineBench, runtime: Runtime) -> dict[str, Any]:
    return {
        "model": public_name(bench.model),
        "repeats": bench.plan.repeats,
        "peers": bench.peers,
        "engine": asdict(_roomy(bench)),
        "runtime": _runtime_facts(runtime),
    }


def _runtime_facts(runtime: Runtime) -> dict[str, Any]:
    facts = asdict(runtime.describe())
    return {**facts, "model": public_name(facts["model"]), "path": public_name(facts["path"])}


def _peer_results(sides: Sequence[Side]) -> dict[str, Any] | None:
    for peer in _peers(sides):
        chosen = dict(peer.flash_attention)
        return {
            **peer.facts,
            "flash_attention": chosen,
            "our_cpu_share": peer.our_cpu_share,
            "resident_bytes": peer.resident_bytes,
        }
    return None


def _peers(sides: Sequence[Side]) -> list[PeerProcess]:
    return [side for side in sides if isinstance(side, PeerProcess)]
