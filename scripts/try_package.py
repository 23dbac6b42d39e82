"""Installs a wheel into an empty environment outside the tree, and serves the default model with it.

    python scripts/try_package.py dist

Takes the versions of constraints.txt. Exits with an error when a command of the installed package fails, or
when the server does not know the capital of France.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_MODEL = "smollm2-135m-instruct"
_PATIENCE_S = 180.0


def main(folder: Path) -> int:
    (wheel,) = sorted(folder.resolve().glob("*.whl"))
    with tempfile.TemporaryDirectory() as elsewhere:
        kakeya = install(wheel, Path(elsewhere))
        for arguments in (["--version"], ["doctor"], ["pull"]):
            subprocess.run([kakeya, *arguments], check=True, cwd=elsewhere, env=_environment())
        answer = answer_of_server(kakeya, elsewhere)
    sys.stdout.write(f"{answer}\n")
    return 0 if "Paris" in answer else 1


def install(wheel: Path, folder: Path) -> str:
    """The command `kakeya` of a new environment with the wheel in it."""
    venv.create(folder / "venv", with_pip=True)
    pip = [folder / "venv/bin/python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt"]
    subprocess.run([*pip, wheel], check=True, cwd=folder, env=_environment())
    return str(folder / "venv/bin/kakeya")


def answer_of_server(kakeya: str, folder: str) -> str:
    """What the default model answers over HTTP. The server is stopped at the end."""
    bind, http = (f"127.0.0.1:{_free_port()}" for _ in range(2))
    command = [kakeya, "serve", "--bind", bind, "--http", http, "--capacity", "2"]
    with subprocess.Popen(command, cwd=folder, env=_environment()) as server:
        try:
            _wait_for(f"http://{http}/readyz", server)
            return _ask(f"http://{http}/v1/chat/completions")
        finally:
            server.terminate()


def _ask(url: str) -> str:
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    body = json.dumps({"model": _MODEL, "messages": messages, "max_tokens": 24, "temperature": 0}).encode()
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with _open(request) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    for _ in range(int(_PATIENCE_S)):
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with status {server.returncode}")
        try:
            with _open(urllib.request.Request(url)):
                return
        except (urllib.error.URLError, ConnectionError):  # not listening yet, or still loading
            time.sleep(1)
    raise TimeoutError(f"{url} was not ready after {_PATIENCE_S:.0f} s")


def _open(request: urllib.request.Request):  # noqa: ANN202 - a response of urllib, which has no public type
    # No proxy: the server is on this machine.
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _environment() -> dict[str, str]:
    """Without what would let the tree's own package in."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
