"""Conversations that a verifier wrote with itself, and the one file that holds them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kakeya.errors import ConfigError, CorruptCheckpoint
from kakeya.models.stable_safetensors import save_stable
from kakeya.training.settings import DataSettings

FORMAT = "kakeya-conversations"
VERSION = "1"

_TEMPERATURES = (0.0, 0.7, 0.0, 1.0, 0.0, 0.7, 0.0, 0.7, 0.0, 1.0)
# One conversation in so many begins as the model likes.
_UNOPENED = 4
# A loop is a tail of at least this many tokens that repeats itself every few tokens.
_LOOP_TOKENS, _LOOP_PERIOD = 48, 32
# Of looping conversations, one in so many is trained to its end.
_WHOLE_LOOPS = 8

_TENSORS = ("tokens", "answers", "lengths", "numbers")


@dataclass(frozen=True, eq=False)
class Conversation:
    """One conversation: its ids, and which of them the verifier wrote as answers."""

    number: int
    """Which of the settings' conversations it is: seed and temperature follow from it."""
    tokens: npt.NDArray[np.int32]
    answers: npt.NDArray[np.bool_]


def temperature_of(number: int) -> float:
    """Half of the answers are greedy, three tenths at 0.7, the others at 1."""
    return _TEMPERATURES[number % len(_TEMPERATURES)]


