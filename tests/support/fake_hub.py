"""A hub on this machine: an HTTP server that answers as the real one does, as far as fetching goes.

Large files are redirected to another path, as to a content network, and sent in ranges.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote, urlsplit

REVISION = "c0ffee" * 6 + "c0de"
_LARGE = (".safetensors", ".gguf")


@dataclass
class FakeHub:
    """Repositories by id, each with its files by name, and what goes wrong with them."""

    url: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """What is sent, by repository and name."""
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
