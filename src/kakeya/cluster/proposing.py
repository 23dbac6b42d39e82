"""Keeps a proposer alive: a `kakeya propose` for homes of the cluster, whose secret is the key."""

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kakeya.errors import Unavailable

log = logging.getLogger(__name__)
_START_S = 300.0
_LOOK_S = 1.0
# It ends with us, however we end: its standard input does.
_PROGRAM = (
    "import os, threading; "
    "leave = lambda: (os.read(0, 1), os._exit(0)); "
    "threading.Thread(target=leave, daemon=True).start(); "
    "from kakeya.cli import main; main()"
)


class ProposerKeeper:
    """Has a proposer's process for as long as it lives, always at the same address. `tell` is called with the
    address again and again while it serves."""

    def __init__(self, arguments: Sequence[str], host: str, secret: str, tell: Callable[[str], None]) -> None:
        self.address = f"{host}:{_free_port(host)}"
        self._arguments, self._secret, self._tell = arguments, secret, tell
        self._over = threading.Event()
        self._process = self._begin()
        self._thread = threading.Thread(target=self._live, name="kakeya-proposer", daemon=True)

    def start(self) -> "ProposerKeeper":
        """Returns when it serves. Raises Unavailable when it ends before, or takes too long."""
        deadline = time.monotonic() + _START_S
        while not self._serves():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise Unavailable(f"the proposer at {self.address} does not serve; its log says why")
            time.sleep(0.1)
        self._tell(self.address)
        self._thread.start()
        return self

    def stop(self) -> None:
        self._over.set()
        if self._thread.is_alive():  # first: it might start another process
            self._thread.join()
        self._bury()

    def _begin(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-c", _PROGRAM, "propose", "--bind", self.address, *self._arguments]
        environment = os.environ | {"KAKEYA_API_KEY": self._secret}
        return subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)

    def _bury(self) -> None:
        self._process.kill()
        self._process.communicate()  # waits for it, and closes its input

    def _live(self) -> None:
        while not self._over.wait(_LOOK_S):
            if self._process.poll() is not None:
                log.error("the proposer ended with status %s and is started again", self._process.returncode)
                self._bury()
                self._process = self._begin()
            elif self._serves():
                self._tell(self.address)

    def _serves(self) -> bool:
        with grpc.insecure_channel(self.address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=2.0)
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
