"""Keeps the tokenizers of GGUF files on disk: building one for a large vocabulary takes seconds."""

import hashlib
import json
import logging
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kakeya.models import gguf_tokenizer, store
from kakeya.types import TokenizerFiles

log = logging.getLogger(__name__)

_SIZE = "tokenizer_bytes"


def kept_tokenizer_files(metadata_digest: str, metadata: Mapping[str, Any]) -> TokenizerFiles:
    """What `gguf_tokenizer.tokenizer_files` builds from the metadata with this digest, or has built before.

    Raises what it raises. A cache that cannot be used costs time and nothing else.
    """
    path = _place(metadata_digest)
    try:
        return _read(path)
    except (OSError, ValueError, TypeError, LookupError, AttributeError):  # not there, or not whole
        files = gguf_tokenizer.tokenizer_files(metadata)
    try:
        _keep(path, files)
    except OSError as error:
        log.info("the tokenizer cannot be kept as %s: %s", path, error.strerror or error)
    return files


def _place(metadata_digest: str) -> Path:
    # The code is part of the name, because other code may build another tokenizer.
    code = Path(gguf_tokenizer.__file__).read_bytes()
    name = hashlib.sha256(metadata_digest.encode() + code).hexdigest()
    return store.cache_dir() / "tokenizers" / f"{name}.tokenizer"


def _read(path: Path) -> TokenizerFiles:
    """A line of JSON with everything but the tokenizer itself, and then that."""
    line, tokenizer_json = path.read_bytes().split(b"\n", 1)
    rest = json.loads(line)
    if rest.pop(_SIZE) != len(tokenizer_json):
        raise ValueError("the tokenizer was cut short")
    return TokenizerFiles(tokenizer_json, **rest)


def _keep(path: Path, files: TokenizerFiles) -> None:
    rest = asdict(files)
    tokenizer_json = rest.pop("tokenizer_json")
    rest[_SIZE] = len(tokenizer_json)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as temporary:
        temporary.write(json.dumps(rest).encode() + b"\n" + tokenizer_json)
    Path(temporary.name).replace(path)
