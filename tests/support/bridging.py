"""Bridges over programs that misbehave on purpose: real processes, a real directory, a real server."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from kakeya.bench.presets import Preset
from kakeya.bench.report import Report, at_most
from kakeya.bridge.archive import Archive
from kakeya.bridge.runs import Runs
from kakeya.bridge.server import BridgeServer
from kakeya.serving.config import ServerConfig
from support.serving import ANY_PORT, on_loop

KIND = "capacity"


def report(*, gate: bool = True, partial: bool = False, kind: str = KIND) -> str:
    """A report with one gate."""
    gates = (at_most("errors", 0.0 if gate else 1.0, 0, absent=""),)
    finished_at = None if partial else "2026-01-31T12:00:00+00:00"
    return Report(kind, {}, {}, {"levels": [], "note": "LONG"}, gates, finished_at=finished_at).to_json()


def writing(text: str) -> str:
    """A program that leaves this as its report, and makes it long."""
    page = "open(report.replace('.json', '.html'), 'w').write('<p>page')"
    return f"open(report, 'w').write({text!r}.replace('LONG', 'x' * 600_000))\n{page}\n"


def telling(progress: float, work: str) -> str:
    return f"print({json.dumps({'progress': progress, 'work': work})!r}, flush=True)\n"


# Says how far it is, and waits for the file `go` beside its report. At SIGTERM it writes a partial report.
POLITE = (
    "def end(*_):\n    "
    + writing(report(partial=True)).replace("\n", "\n    ")
    + "\n    os._exit(0)\nsignal.signal(signal.SIGTERM, end)\n"
    + telling(0.25, "half of a half")
    + "while not os.path.exists('go'): time.sleep(0.01)\n"
    + writing(report())
)
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + telling(0.5, "stuck") + "time.sleep(600)\n"


def presets(programs: Mapping[str, str], limit_s: float = 60.0) -> dict[str, Preset]:
    return {name: Preset(name, "that it ends", KIND, ("--levels", "1"), limit_s) for name in programs}


def commands(programs: Mapping[str, str]) -> Callable[[Preset, Path], Sequence[str]]:
    """Each preset as its program, which knows where its report goes."""
    start = "import os, signal, subprocess, sys, time; report = sys.argv[1]\n"

    def command(preset: Preset, path: Path) -> Sequence[str]:
        return (sys.executable, "-ISc", start + programs[preset.name], str(path))

    return command


@contextmanager
def running(
    directory: Path,
    programs: Mapping[str, str],
    *,
    limit_s: float = 60.0,
    grace_s: float = 20.0,
    keep: int = 9,
) -> Iterator[Runs]:
    archive = Archive(directory, keep)
    runs = Runs(presets(programs, limit_s), archive, grace_s, command=commands(programs))
    try:
        yield runs
    finally:
        runs.close()


@contextmanager
def bridging(runs: Runs, config: ServerConfig = ANY_PORT) -> Iterator[str]:
    """The address of a server over these runs."""

    async def started() -> BridgeServer:
        server = BridgeServer(config)
        await server.start()
        return server

    server = on_loop(started())
    on_loop(server.open(runs))
    try:
        yield server.address
    finally:
        on_loop(server.refuse())
        on_loop(server.stop(0.2))


def until(holds: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait for something that must come true."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.005)
