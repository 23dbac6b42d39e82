import json

import pytest

from kakeya.bridge.output import LONGEST_LINE, LONGEST_WORK, TAIL_BYTES, Output


def line(**told: object) -> bytes:
    return json.dumps(told).encode() + b"\n"


def test_progress_is_taken_out_of_the_lines() -> None:
    output = Output()
    told = b"warming\n" + line(progress=0.25, work="16 agents") + b"hot\xff"
    assert [output.feed(told[at : at + 1]) for at in range(len(told))].count(True) == 1
    assert (output.progress, output.work, output.total) == (0.25, "16 agents", len(told))
    assert output.tail() == "warming\nhot�"
    assert not output.feed(b"\n")


@pytest.mark.parametrize(
    "said",
    [
        b'{"progress": NaN, "work": "x"}\n',
        b'{"progress": Infinity, "work": "x"}\n',
        b'{"progress": "much", "work": "x"}\n',
        b'{"progress": null, "work": "x"}\n',
        b'{"progress": 0.5}\n',
        b'{"progress": \n',
        b'{"progress": ' + b"[" * 4000 + b"\n",
        b'{"progress": 0.5, "work": "' + b"x" * LONGEST_LINE + b'"}\n',
    ],
)
def test_what_is_no_progress_is_an_ordinary_line(said: bytes) -> None:
    output = Output()
    assert not output.feed(said)
    assert output.progress == 0.0
    assert output.tail().startswith('{"progress"')


def test_progress_is_bounded() -> None:
    output = Output()
    output.feed(line(progress=7, work="w" * 2000))
    assert (output.progress, output.work) == (1.0, "w" * LONGEST_WORK)
    output.feed(line(progress=-1, work=""))
    assert output.progress == 0.0


@pytest.mark.parametrize("piece", [b"y\n" * 5000, b"no end of the line", b"\xf0" * 70_000])
def test_endless_output_stays_small(piece: bytes) -> None:
    output = Output()
    for _ in range(50):
        output.feed(piece)
    output.feed(b"\nthe last line\n")
    assert output.total > 500
    assert len(output.tail()) <= TAIL_BYTES + LONGEST_LINE
    assert output.tail().endswith("the last line")


def test_last_words_are_ours_if_there_are_any() -> None:
    output = Output()
    assert output.last_words() == "it said nothing"
    output.feed(b"kakeya: no CUDA device\nsomething of a library\n\n")
    assert output.last_words() == "kakeya: no CUDA device"
