"""Constraints over the tokens of the tiny model, and the masks that they are told by."""

from collections.abc import Sequence

from support import tiny

EOS = 1


def mask_of(token_ids: Sequence[int]) -> bytes:
    return sum(1 << token_id for token_id in set(token_ids)).to_bytes(tiny.VOCAB // 8 + 1, "little")


class Stairs:
    """Token i + 1 must differ by at most 9 from token i, going round; `length` tokens, then EOS."""

    def __init__(self, length: int = 10**9, eos: int = EOS) -> None:
        self.length = length
        self.eos = eos
        self.told: list[int] = []
        self.asked: list[tuple[int, ...]] = []

    def allowed_after(self, tokens: Sequence[int]) -> list[int]:
        if len(tokens) >= self.length:
            return [self.eos]
        last = tokens[-1] if tokens else 30
        steps = [(last + step) % tiny.VOCAB for step in range(-9, 10)]
        return [token for token in steps if token != self.eos]

    def masks(self, draft: Sequence[int]) -> list[bytes]:
        self.asked.append(tuple(draft))
        return [mask_of(self.allowed_after([*self.told, *draft[:row]])) for row in range(len(draft) + 1)]

    def advance(self, token_ids: Sequence[int]) -> None:
        self.told += token_ids

    @property
    def is_complete(self) -> bool:
        return len(self.told) >= self.length

    def obeyed_by(self, tokens: Sequence[int]) -> bool:
        return all(token in self.allowed_after(tokens[:index]) for index, token in enumerate(tokens))
