"""The directory of a bridge: a folder for each run, with its record, its report and its page."""

import json
import logging
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kakeya.bench.report import Report, as_json, from_json, now, read_report
from kakeya.bridge.records import RunRecord, RunState
from kakeya.errors import ConfigError, RunNotFound
from kakeya.storage.files import DirectoryLock, Files

log = logging.getLogger(__name__)

# The largest report or page that is taken. The longest preset's has a tenth of this.
LARGEST_REPORT = 64 * 2**20
REPORT, PAGE = "report.json", "report.html"
_RECORD = "run.json"


class Archive:
    """Keeps the last `keep` runs. One bridge at a time can have a directory; it is for nobody else's eyes."""

    def __init__(self, directory: Path, keep: int) -> None:
        """Raises ConfigError when the directory cannot be made, or is in use."""
        # A run has a working directory of its own, where a relative path would lead elsewhere.
        self.directory, self._keep = directory.absolute(), keep
        self._files = Files()
        self._files.make_directory(self.directory)
        self._lock = DirectoryLock(self.directory)

    def close(self) -> None:
        """Let another bridge have the directory."""
        self._lock.release()

    def load(self) -> dict[str, RunRecord]:
        """The runs of earlier bridges, oldest first. One that was still going on has failed."""
        # Of those that began in the same second, the one that ended first was first.
        found = sorted(self._stored(), key=lambda record: (record.started_at, self._stored_at(record)))
        return {record.run_id: self._ended(record) for record in found}

    def create(self, record: RunRecord) -> Path:
        """A folder for a new run. Raises ConfigError and StorageFailed."""
        folder = self.folder(record.run_id)
        self._files.make_directory(folder)
        self.save(record)
        return folder

    def save(self, record: RunRecord) -> None:
        """Raises StorageFailed."""
        told = json.dumps(as_json(record)).encode()
        self._files.replace(self.folder(record.run_id) / _RECORD, [told])

    def forget_oldest(self, runs: dict[str, RunRecord]) -> None:
        """Delete runs beyond those that are kept, from the disk and from `runs`."""
        over = [record.run_id for record in runs.values() if record.is_over]
        for run_id in over[: max(0, len(runs) - self._keep)]:
            self.remove(run_id)
            del runs[run_id]

    def remove(self, run_id: str) -> None:
        """All that is stored of a run."""
        shutil.rmtree(self.folder(run_id), ignore_errors=True)

    def open_report(self, run_id: str, name: str) -> int:
        """A descriptor of the file as it is now: a run replaces it as a whole.

        Raises RunNotFound when there is none, or when it is too large or no plain file.
        """
        try:
            # Through no link, and without waiting for a pipe.
            handle = os.open(self.folder(run_id) / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise RunNotFound(f"run {run_id} has no {name}") from error
        if problem := _unfit(os.fstat(handle)):
            os.close(handle)
            raise RunNotFound(f"the {name} of run {run_id} {problem}")
        return handle

    def report(self, run_id: str, kind: str) -> Report:
        """What a run has reported so far. Raises RunNotFound when that is not a report of this kind."""
        os.close(self.open_report(run_id, REPORT))
        try:
            report = read_report(self.folder(run_id) / REPORT)
        except ConfigError as error:
            raise RunNotFound(f"the {REPORT} of run {run_id}: {error}") from error
        if report.kind != kind:
            raise RunNotFound(f"the {REPORT} of run {run_id} is one of {report.kind!a:.80}, not of {kind}")
        return report

    def folder(self, run_id: str) -> Path:
        """Of a run that this bridge has named: what callers say never becomes a path."""
        return self.directory / run_id

    def _stored(self) -> Iterator[RunRecord]:
        for path in self.directory.glob(f"*/{_RECORD}"):
            try:
                record: RunRecord = from_json(RunRecord, json.loads(path.read_bytes()))
            except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
                log.warning("a run that cannot be read is left alone", extra={"run": path, "error": error})
                continue
            if record.run_id == path.parent.name:
                yield record

    def _stored_at(self, record: RunRecord) -> int:
        return (self.folder(record.run_id) / _RECORD).stat().st_mtime_ns

    def _ended(self, record: RunRecord) -> RunRecord:
        if record.is_over:
            return record
        reason = "the bridge died during the run"
        ended = replace(record, state=RunState.FAILED, reason=reason, finished_at=now())
        with suppress(RunNotFound):
            os.close(self.open_report(record.run_id, REPORT))
            ended = replace(ended, has_report=True)
        self.save(ended)
        return ended


def _unfit(facts: os.stat_result) -> str:
    """Why a file is no report; empty when it may be one."""
    if not stat.S_ISREG(facts.st_mode):
        return "is no plain file"
    if facts.st_size > LARGEST_REPORT:
        return f"has {facts.st_size:,} bytes, more than the {LARGEST_REPORT:,} that are allowed"
    return ""
