"""What is known of a run, on both sides of the wire and on the disk."""

from dataclasses import dataclass
from enum import StrEnum

from kakeya.bench.presets import is_name
from kakeya.errors import RemoteError
from kakeya.wire import bridge_pb2 as pb


class RunState(StrEnum):
    """How a run fares; all but `running` are for ever."""

    RUNNING = "running"
    PASSED = "passed"
    GATES_FAILED = "gates failed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed out"


@dataclass(frozen=True)
class RunRecord:
    """A run, as far as it is. The owner and the request id are the bridge's own affair."""

    run_id: str
    preset: str
    started_at: str
    owner: str = ""
    request_id: str = ""
    state: RunState = RunState.RUNNING
    progress: float = 0.0
    work: str = ""
    finished_at: str = ""
    elapsed_s: float = 0.0
    reason: str = ""
    output_tail: str = ""
    has_report: bool = False

    @property
    def is_over(self) -> bool:
        return self.state is not RunState.RUNNING


_STATES = {
    RunState.RUNNING: pb.RUN_STATE_RUNNING,
    RunState.PASSED: pb.RUN_STATE_PASSED,
    RunState.GATES_FAILED: pb.RUN_STATE_GATES_FAILED,
    RunState.FAILED: pb.RUN_STATE_FAILED,
    RunState.CANCELLED: pb.RUN_STATE_CANCELLED,
    RunState.TIMED_OUT: pb.RUN_STATE_TIMED_OUT,
}
_BY_NUMBER = {number: state for state, number in _STATES.items()}


def status_message(record: RunRecord) -> pb.RunStatus:
    return pb.RunStatus(
        run_id=record.run_id,
        preset=record.preset,
        state=_STATES[record.state],
        progress=record.progress,
        work=record.work,
        started_at=record.started_at,
        finished_at=record.finished_at,
        elapsed_seconds=record.elapsed_s,
        reason=record.reason,
        output_tail=record.output_tail,
        has_report=record.has_report,
    )


def record_of(message: pb.RunStatus) -> RunRecord:
    """What a bridge says of a run. Raises RemoteError for what no bridge of ours would say."""
    if message.state not in _BY_NUMBER or not is_name(message.preset):
        raise RemoteError(f"the bridge tells of a run that cannot be: {message.preset!a}, {message.state}")
    return RunRecord(
        run_id=message.run_id,
        preset=message.preset,
        started_at=message.started_at,
        state=_BY_NUMBER[message.state],
        progress=message.progress,
        work=message.work,
        finished_at=message.finished_at,
        elapsed_s=message.elapsed_seconds,
        reason=message.reason,
        output_tail=message.output_tail,
        has_report=message.has_report,
    )
