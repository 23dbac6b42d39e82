"""An HTTP server that answers by a script, for clients that must bear what real servers rarely do."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

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
