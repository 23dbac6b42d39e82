"""The ordinary text that benchmarks read. Its source and licence are in data/README.md."""

from collections.abc import Sequence
from importlib.resources import files
from itertools import cycle, islice


def prose() -> str:
    """Some 13,000 characters of English prose."""
    return files("kakeya.bench").joinpath("data", "galapagos.txt").read_text(encoding="utf-8")


def stretch(token_ids: Sequence[int], start: int, count: int) -> list[int]:
    """`count` tokens of the text from place `start`, beginning again when it ends."""
    return list(islice(cycle(token_ids), start % len(token_ids), start % len(token_ids) + count))
