"""The look-up proposer: what followed the last tokens when they came before.

It finds them in the session's whole history of ids, also in what has left the window, and first of all in the
answer that the caller predicts.
"""

from array import array
from collections.abc import Mapping, Sequence

from torch import Tensor

from kakeya.engine.proposer import DraftRequest

_KEY = 3  # tokens that are looked up
_CANDIDATES = 8  # earlier places that are compared
_LONGEST = 16  # tokens of agreement that are told apart
_NOWHERE = -1
_FIRST_SLOTS = 64


class TokenIndex:
    """A growing list of tokens that finds where given ones came before.

    Places where the same tokens end are chained from the newest back to the oldest; `_heads` has the newest
    of each chain, by a hash of the tokens. All in all that is 12 to 16 bytes a token.
    """

    def __init__(self) -> None:
        self._tokens = array("i")
        self._before = array("i")
        self._heads = array("i", [_NOWHERE]) * _FIRST_SLOTS

    def __len__(self) -> int:
        return len(self._tokens)

    def copy(self) -> "TokenIndex":
        twin = TokenIndex()
        twin._tokens, twin._before, twin._heads = self._tokens[:], self._before[:], self._heads[:]
        return twin

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in more tokens."""
        first = len(self)
        self._tokens.extend(tokens)
        if len(self) > len(self._heads):
            self._heads = array("i", [_NOWHERE]) * (1 << len(self).bit_length())
            del self._before[:]
            first = 0
        for place in range(first, len(self)):
            self._chain(place)

    def rollback(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        for place in range(len(self) - 1, length - 1, -1):
            if place >= _KEY - 1:
                self._heads[self._slot(self._tokens, place)] = self._before[place]
        del self._before[length:]
        del self._tokens[length:]

    def after(self, history: Sequence[int], count: int) -> Sequence[int]:
        """Up to `count` tokens that followed the last ones of `history` where they came before: where most of
        them agree, and at the newest such place."""
        best, most = _NOWHERE, _KEY - 1
        place = self._heads[self._slot(history, len(history) - 1)] if len(history) >= _KEY else _NOWHERE
        for _ in range(_CANDIDATES):
            if place == _NOWHERE:
                break
            agreed = self._agreement(place, history) if place + 1 < len(self) else 0
            if agreed > most:
                best, most = place, agreed
            place = self._before[place]
        return () if best == _NOWHERE else self._tokens[best + 1 : best + 1 + count]

    def _chain(self, place: int) -> None:
        if place < _KEY - 1:
            self._before.append(_NOWHERE)
            return
        slot = self._slot(self._tokens, place)
        self._before.append(self._heads[slot])
        self._heads[slot] = place

    def _slot(self, tokens: Sequence[int], place: int) -> int:
        first, second, third = tokens[place - 2], tokens[place - 1], tokens[place]
        mixed = ((first * 0x9E3779B1 + second) * 0x85EBCA6B + third) * 0xC2B2AE35
        return (mixed >> 16) & (len(self._heads) - 1)

    def _agreement(self, place: int, history: Sequence[int]) -> int:
        """How many tokens up to `place` are the last ones of `history`."""
        most, end = min(_LONGEST, place + 1, len(history)), len(history) - 1
        for back in range(most):
            if self._tokens[place - back] != history[end - back]:
                return back
        return most


class LookUpState:
    """The indexes of one session: of its history, and of the answer that is predicted now."""

    def __init__(self) -> None:
        self._history = TokenIndex()
        self._prediction: Sequence[int] = ()
        self._predicted = TokenIndex()

    def guess(self, request: DraftRequest) -> Sequence[int]:
        """At most as many tokens as the request wants."""
        known = len(self._history)
        self._history.extend(request.tokens[known:])
        predicted = self._from_prediction(request) if request.prediction else ()
        return predicted or _going_round(self._history.after(request.tokens, request.limit), request.limit)

    def _from_prediction(self, request: DraftRequest) -> Sequence[int]:
        if request.prediction is not self._prediction:
            self._prediction, self._predicted = request.prediction, TokenIndex()
            self._predicted.extend(request.prediction)
        answer = list(request.tokens[request.prompt_length :][:_KEY])
        if len(answer) < _KEY and answer == list(request.prediction[: len(answer)]):  # too short to look up
            return request.prediction[len(answer) : len(answer) + request.limit]
        return self._predicted.after(request.tokens[-_LONGEST:], request.limit)

    def fork(self) -> "LookUpState":
        twin = LookUpState()
        twin._history = self._history.copy()
        return twin

    def rollback(self, length: int) -> None:
        self._history.rollback(min(length, len(self._history)))

    def export(self) -> Mapping[str, Tensor]:
        return {}  # the tokens travel with the session

    def close(self) -> None:
        """It holds nothing but memory."""


class LookUp:
    """Guesses by looking up. Each session has an index of its own."""

    name = "ngram"
    is_free = True
    hidden_layers = ()

    def __init__(self, max_draft: int) -> None:
        self.max_draft = max_draft

    def new_state(self) -> LookUpState:
        return LookUpState()

    def restore(self, tensors: Mapping[str, Tensor]) -> LookUpState:
        return LookUpState()

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[int]]:
        return [_state(request).guess(request) for request in requests]

    def observe(self, state: object, start: int, hidden: Mapping[int, Tensor]) -> None:
        """It looks at no hidden states."""


def _going_round(follow: Sequence[int], count: int) -> Sequence[int]:
    """What leads to the end of the history repeats itself from there on."""
    return [follow[place % len(follow)] for place in range(count)] if follow else follow


def _state(request: DraftRequest) -> LookUpState:
    assert isinstance(request.state, LookUpState)
    return request.state
