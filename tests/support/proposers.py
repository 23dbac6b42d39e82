"""Proposers that guess with a plain function and remember nothing."""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from kakeya.engine.proposer import DraftRequest


class NothingKept:
    """A draft state with nothing in it."""

    def fork(self) -> "NothingKept":
        return self

    def rollback(self, length: int) -> None:
        pass

    def export(self) -> Mapping[str, Tensor]:
        return {}


class FunctionProposer:
    """Guesses what `guess(tokens so far)` says, up to three tokens."""

    max_draft = 3
    hidden_layers = ()

    def __init__(self, guess: Callable[[Sequence[int]], Sequence[int]]) -> None:
        self.guess = guess

    def new_state(self) -> NothingKept:
        return NothingKept()

    def restore(self, tensors: Mapping[str, Tensor]) -> NothingKept:
        return NothingKept()

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[int]]:
        return [list(self.guess(request.tokens))[: request.limit] for request in requests]

    def observe(self, state: NothingKept, start: int, hidden: Mapping[int, Tensor]) -> None:
        pass