def opening_of(settings: DataSettings, number: int) -> str:
    """What its first user begins with; nothing in one of four."""
    turn, _ = divmod(number, len(_TEMPERATURES))
    if not settings.openings or turn % _UNOPENED == 0:
        return ""
    return settings.openings[(turn - turn // _UNOPENED - 1) % len(settings.openings)]


def seed_of(settings: DataSettings, number: int) -> int:
    return settings.seed * 2**32 + number


@dataclass(frozen=True)
class Answer:
    """Where an answer lies: the ids from `start` up to `end`."""

    start: int
    end: int


@dataclass(frozen=True)
class Conversations:
    """All conversations of a training, in the order of their numbers. The arrays are on the host.

    `model` is the fingerprint of the checkpoint that wrote them. `ends` are the ids that end an answer.
    """

    settings: DataSettings
    model: str
    ends: frozenset[int]
    items: Sequence[Conversation] = field(repr=False)

    @property
    def token_count(self) -> int:
        return sum(len(each.tokens) for each in self.items)

    def missing(self) -> list[int]:
        """The numbers that are still to be written."""
        written = {each.number for each in self.items}
        return [number for number in range(self.settings.conversations) if number not in written]

    def usable(self) -> "list[Conversation]":
        """Those with an answer to learn from."""
        wanted = range(self.settings.conversations)
        return [each for each in self.items if each.number in wanted and each.answers.sum() > 1]


def answers_in(conversation: Conversation) -> Iterator[Answer]:
    """Each run of ids that the verifier wrote as one answer."""
    marks = np.diff(np.pad(conversation.answers.astype(np.int8), 1))
    starts, ends = np.flatnonzero(marks == 1), np.flatnonzero(marks == -1)
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        yield Answer(start, end)


def frequent_tokens(
    conversations: Sequence[Conversation], count: int, vocab_size: int
) -> npt.NDArray[np.int64]:
    """The ids that answers have most often, ascending; low ids too where fewer than `count` occur."""
    seen = np.zeros(vocab_size, dtype=np.int64)
    for each in conversations:
        seen += np.bincount(each.tokens[each.answers], minlength=vocab_size)
    return np.sort(np.argsort(-seen, kind="stable")[:count])


def trained_length(conversation: Conversation) -> int:
    """How many tokens are trained on: of most loops only the first turns, as they teach little and are
    many."""
    length = len(conversation.tokens)
    if conversation.number % _WHOLE_LOOPS == 0:
        return length
    return min(length, loop_end(conversation.tokens))


def loop_end(tokens: npt.NDArray[np.int32]) -> int:
    """Where a looping tail has repeated itself once; the length if it does not loop."""
    best = len(tokens)
    for period in range(1, min(_LOOP_PERIOD, len(tokens) // 2) + 1):
        differs = np.flatnonzero(tokens[period:] != tokens[:-period])
        begins = int(differs[-1]) + 1 if differs.size else 0  # from here on, every id comes back
        if len(tokens) - period - begins >= max(_LOOP_TOKENS, 2 * period):
            best = min(best, begins + 2 * period)
    return best


def write_conversations(path: Path, conversations: Conversations) -> None:
    """Write them in the order of their numbers: the same conversations are the same bytes."""
    settings, items = conversations.settings, sorted(conversations.items, key=lambda each: each.number)
    tokens = torch.zeros(len(items), settings.tokens, dtype=torch.int32)
    answers = torch.zeros(len(items), settings.tokens, dtype=torch.bool)
    for row, each in enumerate(items):
        tokens[row, : len(each.tokens)] = torch.from_numpy(each.tokens)
        answers[row, : len(each.answers)] = torch.from_numpy(each.answers)
    tensors = {
        "tokens": tokens,
        "answers": answers,
        "lengths": torch.tensor([len(each.tokens) for each in items], dtype=torch.int32),
        "numbers": torch.tensor([each.number for each in items], dtype=torch.int32),
        "temperatures": torch.tensor([temperature_of(each.number) for each in items]),
    }
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "model": conversations.model,
        "ends": json.dumps(sorted(conversations.ends)),
        "tokens": str(settings.tokens),
        "seed": str(settings.seed),
        "openings": json.dumps(settings.openings),
    }
    save_stable(path, tensors, metadata)


def read_conversations(path: Path, settings: DataSettings, model: str, vocab_size: int) -> Conversations:
    """Read what `write_conversations` wrote, for the same model, seed and length.

    Raises CorruptCheckpoint for a file that is damaged or something else, ConfigError for conversations that
    were written otherwise.
    """
    tensors, metadata = _read(path)
    if metadata.get("format") != FORMAT or metadata.get("version") != VERSION:
        raise CorruptCheckpoint(f"{path} is not a {FORMAT} file of version {VERSION}")
    _check_origin(path, metadata, settings, model)
    _check_tensors(path, tensors, settings, vocab_size)
    tokens, answers = tensors["tokens"].numpy(), tensors["answers"].numpy()
    places = enumerate(zip(tensors["numbers"].tolist(), tensors["lengths"].tolist(), strict=True))
    items = [
        Conversation(number, tokens[row, :length], answers[row, :length]) for row, (number, length) in places
    ]
    return Conversations(settings, model, _parse_ends(path, metadata), items)


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise CorruptCheckpoint(f"{path} cannot be read as conversations: {error}") from error


def _parse_ends(path: Path, metadata: Mapping[str, str]) -> frozenset[int]:
    try:
        return frozenset(int(each) for each in json.loads(metadata["ends"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpoint(f"{path}: the ids that end an answer are damaged: {error!r}") from error


def _check_origin(path: Path, metadata: Mapping[str, str], settings: DataSettings, model: str) -> None:
    if metadata.get("model") != model:
        raise ConfigError(f"{path} was written by another model; give --data another file")
    for name in ("tokens", "seed"):
        found, asked = metadata.get(name), str(getattr(settings, name))
        if found != asked:
            raise ConfigError(
                f"{path} was written with {name} {found}, not {asked}; give --data another file"
            )
    if metadata.get("openings") != json.dumps(settings.openings):
        raise ConfigError(f"{path} was written with other openings; give --data another file")


def _check_tensors(
    path: Path, tensors: Mapping[str, Tensor], settings: DataSettings, vocab_size: int
) -> None:
    for name in _TENSORS:
        if name not in tensors:
            raise CorruptCheckpoint(f"{path}: tensor {name} is missing")
    count = len(tensors["numbers"])
    shapes = {"tokens": (count, settings.tokens), "answers": (count, settings.tokens), "lengths": (count,)}
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            found = tuple(tensors[name].shape)
            raise CorruptCheckpoint(f"{path}: tensor {name} must have shape {shape}, it is {found}")
    for name, least, most in (("tokens", 0, vocab_size - 1), ("lengths", 0, settings.tokens)):
        if count and not least <= int(tensors[name].min()) <= int(tensors[name].max()) <= most:
            raise CorruptCheckpoint(f"{path}: {name} must be from {least} to {most}")
