"""Gathers the conversations of a training: those of the data file, and those that it lacks.

One process writes them with the verifier that is loaded already. Or several do, each with a verifier of its
own, because it is Python that holds a device up: each writes every n-th of them into a file of its own beside
the data file. However it ends, what they wrote is joined.
"""

import multiprocessing
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path

from kakeya.config import EngineConfig
from kakeya.errors import ResourceExhausted
from kakeya.loading import LoadedModel, load_model
from kakeya.models.catalogue import resolve
from kakeya.models.checkpoint import open_checkpoint
from kakeya.runtime import Runtime
from kakeya.training.conversations import (
    Conversation,
    Conversations,
    read_conversations,
    write_conversations,
)
from kakeya.training.settings import DataSettings
from kakeya.training.template import TemplatePieces, template_pieces
from kakeya.training.writing import ConversationWriter

_SAVE_S = 60.0
_LOOK_S = 1.0  # how often the writers are looked at

# tell(stage, share done from 0 to 1, what there is to say)
Tell = Callable[[str, float, str], None]


@dataclass(frozen=True)
class WritingJob:
    """What is written, with which verifier, and by how many processes."""

    model: str
    config: EngineConfig
    fingerprint: str
    data: DataSettings
    file: Path
    writers: int

    @property
    def parts(self) -> list[Path]:
        """The files of writers that are there: of a run that was killed before it joined them."""
        name = re.compile(re.escape(self.file.name) + r"\.part\d+")
        return sorted(each for each in self.file.absolute().parent.iterdir() if name.fullmatch(each.name))

    def part(self, writer: int) -> Path:
        return self.file.with_name(f"{self.file.name}.part{writer}")


def gather(job: WritingJob, model: LoadedModel, tell: Tell) -> Conversations:
    """Those of the data file, and those that it lacks, which are then in it."""
    pieces = template_pieces(model.tokenizer, model.model_config.eos_token_ids)
    book = _Book(job.file, Conversations(job.data, job.fingerprint, pieces.ends, ()))
    vocabulary = model.model_config.vocab_size
    if job.file.exists():
        book.join(job.file, vocabulary)
    _join_parts(job, book, vocabulary)
    missing = book.whole.missing()
    if missing and job.writers == 1:
        _write_here(model, pieces, job.data, missing, book, _Progress(book, tell))
    elif missing:
        _write_beside(job, missing, book, vocabulary, tell)
    return book.whole


class _Book:
    """Conversations on their way into a file, which is written now and then."""

    def __init__(self, file: Path, begun: Conversations) -> None:
        self._file, self._begun = file, begun
        self._items: dict[int, Conversation] = {}
        self._saved = time.monotonic()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def whole(self) -> Conversations:
        items = sorted(self._items.values(), key=lambda each: each.number)
        return replace(self._begun, items=items)

    @property
    def wanted(self) -> int:
        return self._begun.settings.conversations

    def join(self, path: Path, vocabulary: int) -> None:
        """Take what another file has. Raises CorruptCheckpoint, ConfigError."""
        found = read_conversations(path, self._begun.settings, self._begun.model, vocabulary)
        self._items |= {each.number: each for each in found.items}

    def add(self, conversation: Conversation) -> None:
        self._items[conversation.number] = conversation
        if time.monotonic() - self._saved > _SAVE_S:
            self.save()

    def save(self) -> None:
        write_conversations(self._file, self.whole)
        self._saved = time.monotonic()


class _Progress:
    """Tells how far the writing is, and how fast it goes."""

    def __init__(self, book: _Book, tell: Tell) -> None:
        self._book, self._tell = book, tell
        self._began, self._tokens = time.monotonic(), 0

    def __call__(self, conversation: Conversation) -> bool:
        """One more is in the book; whether to go on."""
        self._tokens += len(conversation.tokens)
        self.show(len(self._book), self._tokens)
        return True

    def show(self, count: int, tokens: int) -> None:
        speed = tokens / max(time.monotonic() - self._began, 1e-9)
        self._tell("writing", count / self._book.wanted, f"{speed:,.0f} tokens/s")


