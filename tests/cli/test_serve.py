"""`kakeya serve` as a real process: banner, metrics, signals, drain under load."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from kakeya.wire import runtime_pb2 as pb
from support import serving
from support.engines import REASON
from support.http_serving import eventually
from support.programs import Run
from support.serving import new_session
from support.untraced import KAKEYA, importing

TINY = ("--window", "60", "--dtype", "float32", "--threads", "1", "--capacity", "8")
LOCAL = ("--bind", "127.0.0.1:0")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return serving.write_model(tmp_path_factory.mktemp("model"))


class Process:
    """A running `kakeya serve`, and what it has written to stderr so far."""

    # Not gRPC, which looks while it is imported how much it may say.
    program = importing("fastapi") + KAKEYA

    def __init__(self, *arguments: str, **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", self.program, "serve", "--http", "127.0.0.1:0", *arguments],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        self.said = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.said += line

    def wait_for(self, pattern: str, timeout: float = 90.0) -> str:
        """The first group of a pattern, once the process has said it."""
        deadline = time.monotonic() + timeout
        while (match := re.search(pattern, self.said)) is None:
            assert time.monotonic() < deadline, f"not said in time: {pattern}\n{self.said}"
            assert self._process.poll() is None or re.search(pattern, self.said), self.said
            time.sleep(0.02)
        return match[1]

    @property
    def address(self) -> str:
        return self.wait_for(r"serves .* on (127\.0\.0\.1:\d+)")

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def join(self, timeout: float = 30.0) -> int:
        """The exit status."""
        status = self._process.wait(timeout)
        self._reader.join(5)
        return status

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self.join()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()


@contextmanager
def process(*arguments: str, **environment: str) -> Iterator[Process]:
    running = Process(*arguments, **environment)
    try:
        yield running
    finally:
        running.close()


class Dying(Process):
    """Its device fails for good after some steps."""

    program = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        f"from support.engines import break_after; break_after(launches=30)\n{KAKEYA}"
    )


class Agent(threading.Thread):
    """Takes turns on one session until the server goes; keeps what it was told."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._address = address
        self.finished_turns = 0
        self.broken_turns = 0
        self.failure: object = None
        self.ended = ""

    def run(self) -> None:
        with serving.connected(self._address) as stub:
            try:
                session_id = new_session(stub, [5, 6, 7])
                while True:
                    self._turn(stub, session_id)
            except grpc.RpcError as error:
                self.ended = error.code().name

    def _turn(self, stub: Any, session_id: str) -> None:
        stub.AppendTokens(pb.AppendTokensRequest(session_id=session_id, token_ids=[3]))
        tokens, done = 0, None
        try:
            for event in stub.Generate(pb.GenerateRequest(session_id=session_id, max_tokens=400)):
                tokens += event.WhichOneof("event") == "token"
                done = event.done if event.WhichOneof("event") == "done" else done
        except grpc.RpcError:
            self.broken_turns += tokens > 0
            raise
        if done is None or (done.generated_token_count, tokens) != (400, 400):
            self.failure = (tokens, done)
        self.finished_turns += 1


def test_a_drain_under_load_lets_every_turn_finish(model: Path) -> None:
    with process("--model", str(model), *TINY, *LOCAL, "--shutdown-grace-s", "20") as server:
        agents = [Agent(server.address) for _ in range(4)]
        for agent in agents:
            agent.start()
        time.sleep(1.5)
        began = time.monotonic()
        server.send(signal.SIGTERM)
        assert server.join() == 0
        assert time.monotonic() - began < 20
        for agent in agents:
            agent.join(10)
        assert [agent.failure for agent in agents] == [None] * 4
        assert [agent.broken_turns for agent in agents] == [0] * 4
        assert all(agent.finished_turns > 0 for agent in agents)
        assert {agent.ended for agent in agents} == {"UNAVAILABLE"}
        assert "draining" in server.said


def test_what_cannot_finish_is_told_and_a_second_signal_ends_at_once(model: Path) -> None:
    with (
        process("--model", str(model), *TINY, *LOCAL, "--shutdown-grace-s", "60") as server,
        serving.connected(server.address) as stub,
    ):
        session_id = new_session(stub, [5, 6, 7])
        call = stub.Generate(pb.GenerateRequest(session_id=session_id, max_tokens=100_000_000))
        next(call)
        server.send(signal.SIGTERM)
        server.wait_for("(draining)")
        time.sleep(0.3)
        began = time.monotonic()
        server.send(signal.SIGINT)
        assert server.join() == 128 + signal.SIGINT
        assert time.monotonic() - began < 10


def test_a_server_whose_device_is_lost_tells_its_clients_and_ends(model: Path) -> None:
    arguments = ("--model", str(model), *TINY, *LOCAL, "--session-idle-ttl-s", "600")
    with closing(Dying(*arguments)) as server, serving.connected(server.address) as stub:
        url = server.wait_for(r"http +(http://\S+)/ \(console\)")
        session_id = new_session(stub, [5, 6, 7])
        call = stub.Generate(pb.GenerateRequest(session_id=session_id, max_tokens=100_000_000), timeout=20)
        with pytest.raises(grpc.RpcError) as told:
            list(call)
        assert (told.value.code(), told.value.details()) == (grpc.StatusCode.UNAVAILABLE, REASON)
        assert server.join(10) == 1
        assert f"kakeya: {REASON}\n" in server.said
        assert server.said.count("Traceback") == 2, "the fault and what became of it, in the log, once"
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{url}/healthz")


