"""The runs of a bridge: one at a time, each from a preset, each ended in time."""

import logging
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from kakeya.bench.presets import Preset, preset_named
from kakeya.bench.processes import KAKEYA
from kakeya.bench.report import now
from kakeya.bridge.archive import REPORT, Archive
from kakeya.bridge.output import Output
from kakeya.bridge.process import RunProcess
from kakeya.bridge.records import RunRecord, RunState
from kakeya.errors import InvalidArgument, ResourceExhausted, RunNotFound, Unavailable
from kakeya.metrics import BridgeMetrics

log = logging.getLogger(__name__)

MAX_REQUEST_ID = 128
# Of everything that a run writes on its streams. A benchmark writes some kilobytes.
LARGEST_OUTPUT = 16 * 2**20

Command = Callable[[Preset, Path], Sequence[str]]
# How a run is to end, and why, for people.
_Ending = tuple[RunState, str]


def preset_command(preset: Preset, report: Path) -> Sequence[str]:
    """The preset as a program: its own arguments last, which `benchmark_for` has read before."""
    told = ("--progress", "json", "--output", str(report))
    return (sys.executable, "-c", KAKEYA, "bench", preset.benchmark, *told, *preset.arguments)


class _Running:
    """The run that is going on: its process belongs to its thread, and others ask it to end."""

    def __init__(self, preset: Preset, process: RunProcess, grace_s: float) -> None:
        self.preset, self.process, self.output = preset, process, Output()
        self.ending: _Ending | None = None
        self._asked: _Ending | None = None
        self._grace_s, self._began = grace_s, time.monotonic()
        self._kill_at = float("inf")
        self.thread: threading.Thread | None = None

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def ask_to_end(self, state: RunState, reason: str) -> None:
        """From any thread. The first reason stays."""
        self._asked = self._asked or (state, reason)

    def kill_soon(self) -> None:
        """From any thread: it has had its time."""
        self._kill_at = 0.0

    def keep_limits(self) -> None:
        """End it if somebody asked for that, or if it has had its time or written too much."""
        if self.ending is None and (due := self._due()) is not None:
            self.ending = due
            self._kill_at = min(self._kill_at, time.monotonic() + self._grace_s)
            self.process.ask_to_end()
        if self.ending is not None and time.monotonic() >= self._kill_at:
            self.process.kill()

    def _due(self) -> _Ending | None:
        if self._asked is not None:
            return self._asked
        if self.elapsed_s > self.preset.limit_s:
            return RunState.TIMED_OUT, f"it took longer than {self.preset.limit_s:g} s, its time limit"
        if self.output.total > LARGEST_OUTPUT:
            return RunState.FAILED, f"it wrote more than {LARGEST_OUTPUT:,} bytes beside its report"
        return None


