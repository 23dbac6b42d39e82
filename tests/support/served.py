"""A real `kakeya serve` process over a tiny random model that has a tokenizer and a chat template."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import tokenizers

from support.tiny import write_llama
from support.vocabularies import byte_level_files

KEY, OTHER_KEY = "first-key", "second-key"
CAPACITY = 6


def write_chat_model(directory: Path, vocab_size: int | None = None) -> Path:
    """A random Llama over the byte-level test vocabulary; its EOS is what closes a turn in the template.

    Its own vocabulary may be padded to `vocab_size`.
    """
    files = byte_level_files()
    size = vocab_size or tokenizers.Tokenizer.from_buffer(files.tokenizer_json).get_vocab_size()
    write_llama(directory, vocab_size=size, eos_token_id=0)
    (directory / "tokenizer.json").write_bytes(files.tokenizer_json)
    settings = {"chat_template": files.chat_template, "eos_token": files.eos_token}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serve(model: Path, *flags: str) -> Iterator[str]:
    """The server's address, once it serves and while it does."""
    address = f"127.0.0.1:{free_port()}"
    program = "from kakeya.cli import main; main()"
    command: Sequence[str] = [sys.executable, "-c", program, "serve"]
    listen = ("--bind", address, "--http", "off")
    process = subprocess.Popen(
        [*command, "--model", str(model), *listen, "--log-level", "warning", *flags],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        banner = process.stderr.readline()
        assert f"on {address}" in banner, banner + process.stderr.read()
        yield address
    finally:
        process.terminate()
        said = process.communicate(timeout=20)[1]
        assert process.returncode == 0, said
