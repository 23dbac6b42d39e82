"""A verifier's session as the proposing side has it.

Its tokens are the history that the verifier has told, and behind it what was guessed. A guess that turns out
right becomes history by itself; from the first wrong one on everything is forgotten. So a proposer sees its
own guesses as history, and is rolled back when they were wrong.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kakeya.engine.proposer import DraftState
from kakeya.errors import InvalidArgument
from kakeya.types import SamplingParams
from kakeya.wire import distributed_pb2 as pb


@dataclass(frozen=True)
class GuessedTurn:
    """How the verifier chooses the tokens of the generate that runs."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    prompt_length: int = 0
    prediction: Sequence[int] = ()

    @classmethod
    def of(cls, turn: pb.Turn) -> "GuessedTurn":
        """Raises InvalidArgument for a value that is none."""
        sampling = SamplingParams(
            temperature=turn.temperature,
            top_k=turn.top_k,
            top_p=turn.top_p,
            min_p=turn.min_p,
            repetition_penalty=turn.repetition_penalty,
            presence_penalty=turn.presence_penalty,
            frequency_penalty=turn.frequency_penalty,
            logit_bias=dict(turn.logit_bias),
            seed=turn.seed,
        )
        return cls(sampling, turn.prompt_length, list(turn.prediction))


class GuessedSession:
    """One session of a verifier: `tokens` are its history, up to `told`, and the guesses behind it.

    `chains` says which proposers guess on from their own guesses.
    """

    def __init__(
        self, session_id: int, send: Callable[[pb.ProposeResponse], None], chains: Sequence[bool]
    ) -> None:
        self.session_id, self.send, self._chains = session_id, send, chains
        self.tokens = array("i")
        self.told = 0
        self.epoch = 0
        self.wanted = 0
        self.turn = GuessedTurn()
        self.states: list[DraftState] | None = None
        self.tries = 0  # in vain, since the history last changed
        self.used = 0.0
        self.seen: dict[int, dict[int, Tensor]] = {}  # hidden states by their start, then by layer

    @property
    def ahead(self) -> int:
        return len(self.tokens) - self.told

    def commit(self, start: int, token_ids: Sequence[int]) -> int:
        """The history goes on. Returns how many guesses were wrong."""
        if start > self.told:
            raise InvalidArgument(
                f"session {self.session_id}: a commit starts at {start}, its history has {self.told} tokens"
            )
        discarded = self.rollback(start) if start < self.told else 0
        agreed = 0
        for guess, token in zip(self.tokens[self.told :], token_ids, strict=False):
            if guess != token:
                break
            agreed += 1
        if agreed < len(token_ids):
            discarded += self._cut(self.told + agreed)
            self.tokens.extend(token_ids[agreed:])
        self.told += len(token_ids)
        self.tries = 0
        return discarded

    def rollback(self, length: int) -> int:
        """The history ends at `length`. Returns how many guesses are forgotten with it."""
        forgotten = self.ahead
        del self.tokens[min(length, self.told) :]
        for state in self.states or ():
            state.rollback(length)
        self.told, self.tries, self.seen = len(self.tokens), 0, {}
        return forgotten

    def _cut(self, length: int) -> int:
        """Forget the guesses from `length` on. Returns how many.

        Proposers that were shown hidden states never saw guesses as history.
        """
        count = len(self.tokens) - length
        if count:
            del self.tokens[length:]
            for state, chains in zip(self.states or (), self._chains, strict=False):
                if chains:
                    state.rollback(length)
        return count

    def give_back(self) -> None:
        """Free what the proposers hold of it. They make it anew from the tokens."""
        states, self.states = self.states, None
        for state in states or ():
            state.close()
