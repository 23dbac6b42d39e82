"""The other side of a bridge: start a preset, follow it through broken connections, fetch its report."""

import hashlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

import grpc

from kakeya.bench.presets import Preset
from kakeya.bridge.archive import LARGEST_REPORT
from kakeya.bridge.records import RunRecord, record_of
from kakeya.client.failures import translated
from kakeya.dialing import TLS, Keepalive, Retry, dial
from kakeya.errors import KakeyaError, RemoteError, Unavailable
from kakeya.wire import bridge_pb2 as pb, bridge_pb2_grpc

DEFAULT_PORT = 50071
_CALL_S = 30.0
_FETCH_S = 600.0
# A run is still there after a break: try so often, for as long as the caller has patience.
_RETRY = Retry(first_delay=0.2, longest_delay=5.0)
# Before anything was heard, the address may be wrong.
_FIRST_PATIENCE_S = 10.0


class _Patience:
    """How long a bridge that cannot be reached is tried again: `seconds` from the first failure on."""

    def __init__(self, seconds: float, tell: Callable[[str], object]) -> None:
        self._tell = tell
        self.renew(seconds)

    def renew(self, seconds: float) -> None:
        """The bridge was heard: the next failure is a first one."""
        self._seconds, self._end, self._delay = seconds, 0.0, _RETRY.first_delay

    def pause_or_raise(self, error: KakeyaError) -> None:
        """Wait before the next try. Raises `error` when there is no time for one."""
        if not self._end:
            self._end = time.monotonic() + self._seconds
            self._tell(f"the bridge cannot be reached, trying again for {self._seconds:g} s: {error}")
        if time.monotonic() + self._delay > self._end:
            raise error
        time.sleep(self._delay)
        self._delay = min(2 * self._delay, _RETRY.longest_delay)


class Bridge:
    """Calls to a `kakeya bridge serve`. Raises the error that the server meant. A context manager.

    What it says is a stranger's word: sizes and digests are checked, and texts must not reach a terminal as
    they are. Once a run has been heard of, breaks of up to `patience_s` seconds are waited out, and told of.
    """

    def __init__(
        self,
        address: str,
        api_key: str | None = None,
        tls: TLS | None = None,
        patience_s: float = 600.0,
        tell: Callable[[str], object] = lambda words: None,
    ) -> None:
        self._patience_s, self._tell = patience_s, tell
        self._channel = dial(address_of(address), tls, _RETRY, Keepalive())
        self._stub = bridge_pb2_grpc.BridgeServiceStub(self._channel)
        self._metadata = () if api_key is None else (("authorization", f"Bearer {api_key}"),)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def presets(self) -> list[Preset]:
        reply = self._call("ListPresets", pb.ListPresetsRequest())
        return [
            Preset(each.name, each.proves, each.benchmark, tuple(each.arguments), each.limit_seconds)
            for each in reply.presets
        ]

    def run(self, preset: str, request_id: str) -> Iterator[RunRecord]:
        """Start it, and its states up to its end. The same id never starts a second run."""
        request = pb.RunPresetRequest(preset=preset, request_id=request_id)
        return self._states(lambda: self._stream("RunPreset", request))

    def follow(self, run_id: str) -> Iterator[RunRecord]:
        """The states of a run that was started before, up to its end."""
        request = pb.FollowRunRequest(run_id=run_id)
        return self._states(lambda: self._stream("FollowRun", request))

    def runs(self) -> list[RunRecord]:
        """One's own, newest first."""
        return [record_of(each) for each in self._call("ListRuns", pb.ListRunsRequest()).runs]

    def cancel(self, run_id: str) -> RunRecord:
        return record_of(self._call("Cancel", pb.CancelRequest(run_id=run_id)))

    def fetch(self, run_id: str, *, page: bool = False) -> bytes:
        """The report, or its page. Raises RemoteError when it is not what its digest says, or too large."""
        form = pb.REPORT_FORM_HTML if page else pb.REPORT_FORM_JSON
        request, patience = pb.FetchReportRequest(run_id=run_id, form=form), self._patience(self._patience_s)
        while True:
            try:
                return _whole(self._stream("FetchReport", request, timeout=_FETCH_S))
            except Unavailable as error:
                patience.pause_or_raise(error)

    def _states(self, stream: Callable[[], Iterator[Any]]) -> Iterator[RunRecord]:
        patience = self._patience(min(_FIRST_PATIENCE_S, self._patience_s))
        while True:
            try:
                for message in stream():
                    patience.renew(self._patience_s)
                    record = record_of(message)
                    yield record
                    if record.is_over:
                        return
                raise Unavailable("the bridge ended the connection before the run had ended")
            except Unavailable as error:
                patience.pause_or_raise(error)

    def _patience(self, seconds: float) -> _Patience:
        return _Patience(seconds, self._tell)

    def _stream(self, name: str, request: Any, timeout: float | None = None) -> Iterator[Any]:
        call = getattr(self._stub, name)(request, timeout=timeout, metadata=self._metadata)
        try:
            yield from call
        except grpc.RpcError as error:
            raise translated(error) from error
        finally:
            call.cancel()  # who stops listening has not ended the run

    def _call(self, name: str, request: Any) -> Any:
        try:
            return getattr(self._stub, name)(request, timeout=_CALL_S, metadata=self._metadata)
        except grpc.RpcError as error:
            raise translated(error) from error


def _whole(chunks: Iterator[pb.ReportChunk]) -> bytes:
    """The file that a stream brings. Raises RemoteError for one that is not as announced."""
    header, content = pb.ReportHeader(), bytearray()
    for number, chunk in enumerate(chunks):
        header = chunk.header if number == 0 else header
        content += chunk.data
        if len(content) > min(header.size, LARGEST_REPORT):
            raise RemoteError(f"the bridge sends more than the {header.size:,} bytes that it announced")
    if len(content) != header.size or hashlib.sha256(content).digest() != header.sha256:
        raise RemoteError("the report was damaged on its way")
    return bytes(content)


def address_of(host: str) -> str:
    """HOST, HOST:PORT or [IPv6]:PORT, with the port of a bridge where none is given."""
    has_port = host.rpartition(":")[2].isdecimal() and (host.count(":") == 1 or "]:" in host)
    if has_port:
        return host
    is_bare_ipv6 = host.count(":") > 1 and not host.startswith("[")
    return f"[{host}]:{DEFAULT_PORT}" if is_bare_ipv6 else f"{host}:{DEFAULT_PORT}"