def test_the_banner_says_what_runs_and_metrics_are_served(model: Path) -> None:
    arguments = ("--model", str(model), *TINY, *LOCAL, "--metrics-port", "0", "--api-key", "some-secret-key")
    with process(*arguments) as server:
        with serving.connected(server.address) as stub:
            metadata = (("authorization", "Bearer some-secret-key"),)
            session_id = new_session(stub, [5, 6, 7], metadata=metadata)
            list(stub.Generate(pb.GenerateRequest(session_id=session_id, max_tokens=5), metadata=metadata))
        url = server.wait_for(r"metrics +(http://\S+)")

        def metrics() -> str:
            with urllib.request.urlopen(url) as page:
                text: str = page.read().decode()
            return text

        assert "kakeya_generation_tokens_total 5.0" in metrics()
        # The engine hears after the client that the answer was read to its end.
        eventually(lambda: 'kakeya_sessions{state="idle"} 1.0' in metrics())
        per_token = 2 * 2 * 2 * 16 * 4
        assert f"{per_token * (4 + 60 + 32):,} bytes: sink 4 + window 60" in server.said
        assert "at most 8 sessions" in server.said
        assert "plain text, one API key" in server.said
        assert "some-secret-key" not in server.said
        server.send(signal.SIGTERM)
        assert server.join() == 0


def chat_request(url: str, model: str) -> urllib.request.Request:
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
    headers = {"content-type": "application/json"}
    return urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)


def test_http_and_grpc_are_two_doors_to_the_same_sessions(model: Path) -> None:
    arguments = ("--model", str(model), *TINY, *LOCAL, "--max-concurrent", "1", "--admission", "reject")
    with process(*arguments) as server, serving.connected(server.address) as stub:
        url = server.wait_for(r"http +(http://\S+)/ \(console\)")
        with urllib.request.urlopen(f"{url}/readyz") as page:
            assert json.load(page) == {"status": "ready"}
        session_id = new_session(stub, [5, 6, 7])
        endless = stub.Generate(pb.GenerateRequest(session_id=session_id, max_tokens=100_000_000))
        next(endless)
        with pytest.raises(grpc.RpcError) as refused:
            next(stub.Generate(pb.GenerateRequest(session_id=new_session(stub, [5]), max_tokens=1)))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(urllib.error.HTTPError) as refused_too:
            urllib.request.urlopen(chat_request(url, str(model)))
        with refused_too.value as answer:
            assert (answer.code, answer.headers["retry-after"]) == (429, "1")
        with urllib.request.urlopen(f"{url}/metrics") as page:
            metrics = page.read().decode()
        assert 'kakeya_admission_total{result="rejected"} 2.0' in metrics
        assert 'kakeya_sessions{state="generating"} 1.0' in metrics
        endless.cancel()
        server.send(signal.SIGTERM)
        assert server.join() == 0
        assert "Traceback" not in server.said


@pytest.mark.usefixtures("usual_logs")
def test_http_may_be_off_and_a_taken_port_is_one_line(run: Run, model: Path) -> None:
    arguments = ("--model", str(model), *TINY, *LOCAL)
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        refused = run("serve", *arguments, "--http", taken)
        assert refused.status == 2
        assert f"kakeya: cannot listen on {taken}: " in refused.err
        assert "Traceback" not in refused.err
    with process(*arguments, "--http", "off") as server:
        server.wait_for("(serves)")
        server.wait_for("(callers)")
        assert "console" not in server.said
        server.send(signal.SIGTERM)
        assert server.join() == 0


def hang_up(address: str) -> None:
    """As clients on Node do: HTTP/2's first frames, then GOAWAY with the code CANCEL."""
    host, port = address.split(":")
    settings, acknowledged = bytes.fromhex("000000 04 00 00000000"), bytes.fromhex("000000 04 01 00000000")
    goaway = bytes.fromhex("000008 07 00 00000000 00000000 00000008")
    with socket.create_connection((host, int(port)), timeout=10) as line:
        line.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + goaway)
        said = b""
        while acknowledged not in said:
            more = line.recv(4096)
            assert more, "the server hung up first"
            said += more


def test_logs_may_be_json_all_through(model: Path) -> None:
    arguments = ("--model", str(model), *TINY, "--log-format", "json", "--insecure")
    with process(*arguments, KAKEYA_BIND="0.0.0.0:0") as server:
        hang_up("127.0.0.1:" + server.wait_for(r"serves .* on 0\.0\.0\.0:(\d+)"))
        server.send(signal.SIGINT)
        assert server.join() == 0
        records = [json.loads(line) for line in server.said.splitlines()]
    assert any(r["level"] == "warning" and "INSECURE" in r["message"] for r in records)


def test_an_insecure_start_cannot_be_missed(model: Path) -> None:
    arguments = ("--model", str(model), *TINY, "--bind", "0.0.0.0:0", "--insecure")
    with process(*arguments) as server:
        server.wait_for("(serves)")
        assert "!" * 70 in server.said
        assert "INSECURE: 0.0.0.0:0 can be reached from other machines" in server.said
        assert server.said.index("INSECURE") < server.said.index("serves")
        server.send(signal.SIGTERM)
        assert server.join() == 0


@pytest.mark.usefixtures("usual_logs")
def test_a_model_that_does_not_load_is_one_line(run: Run, model: Path) -> None:
    for arguments, words in (
        (("--model", "nope"), "kakeya: no model 'nope'"),
        (("--model", str(model), "--capacity", "1000000", "--memory-budget", "1MB"), "room for"),
    ):
        outcome = run("serve", *LOCAL, "--http", "127.0.0.1:0", *arguments)
        assert outcome.status in (1, 2)
        assert words in outcome.err
        assert "Traceback" not in outcome.err