class Runs:
    """What a bridge serves. A call names its caller, and sees that caller's runs only. Safe from any thread.

    A run goes on without its caller. It ends by itself, when it is cancelled, at its time limit, or with the
    bridge; it is told to, has `grace_s` seconds for its report, and is killed then.
    """

    def __init__(
        self,
        presets: Mapping[str, Preset],
        archive: Archive,
        grace_s: float,
        metrics: BridgeMetrics | None = None,
        command: Command = preset_command,
    ) -> None:
        self.presets, self.directory = presets, archive.directory
        self.ended: Future[str | None] = Future()
        self._archive, self._grace_s, self._command = archive, grace_s, command
        self._metrics = metrics or BridgeMetrics()
        self._lock = threading.Lock()
        self._runs = archive.load()
        self._running: _Running | None = None
        self._listeners: set[Callable[[], object]] = set()
        self._draining = False

    def start(self, owner: str, name: str, request_id: str = "") -> str:
        """The id of a new run; of the first one where the owner used the request id before.

        Raises PresetNotFound, ResourceExhausted while another run is going on, InvalidArgument, Unavailable.
        """
        if len(request_id) > MAX_REQUEST_ID:
            raise InvalidArgument(f"request_id must have at most {MAX_REQUEST_ID} characters")
        preset = preset_named(self.presets, name)
        with self._lock:
            for record in self._runs.values() if request_id else ():
                if (record.owner, record.request_id) == (owner, request_id):
                    return _same_preset(record, preset).run_id
            if self._draining:
                raise Unavailable("the bridge is shutting down")
            if (busy := self._current()) is not None:
                log.warning("run refused: another is going on", extra={"preset": name, "owner": owner})
                raise ResourceExhausted(_what_runs(busy, owner))
            return self._launch(RunRecord(secrets.token_hex(8), name, now(), owner, request_id), preset)

    def record(self, owner: str, run_id: str) -> RunRecord:
        """Raises RunNotFound, also for someone else's."""
        with self._lock:
            found = self._runs.get(run_id)
            if found is None or found.owner != owner:
                raise RunNotFound(f"there is no run {run_id[:64]!a}")
            return self._up_to_now(found)

    def records(self, owner: str) -> list[RunRecord]:
        """The owner's runs, newest first."""
        with self._lock:
            return [self._up_to_now(each) for each in reversed(self._runs.values()) if each.owner == owner]

    def cancel(self, owner: str, run_id: str) -> RunRecord:
        """Have it end; one that is over stays as it is. Raises RunNotFound."""
        record = self.record(owner, run_id)
        with self._lock:
            if self._running is not None and not record.is_over:
                log.info("run cancelled", extra={"run_id": run_id, "owner": owner})
                self._running.ask_to_end(RunState.CANCELLED, "its caller cancelled it")
        return record

    def open_report(self, owner: str, run_id: str, name: str) -> int:
        """A descriptor of the report or of its page. Raises RunNotFound."""
        return self._archive.open_report(self.record(owner, run_id).run_id, name)

    @contextmanager
    def listening(self, listener: Callable[[], object]) -> Iterator[None]:
        """`listener` is called, in the run's thread, whenever something has changed."""
        with self._lock:
            self._listeners.add(listener)
        try:
            yield
        finally:
            with self._lock:
                self._listeners.discard(listener)

    # What a server's life asks of it.

    def check_alive(self) -> None:
        """It does not die before it is closed."""

    def drain(self, timeout: float | None = None) -> bool:
        """Start nothing more, and have the run end with its report; True when it did so in time."""
        with self._lock:
            self._draining, running = True, self._running
        if running is None:
            return True
        running.ask_to_end(RunState.CANCELLED, "the bridge was shut down")
        return self._wait_for(running, timeout)

    def interrupt(self) -> None:
        """Kill the run: it has had its time."""
        with self._lock:
            running = self._running
        if running is not None:
            running.kill_soon()

    def close(self) -> None:
        """End everything."""
        self.drain(0)
        self.interrupt()
        with self._lock:
            running = self._running
        if running is not None:
            self._wait_for(running, None)
        self._archive.close()
        if not self.ended.done():
            self.ended.set_result(None)

    # One run. All of these hold the lock, or are of the run's thread.

    def _launch(self, record: RunRecord, preset: Preset) -> str:
        """Raises StorageFailed or ConfigError when there is no room for its record, and OSError."""
        folder = self._archive.create(record)
        try:
            process = RunProcess(self._command(preset, folder / REPORT), folder, record.run_id)
        except BaseException:
            self._archive.remove(record.run_id)
            raise
        self._running = running = _Running(preset, process, self._grace_s)
        self._runs[record.run_id] = record
        self._archive.forget_oldest(self._runs)
        self._metrics.started()
        facts = {"run_id": record.run_id, "preset": preset.name, "owner": record.owner}
        log.info("run started", extra={**facts, "command": preset.command})
        running.thread = threading.Thread(target=self._watch, args=(record, running), name="bridge-run")
        running.thread.start()
        return record.run_id

    def _watch(self, record: RunRecord, running: _Running) -> None:
        """The thread of a run, from its start to its record."""
        ending: _Ending = RunState.FAILED, "the bridge lost it; its log says why"
        try:
            for piece in running.process.output():
                if running.output.feed(piece):
                    self._tell()
                running.keep_limits()
            ending = running.ending or self._judged(record, running)
        except Exception:
            log.exception("a run was lost", extra={"run_id": record.run_id})
        finally:
            running.process.close()
            self._end(record, running, ending)

    def _end(self, record: RunRecord, running: _Running, ending: _Ending) -> None:
        state, reason = ending
        record = self._up_to_now(record)
        record = replace(
            record,
            state=state,
            progress=1.0 if state in (RunState.PASSED, RunState.GATES_FAILED) else record.progress,
            reason=reason,
            finished_at=now(),
            output_tail=running.output.tail(),
            has_report=self._has_report(record, running.preset.benchmark),
        )
        facts = {"run_id": record.run_id, "preset": record.preset, "owner": record.owner}
        outcome = {"state": state.value, "seconds": round(record.elapsed_s, 1), "reason": reason}
        log.info("run ended", extra={**facts, **outcome})
        try:
            self._archive.save(record)
        except Exception:
            log.exception("the end of a run could not be stored", extra=facts)
        # Stored before it is told: whoever sees the end may close everything.
        with self._lock:
            self._runs[record.run_id], self._running = record, None
            self._metrics.ended(record.preset, state.value)
        self._tell()

    def _judged(self, record: RunRecord, running: _Running) -> _Ending:
        """What came of a run that ended by itself."""
        status, said = running.process.exit_status, running.output.last_words()
        try:
            report = self._archive.report(record.run_id, running.preset.benchmark)
        except RunNotFound as error:
            return RunState.FAILED, f"exit status {status}: {said}" if status else str(error)
        failed = [gate.name for gate in report.gates if gate.passed is False]
        if report.partial or status != bool(failed):
            return RunState.FAILED, f"exit status {status}: {said}"
        return (RunState.GATES_FAILED, f"failed: {', '.join(failed)}") if failed else (RunState.PASSED, "")

    def _has_report(self, record: RunRecord, kind: str) -> bool:
        try:
            self._archive.report(record.run_id, kind)
        except RunNotFound:
            return False
        return True

    def _current(self) -> RunRecord | None:
        found = next((record for record in self._runs.values() if not record.is_over), None)
        return None if found is None else self._up_to_now(found)

    def _up_to_now(self, record: RunRecord) -> RunRecord:
        running = self._running
        if record.is_over or running is None:
            return record
        output = running.output
        return replace(record, progress=output.progress, work=output.work, elapsed_s=running.elapsed_s)

    def _tell(self) -> None:
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    def _wait_for(self, running: _Running, timeout: float | None) -> bool:
        assert running.thread is not None
        running.thread.join(timeout)
        return not running.thread.is_alive()


def _same_preset(record: RunRecord, preset: Preset) -> RunRecord:
    if record.preset != preset.name:
        raise InvalidArgument(
            f"the request_id stands for a run of {record.preset!r}, which was started before"
        )
    return record


def _what_runs(busy: RunRecord, owner: str) -> str:
    whose = f"your run {busy.run_id}" if busy.owner == owner else "a run of somebody else"
    return (
        f"one run at a time, and {whose} of {busy.preset!r} is going on since {busy.started_at}: "
        f"{busy.progress:.0%} done"
    )
