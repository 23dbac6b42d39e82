"""Foreign programs against a real server: `make compat`, or `python compat/run.py NAME…` for some of them.

Each program is installed into an environment of its own under build/compat: what they depend on contradicts
the others and us. They run unchanged: what they are told is where the server is, and what its model is
called. The status is 0 when all of them passed.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kakeya import Client

HERE = Path(__file__).parent
BUILD = HERE.parent / "build" / "compat"
MODEL = "smollm2-135m-instruct"
_LOADING_S, _PROGRAM_S = 300, 900


@dataclass(frozen=True)
class Place:
    """Where the server is, and a folder that `transformers` can load its tokenizer from."""

    url: str
    tokenizer: Path
    output: Path


@dataclass(frozen=True)
class Program:
    """What to install, and what to run in its environment. `{…}` are the fields of a place."""

    packages: tuple[str, ...]
    commands: tuple[tuple[str, ...], ...]


def _guidellm(route: str, name: str, seed: int, *, held: bool) -> tuple[str, ...]:
    """Conversations of eight turns, two at a time; the server or the client has the history. Each way needs a
    seed of its own: what others have said before, a server need not compute."""
    history = ",server_history=true" if held else ""
    return (
        "guidellm",
        "run",
        *("--backend", f"kind=openai_http,target={{url}},model={MODEL},request_format={route}{history}"),
        *("--tokenizer", "kind=huggingface_auto,model={tokenizer}"),
        *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=32,turns=8"),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", "kind=max_requests,count=48", "--seed", f"kind=static,value={seed}"),
        *("--output", f"kind=json,path={{output}}/guidellm-{name}.json", "--disable-console-interactive"),
    )


PROGRAMS = {
    "guidellm": Program(
        ("guidellm==0.8.1",),
        (
            _guidellm("/v1/responses", "responses", 7, held=True),
            _guidellm("/v1/chat/completions", "chat", 8, held=False),
            (sys.executable, "compat/programs/guidellm_reports.py", "{output}"),
        ),
    ),
    "aiperf": Program(
        ("aiperf==0.13.0",),
        (
            (
                # Told that it is offline, it reads tokenizers from the hub's cache alone, and no folder.
                *("env", "-u", "HF_HUB_OFFLINE"),
                *("aiperf", "profile", "--model", MODEL, "--url", "{url}", "--endpoint-type", "chat"),
                *("--streaming", "--tokenizer", "{tokenizer}", "--concurrency", "2", "--request-count", "8"),
                *("--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "24", "--random-seed", "7"),
                *("--extra-inputs", "ignore_eos:true", "--extra-inputs", "min_tokens:24"),
                "--use-server-token-count",  # of special tokens it sees no text to count
                *("--artifact-dir", "{output}/aiperf", "--ui", "none"),
            ),
            ("python", "compat/programs/aiperf_report.py", "{output}/aiperf"),
        ),
    ),
    "openai-agents": Program(("openai-agents==0.24.0",), (("python", "compat/programs/agents_sdk.py"),)),
    "pydantic-ai": Program(
        ("pydantic-ai-slim[openai,anthropic]==2.66.0",),
        (("python", "compat/programs/pydantic_ai_agents.py"),),
    ),
    "llm": Program(("llm==0.36",), (("python", "compat/programs/llm_chat.py"),)),
    "lm-eval": Program(
        ("lm-eval[api]==0.4.13", "transformers"),
        (("python", "compat/programs/lm_eval_scores.py", "{tokenizer}"),),
    ),
}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PROGRAMS)}; all if left out")
    names = parser.parse_args(arguments).names or list(PROGRAMS)
    if unknown := set(names) - PROGRAMS.keys():
        parser.error(f"there is no program {min(unknown)!r}; there are {', '.join(PROGRAMS)}")
    for name in names:
        _install(name)
    with _serving() as place:
        failed = [name for name in names if not _passes(name, place)]
    for name in names:
        sys.stdout.write(f"{'failed' if name in failed else 'passed'}: {name}\n")
    return 1 if failed else 0


def _install(name: str) -> None:
    """Into the program's own environment, unless it has just these packages already."""
    folder, wanted = BUILD / name, " ".join(PROGRAMS[name].packages)
    stamp = folder / "installed.txt"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    venv.create(folder, with_pip=True, clear=True)
    subprocess.run([folder / "bin/python", "-m", "pip", "install", "-q", *wanted.split()], check=True)
    stamp.write_text(wanted)


def _passes(name: str, place: Place) -> bool:
    """Whether all commands of the program ended well. They see the server, and nothing of the hub."""
    folder = BUILD / name
    environment = {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "KAKEYA_URL": place.url,
        "KAKEYA_MODEL": MODEL,
        "OPENAI_API_KEY": "none",
        "HF_HUB_OFFLINE": "1",
        "NO_PROXY": "127.0.0.1",
    }
    for command in PROGRAMS[name].commands:
        filled = [part.format(**vars(place)) for part in command]
        try:
            ended = subprocess.run(filled, cwd=HERE.parent, env=environment, timeout=_PROGRAM_S).returncode
        except subprocess.TimeoutExpired:
            ended = None
        if ended != 0:
            sys.stderr.write(f"{name}: status {ended} of {' '.join(filled)}\n")
            return False
    return True


@contextmanager
def _serving() -> Iterator[Place]:
    """A server of the default model, and its tokenizer in a folder."""
    http, address = (f"127.0.0.1:{_free_port()}" for _ in range(2))
    place = Place(f"http://{http}", BUILD / "tokenizer", BUILD / "reports")
    shutil.rmtree(place.output, ignore_errors=True)
    place.output.mkdir(parents=True)
    command = ["-m", "kakeya", "serve", "--model", MODEL, "--capacity", "64", "--bind", address]
    with subprocess.Popen([sys.executable, *command, "--http", http]) as server:
        try:
            _await_health(place.url, server)
            _write_tokenizer(place.tokenizer, address)
            yield place
        finally:
            server.send_signal(signal.SIGTERM)


def _await_health(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _LOADING_S
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise SystemExit("the server did not come up")


def _write_tokenizer(folder: Path, address: str) -> None:
    """As `transformers` reads it. Programs that make up prompts count their tokens with it."""
    with Client(address) as client:
        files = client.tokenizer.files
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(files.tokenizer_json)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": files.chat_template,
        "bos_token": files.bos_token,
        "eos_token": files.eos_token,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
