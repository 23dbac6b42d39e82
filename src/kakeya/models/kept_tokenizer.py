"""Tokenizers of GGUF files, kept as they were written out: with large vocabularies that takes seconds."""

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


def kept_tokenizer_files(metadata_digest: str, metadata: Mapping[str, Any]) -> TokenizerFiles:
    """What `gguf_tokenizer.tokenizer_files` makes of the metadata with this digest, or made before.

    Raises what it raises. A cache that cannot be used costs time and nothing else.
    """
    path = _place(metadata_digest)
    try:
        return TokenizerFiles(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # not there, or not whole
        made = gguf_tokenizer.tokenizer_files(metadata)
    try:
        _keep(path, made)
    except OSError as error:
        log.info("the tokenizer cannot be kept as %s: %s", path, error.strerror or error)
    return made


def _place(metadata_digest: str) -> Path:
    # The code that made it is part of the name: another one may write another tokenizer.
    code = Path(gguf_tokenizer.__file__).read_bytes()
    name = hashlib.sha256(metadata_digest.encode() + code).hexdigest()
    return store.cache_dir() / "tokenizers" / f"{name}.json"


def _keep(path: Path, files: TokenizerFiles) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as temporary:
        json.dump(asdict(files), temporary)
    Path(temporary.name).replace(path)
