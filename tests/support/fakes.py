"""Stand-ins for other people's software: a hub, llama.cpp, and an HTTP server that answers by a script."""

import ctypes
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlsplit

REVISION = "c0ffee" * 6 + "c0de"
_LARGE = (".safetensors", ".gguf")


@dataclass
class FakeHub:
    """A hub on this machine: repositories by id, their files by name, and what goes wrong with them."""

    url: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """What is sent, by repository and name."""
    architectures: dict[str, str] = field(default_factory=dict)
    """Of the GGUF files of a repository, by its id."""
    stated: dict[str, bytes] = field(default_factory=dict)
    """Files whose digest is stated as that of other bytes."""
    refusals: dict[str, tuple[int, dict[str, str]]] = field(default_factory=dict)
    """Beginnings of paths that are answered with a status and headers."""
    cuts: list[int] = field(default_factory=list)
    """After how many bytes each of the next bodies of large files breaks off; nothing is then answered."""
    knows_ranges: bool = True
    downloads: list[tuple[str, str | None]] = field(default_factory=list)
    """File name and Range header of each large file that was asked for."""

    def add(self, hub_id: str, files: dict[str, bytes]) -> None:
        self.files.setdefault(hub_id, {}).update(files)

    def description(self, hub_id: str) -> dict[str, object]:
        return {
            "_id": "0",
            "id": hub_id,
            "sha": REVISION,
            "private": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "gguf": {"architecture": self.architectures.get(hub_id, "llama")},
            "siblings": [self._sibling(name, data) for name, data in sorted(self.files[hub_id].items())],
        }

    def _sibling(self, name: str, data: bytes) -> dict[str, object]:
        data = self.stated.get(name, data)
        sibling: dict[str, object] = {"rfilename": name, "size": len(data), "blobId": "0" * 40}
        if name.endswith(_LARGE):
            digest = hashlib.sha256(data).hexdigest()
            sibling["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 130}
        return sibling


class _Answer(BaseHTTPRequestHandler):
    """As the real hub answers: large files are redirected, as to a content network, and sent in ranges."""

    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        refusal = [answer for beginning, answer in self.hub.refusals.items() if path.startswith(beginning)]
        described = re.fullmatch(r"/api/models/([^/]+/[^/]+)", path)
        file = re.fullmatch(rf"(/cdn)?/([^/]+/[^/]+)/resolve/{REVISION}/(.+)", path)
        if refusal:
            self._send(refusal[0][0], b"", refusal[0][1])
        elif described and described[1] in self.hub.files:
            self._send(200, json.dumps(self.hub.description(described[1])).encode(), {})
        elif file and file[3] in self.hub.files.get(file[2], {}):
            self._send_file(file[3], self.hub.files[file[2]][file[3]], is_redirected=bool(file[1]))
        else:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound" if described else "EntryNotFound"})

    def _send_file(self, name: str, data: bytes, is_redirected: bool) -> None:
        if not name.endswith(_LARGE):
            self._send(200, data, {})
        elif not is_redirected:
            self._send(302, b"", {"Location": f"/cdn{self.path}"})
        else:
            self._send_large(name, data)

    def _send_large(self, name: str, data: bytes) -> None:
        wanted = self.headers.get("Range")
        self.hub.downloads.append((name, wanted))
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        if start and self.hub.knows_ranges:
            ranges = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self._send(206, data[start:], {"Content-Range": ranges}, self._cut())
        else:
            self._send(200, data, {}, self._cut())

    def _cut(self) -> int | None:
        return self.hub.cuts.pop(0) if self.hub.cuts else None

    def _send(self, status: int, body: bytes, headers: dict[str, str], cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Keeps the test's output clean."""


@contextmanager
def running_hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Answer", (_Answer,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class FakeLlama:
    """Keeps the positions of every sequence; `slow_flash` decides which attention setting is slower."""

    __version__ = "0.0"
    VOCABULARY = 12
    LLAMA_FLASH_ATTN_TYPE_DISABLED, LLAMA_FLASH_ATTN_TYPE_ENABLED = 0, 1

    def __init__(self, slow_flash: int = 0) -> None:
        self.slow_flash = slow_flash
        self.opened: list[SimpleNamespace] = []
        self.freed: list[SimpleNamespace] = []
        self.calls: list[list[tuple[int, int, int, bool]]] = []
        self.logits = (ctypes.c_float * 0)()
        self.llama_log_callback = lambda function: function
        self.llama_log_set = lambda callback, data: callback(0, b"", None)
        self.llama_backend_init = lambda: None
        self.llama_print_system_info = lambda: b"CPU : FAKE = 1 "
        self.llama_model_default_params = lambda: SimpleNamespace(n_gpu_layers=-1)
        self.llama_context_default_params = SimpleNamespace
        self.llama_model_get_vocab = lambda model: "vocabulary"
        self.llama_vocab_n_tokens = lambda vocabulary: self.VOCABULARY
        self.llama_get_memory = lambda context: context
        self.llama_synchronize = lambda context: None

    def llama_model_load_from_file(self, path: bytes, params: SimpleNamespace) -> str | None:
        assert params.n_gpu_layers == 0
        return None if b"broken" in path else "model"

    def llama_get_logits(self, context: SimpleNamespace) -> Any:
        """After every token the next higher one is expected, by one more than the others."""
        rows = self.calls[-1]
        self.logits = (ctypes.c_float * (len(rows) * self.VOCABULARY))()
        for row, (token, *_) in enumerate(rows):
            self.logits[row * self.VOCABULARY + token + 1] = 1.0
        return ctypes.cast(self.logits, ctypes.POINTER(ctypes.c_float))

    def llama_batch_init(self, tokens: int, embeddings: int, sequences: int) -> SimpleNamespace:
        columns = {name: [0] * tokens for name in ("token", "pos", "n_seq_id", "logits")}
        return SimpleNamespace(n_tokens=0, seq_id=[[0] for _ in range(tokens)], **columns)

    def llama_init_from_model(self, model: str, params: SimpleNamespace) -> SimpleNamespace | None:
        if params.n_ctx > 2**20:
            return None
        self.opened.append(SimpleNamespace(params=params, length=[0] * params.n_seq_max))
        return self.opened[-1]

    def llama_decode(self, context: SimpleNamespace, batch: SimpleNamespace) -> int:
        columns = (batch.token, batch.pos, [each[0] for each in batch.seq_id], map(bool, batch.logits))
        self.calls.append(list(zip(*columns, strict=True))[: batch.n_tokens])
        for _, position, sequence, _ in self.calls[-1]:
            if position != context.length[sequence]:
                return -1
            context.length[sequence] += 1
        if max(context.length) > context.params.n_ctx // context.params.n_seq_max:
            return 1
        time.sleep(0.003 if context.params.flash_attn_type == self.slow_flash else 0.0005)
        return 0

    def llama_memory_clear(self, context: SimpleNamespace, data: bool) -> None:
        context.length = [0] * len(context.length)

    def llama_memory_seq_cp(self, context: SimpleNamespace, source: int, target: int, *ends: int) -> None:
        assert ends == (-1, -1), "between streams only whole sequences can be copied"
        context.length[target] = context.length[source]

    def llama_memory_seq_rm(self, context: SimpleNamespace, sequence: int, start: int, end: int) -> bool:
        assert end == -1
        context.length[sequence] = min(start, context.length[sequence])
        return True

    def llama_free(self, context: SimpleNamespace) -> None:
        assert all(context is not gone for gone in self.freed)
        self.freed.append(context)


# Path and body to status and text; what begins with "data:" is sent as events.
Script = Callable[[str, Any], tuple[int, str]]


@contextmanager
def scripted_http(script: Script) -> Iterator[str]:
    """The address of a server that answers by the script."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            self._answer(json.loads(self.rfile.read(length)))

        def do_GET(self) -> None:
            self._answer(None)

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, body: object) -> None:
            status, text = script(self.path, body)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def sse(events: Sequence[Any]) -> str:
    """Events as they go over the wire, and the end of a stream."""
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