def _write_here(
    model: LoadedModel,
    pieces: TemplatePieces,
    data: DataSettings,
    numbers: Sequence[int],
    book: _Book,
    goes_on: Callable[[Conversation], bool],
) -> None:
    """Write them with this process's verifier. The book is saved however it ends."""
    with Runtime(model).start() as runtime:
        try:
            with closing(ConversationWriter(runtime, pieces, data).write(numbers)) as conversations:
                for conversation in conversations:
                    book.add(conversation)
                    if not goes_on(conversation):
                        return
        finally:
            book.save()


# Several writers.


class _Tally:
    """What each writer has written, and whether all are to stop: shared by their processes.

    Without locks, because a writer that is killed while it holds one would hold up all others.
    """

    def __init__(self, processes: SpawnContext, writers: int) -> None:
        self._conversations = processes.RawArray("q", writers)
        self._tokens = processes.RawArray("q", writers)
        self._stop = processes.RawValue("b", 0)

    def count(self, writer: int, conversation: Conversation) -> bool:
        """One more of this writer's; whether it is to go on."""
        self._conversations[writer] += 1
        self._tokens[writer] += len(conversation.tokens)
        parent = multiprocessing.parent_process()
        return not self._stop.value and parent is not None and parent.is_alive()

    def stop(self) -> None:
        self._stop.value = 1

    @property
    def counts(self) -> tuple[int, int]:
        """Conversations and their tokens."""
        return sum(self._conversations), sum(self._tokens)


def _write_beside(job: WritingJob, missing: Sequence[int], book: _Book, vocabulary: int, tell: Tell) -> None:
    """Let processes write them. Raises ResourceExhausted when one of them fails."""
    processes = multiprocessing.get_context("spawn")
    tally, progress, before = _Tally(processes, job.writers), _Progress(book, tell), len(book)
    shares = [missing[writer :: job.writers] for writer in range(job.writers)]
    writers = [
        processes.Process(target=_write_share, args=(job, share, writer, tally), daemon=True)
        for writer, share in enumerate(shares)
        if share
    ]
    try:
        for writer in writers:
            writer.start()
        while any(writer.is_alive() for writer in writers):
            wait([writer.sentinel for writer in writers if writer.is_alive()], _LOOK_S)
            count, tokens = tally.counts
            progress.show(before + count, tokens)
            _check(writers, job)
    finally:
        tally.stop()
        for writer in writers:
            if writer.pid is not None:
                writer.join()
        _join_parts(job, book, vocabulary)
    _check(writers, job)
    if lost := book.whole.missing():
        raise ResourceExhausted(
            f"{len(lost)} conversations that were written are gone: another training used {job.file} as well"
        )


def _check(writers: Sequence[SpawnProcess], job: WritingJob) -> None:
    for number, writer in enumerate(writers, 1):
        if writer.exitcode:
            memory = "each has a model and sessions of its own, so fewer --writers need less memory"
            why = f"it was killed; {memory}" if writer.exitcode < 0 else "its error is above"
            raise ResourceExhausted(
                f"writer {number} of {len(writers)} ended with status {writer.exitcode}: {why}. The "
                f"conversations so far are kept in {job.file}"
            )


def _write_share(job: WritingJob, numbers: Sequence[int], writer: int, tally: _Tally) -> None:
    """What a writer's process does. An interrupt is its parent's matter, which then says stop. However it is
    asked to end, it saves what it has."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    checkpoint = open_checkpoint(resolve(job.model, config=job.config))
    model = load_model(checkpoint, job.config, job.model)
    pieces = template_pieces(model.tokenizer, model.model_config.eos_token_ids)
    book = _Book(job.part(writer), Conversations(job.data, job.fingerprint, pieces.ends, ()))
    _write_here(model, pieces, job.data, numbers, book, partial(tally.count, writer))


def _join_parts(job: WritingJob, book: _Book, vocabulary: int) -> None:
    """Take what writers left into the data file, and their files away."""
    parts = job.parts
    for part in parts:
        book.join(part, vocabulary)
    if parts:
        book.save()
    for part in parts:
        part.unlink()
