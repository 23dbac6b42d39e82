"""Conversations gathered: what a file lacks is written, by one process or several, and nothing is lost."""

from dataclasses import replace
from pathlib import Path

import pytest

from kakeya.errors import ConfigError, ResourceExhausted
from kakeya.loading import LoadedModel
from kakeya.training import gathering
from kakeya.training.conversations import Conversations, write_conversations
from kakeya.training.gathering import Tell, WritingJob, gather
from support.trainings import DATA, config_of


class Interrupted(Exception):
    pass


def quiet(stage: str, share: float, words: str) -> None:
    assert stage == "writing"
    assert 0 <= share <= 1


def interrupt_at(least: float) -> Tell:
    def tell(stage: str, share: float, words: str) -> None:
        if share >= least:
            raise Interrupted

    return tell


@pytest.fixture
def job(chat_model: Path, model: LoadedModel, tmp_path: Path) -> WritingJob:
    return WritingJob(str(chat_model), config_of(), model.fingerprint, DATA, tmp_path / "data", writers=1)


@pytest.fixture
def at_once(conversations: Conversations, tmp_path: Path) -> bytes:
    """The file of those that were written without a break."""
    write_conversations(tmp_path / "at once", conversations)
    return (tmp_path / "at once").read_bytes()


def test_writing_goes_on_where_it_stopped(
    job: WritingJob, model: LoadedModel, at_once: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "_SAVE_S", 0.0)
    with pytest.raises(Interrupted):
        gather(job, model, interrupt_at(0.5))
    partial = job.file.read_bytes()
    assert len(partial) < len(at_once)
    whole = gather(job, model, quiet)
    assert job.file.read_bytes() == at_once
    assert [each.number for each in whole.items] == list(range(DATA.conversations))


def test_what_is_there_is_not_written_again(
    job: WritingJob, model: LoadedModel, conversations: Conversations, at_once: bytes
) -> None:
    write_conversations(job.file, conversations)
    gather(job, model, interrupt_at(0.0))
    assert job.file.read_bytes() == at_once


def test_several_processes_write_what_one_would(job: WritingJob, model: LoadedModel, at_once: bytes) -> None:
    job = replace(job, writers=2)
    with pytest.raises(Interrupted):
        gather(job, model, interrupt_at(0.25))
    assert not job.parts, "what was written is in the data file"
    gather(job, model, quiet)
    assert job.file.read_bytes() == at_once
    assert not job.parts


def test_what_killed_writers_left_is_taken_up(
    job: WritingJob, model: LoadedModel, conversations: Conversations, at_once: bytes
) -> None:
    write_conversations(job.file, replace(conversations, items=conversations.items[:4]))
    for part in range(2):
        left = conversations.items[4 + part :: 2]
        write_conversations(job.part(part), replace(conversations, items=left))
    gather(job, model, interrupt_at(0.0))
    assert job.file.read_bytes() == at_once
    assert not job.parts


def test_names_with_odd_characters_and_half_written_files(
    job: WritingJob, model: LoadedModel, conversations: Conversations, at_once: bytes, tmp_path: Path
) -> None:
    """A writer that was killed while it saved leaves half a file beside its part, which nobody reads."""
    job = replace(job, file=tmp_path / "data[1]*")
    write_conversations(job.part(3), conversations)
    Path(f"{job.part(3)}.77.partial").write_bytes(b"half")
    gather(job, model, interrupt_at(0.0))
    assert job.file.read_bytes() == at_once


def test_parts_of_another_run_are_refused_and_stay(
    job: WritingJob, model: LoadedModel, conversations: Conversations
) -> None:
    write_conversations(job.part(0), replace(conversations, settings=replace(DATA, seed=8)))
    with pytest.raises(ConfigError, match="data.part0 was written with seed 8, not 3"):
        gather(job, model, quiet)
    assert job.parts == [job.part(0)]


def test_a_writer_that_fails_is_told_and_what_there_is_stays(
    job: WritingJob, model: LoadedModel, conversations: Conversations, tmp_path: Path
) -> None:
    write_conversations(job.file, replace(conversations, items=conversations.items[:4]))
    before = job.file.read_bytes()
    with pytest.raises(ResourceExhausted, match=r"writer [12] of 2 ended with status 1: its error is above"):
        gather(replace(job, model=str(tmp_path / "nowhere"), writers=2), model, quiet)
    assert job.file.read_bytes() == before
