"""Recall through the runtime's door: what left the window is found by its words and seen again."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kakeya.errors import InvalidArgument
from kakeya.runtime import Runtime
from kakeya.types import DoneEvent, Numerics, TokenRange
from support.serving import ENGINE, write_model
from support.tiny import answer

CACHE = replace(ENGINE.cache, window=60, recall=80)


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    model = write_model(tmp_path_factory.mktemp("model"))
    config = replace(ENGINE, cache=CACHE, numerics=Numerics.EXACT)
    with Runtime.open(str(model), config) as runtime:
        yield runtime


FACT, FILLER = " quick brown fox", " hello world"


def talked(runtime: Runtime, **options: object) -> str:
    """A fact, and so much after it that it has left the window."""
    session_id = runtime.create_session(eos_token_ids=(), **options)
    runtime.append(session_id, runtime.tokenizer.encode(FILLER * 20 + "." + FACT + "." + FILLER * 300))
    answer(runtime, session_id, 2)
    return session_id


def ask(runtime: Runtime, session_id: str) -> DoneEvent:
    runtime.append(session_id, runtime.tokenizer.encode(FACT))
    done = answer(runtime, session_id, 4)[-1]
    assert isinstance(done, DoneEvent)
    return done


def text_of(runtime: Runtime, done: DoneEvent, ids: list[int]) -> str:
    return "".join(runtime.tokenizer.decode(ids[each.start : each.end]) for each in done.recalled)


def test_a_question_brings_back_what_it_is_about(runtime: Runtime) -> None:
    ids = runtime.tokenizer.encode(FILLER * 20 + "." + FACT + "." + FILLER * 300)
    done = ask(runtime, talked(runtime, recall_tokens=80))
    assert FACT.strip() in text_of(runtime, done, ids)
    assert done.recalled_tokens <= 80


def test_a_session_without_recall_forgets(runtime: Runtime) -> None:
    session_id = talked(runtime)
    assert ask(runtime, session_id).recalled == ()
    assert runtime.info(session_id).window == CACHE.window + CACHE.recall
    with pytest.raises(InvalidArgument, match="no slots for recall"):
        runtime.recall(session_id, [TokenRange(0, 1)])


def test_the_same_alone_forked_and_imported(runtime: Runtime, tmp_path: Path) -> None:
    original = talked(runtime, recall_tokens=80)
    copy, _ = runtime.fork(original)
    runtime.export_session(original, tmp_path / "state")
    imported, _ = runtime.import_session(tmp_path / "state")
    done = [ask(runtime, each) for each in (original, copy, imported)]
    assert done[0].recalled == done[1].recalled == done[2].recalled != ()
    prompt = runtime.tokenizer.encode(FILLER)
    for each in (original, copy, imported):
        runtime.append(each, prompt)
    said = [answer(runtime, each, 8)[:-1] for each in (original, copy, imported)]
    assert said[0] == said[1] == said[2]
    assert runtime.info(imported).recall_tokens == 80


def test_info_says_what_is_recalled_and_remembered(runtime: Runtime) -> None:
    session_id = talked(runtime, recall_tokens=80, pinned_prefix_tokens=7)
    assert runtime.recall(session_id, [TokenRange(30, 34)], remember=True) == (TokenRange(30, 34),)
    done = ask(runtime, session_id)
    info = runtime.info(session_id)
    assert any(each.start <= 30 and each.end >= 34 for each in info.recalled)
    assert (info.recalled, info.remembered) == (done.recalled, (TokenRange(30, 34),))
    assert (info.sink, info.window, info.recall_tokens) == (7, CACHE.capacity - 87, 80)
    assert info.recall_duration_seconds == done.recall_duration_seconds > 0


@pytest.fixture(autouse=True)
def _closed(runtime: Runtime) -> Iterator[None]:
    yield
    for info in runtime.list_sessions()[0]:
        runtime.close_session(info.session_id)
