"""Keeps one home alive: starts its process, passes signs of life on, and starts it again when it dies."""

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kakeya.cluster.calling import HomeCalls
from kakeya.cluster.members import FENCED_STATUS
from kakeya.errors import ConfigError, KakeyaError, RemoteError, Unavailable
from kakeya.wire import cluster_pb2 as pb

log = logging.getLogger(__name__)
BEAT_S = 0.25
# A home that is so long silent hangs, and its sessions with it.
_HUNG_S = 30.0
_ENDS_S = 40.0
_PAUSE_S = 0.5
_PROGRAM = "from kakeya.cli import main; main()"

# Tells the cluster how a home is; who is there.
Report = Callable[[pb.Home], pb.View]


@dataclass(frozen=True)
class Address:
    """Where a home listens: HOST:PORT of gRPC, and the URL of HTTP."""

    address: str
    http: str

    @property
    def flags(self) -> list[str]:
        """For the next process of the home: whoever knows this address finds it again."""
        return ["--bind", self.address, "--http", self.http.partition("://")[2]]


class HomeProcess:
    """A `kakeya cluster home`. It ends with the process that started it, because its standard input does."""

    def __init__(self, arguments: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, "cluster", "home", *arguments, "--leash"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._last_words = ""
        self._listening = threading.Thread(target=self._listen, name="kakeya-home-log", daemon=True)
        self._listening.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """How it has ended; None while it lives."""
        return self._process.poll()

    def ready(self) -> Address:
        """Where it is, once it serves. Raises what it ended with before that."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return Address(**json.loads(line))
        status = self._process.wait()
        self._listening.join()
        kind = ConfigError if status == 2 else Unavailable
        raise kind(f"the home ended with status {status} before it served: {self._last_words}")

    def wait(self, timeout_s: float) -> int:
        """How it ends, which must be within that time."""
        return self._process.wait(timeout_s)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._process.kill()

    def end(self) -> None:
        """Let it store what it has and end."""
        self._process.terminate()
        try:
            self._process.wait(_ENDS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._close()

    def bury(self) -> None:
        """It has ended, or must now."""
        self._process.kill()
        self._process.wait()
        self._close()

    def _listen(self) -> None:
        """Pass on what it logs, and keep the last line."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._last_words = line.strip() or self._last_words
            sys.stderr.write(line)

    def _close(self) -> None:
        self._listening.join()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


class Keeper:
    """Has a home's process for as long as it lives. `start` returns when the home serves.

    When another process has become the home, it keeps none any more: two keepers that took a directory from
    each other again and again would serve nobody. `when_fenced` is told.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        secret: str,
        report: Report,
        when_fenced: Callable[[], None] = lambda: None,
    ) -> None:
        self._arguments, self._secret, self._report = arguments, secret, report
        self._when_fenced = when_fenced
        self._view = pb.View()
        self._over = threading.Event()
        self.fenced = threading.Event()
        self._served = threading.Event()
        self._failure: KakeyaError | None = None
        self._address: Address | None = None
        self.process: HomeProcess | None = None
        self.home: pb.Home | None = None
        self._thread = threading.Thread(target=self._live, name="kakeya-keeper", daemon=True)

    def start(self) -> "Keeper":
        """Raises what the first start of the home raises."""
        self._thread.start()
        self._served.wait()
        if self._failure is not None:
            raise self._failure
        return self

    def stop(self, *, at_once: bool = False) -> None:
        """End the home, after it has stored what it has."""
        self._over.set()
        if at_once and self.process is not None:
            self.process.kill()
        self._thread.join()

    def _live(self) -> None:
        while not self._over.is_set():
            same = [] if self._address is None else self._address.flags
            self._address = None
            process = self.process = HomeProcess([*self._arguments, *same])
            try:
                self._attend(process)
            except KakeyaError as error:
                log.error("%s", error)
                if not self._served.is_set():
                    self._failure = error
                    self._over.set()
                    self._served.set()
            if self._over.is_set():
                process.end()
                return
            process.bury()
            if process.status == FENCED_STATUS:
                log.error("another process is the home now: this keeper has nothing to keep any more")
                self.fenced.set()
                self._when_fenced()
                return
            log.error("the home ended with status %s and is started again", process.status)
            self._over.wait(_PAUSE_S)

    def _attend(self, process: HomeProcess) -> None:
        """Until the home's process ends, or is to end. Raises what keeps it from serving."""
        self._address = process.ready()
        with HomeCalls(self._address.address, self._secret) as calls:
            heard = time.monotonic()
            while process.status is None and not self._over.is_set():
                try:
                    self.home = calls.beat(self._view)
                    heard = time.monotonic()
                except RemoteError as error:  # it lives, and is too busy to say how it is
                    heard = time.monotonic()
                    log.warning("the home does not say how it is: %s", error)
                except KakeyaError as error:
                    if time.monotonic() - heard > _HUNG_S:
                        raise Unavailable(f"the home hangs: {error}") from error
                else:
                    self._tell(self.home)
                self._over.wait(BEAT_S)

    def _tell(self, home: pb.Home) -> None:
        try:
            self._view = self._report(home)
        except Exception as error:  # whoever keeps the cluster's list is away: we go on with what we know
            log.warning("the cluster's list cannot be reached: %s", error)
        self._served.set()
