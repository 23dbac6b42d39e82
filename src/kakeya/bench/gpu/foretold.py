"""A proposer of a chosen acceptance: it knows what plain decoding says, and errs at a set rate.

What it gains at each rate is what any proposer as good as that can gain, if it costs nothing. Weights are
random: what a step costs does not depend on them. But each token has one successor that is far likelier than
all others, or else a longer step, which rounds otherwise, would choose another one.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kakeya.bench.acceptance_curve import AS_IT_PAYS, BLOCKS, PLAIN, Gain
from kakeya.bench.gpu.runtime import Tally, generate_all, sessions
from kakeya.bench.gpu.shapes import SHAPES, RandomCheckpoint
from kakeya.bench.stats import Samples
from kakeya.config import NO_PROPOSER, EngineConfig
from kakeya.engine.backends import chosen_backend
from kakeya.engine.proposer import DraftRequest, Proposer
from kakeya.runtime import Runtime
from kakeya.types import BackendChoice, ShareBeginnings, TokenEvent

_PROMPT_TOKENS = 32
_KEY = 8  # first tokens that tell prompts apart


# How much larger than other weights embeddings are: so the last token outweighs what the layers make of it.
_EMBEDDING = 500.0
_EMBEDDINGS, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class SureCheckpoint(RandomCheckpoint):
    """Random weights that say the vocabulary's next token after each, or the same one if the head is tied."""

    def tensor(self, name: str, order: Tensor | None = None) -> Tensor:
        if name == _HEAD:
            return self.tensor(_EMBEDDINGS, order).roll(1, 0)
        return super().tensor(name, order) * (_EMBEDDING if name == _EMBEDDINGS else 1)


class Nothing:
    """It keeps nothing of a session."""

    def fork(self) -> "Nothing":
        return self

    def rollback(self, length: int) -> None:
        """Nothing is known of positions."""

    def export(self) -> Mapping[str, Tensor]:
        return {}

    def close(self) -> None:
        """Nothing is held."""


@dataclass
class Foretold:
    """Guesses from `answers`, by the first tokens of their prompts. Each guess is right with probability
    `acceptance`, the same ones at every call."""

    max_draft: int
    vocab_size: int
    acceptance: float = 1.0
    answers: dict[tuple[int, ...], Sequence[int]] = field(default_factory=dict)

    name = "foretold"
    is_free = True
    hidden_layers = ()

    def learn(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        self.answers[tuple(prompt[:_KEY])] = answer

    def new_state(self) -> Nothing:
        return Nothing()

    def restore(self, tensors: Mapping[str, Tensor]) -> Nothing:
        return Nothing()

    def observe(self, state: object, start: int, hidden: Mapping[int, Tensor]) -> None:
        """It looks at no hidden states."""

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[int]]:
        return [self._guess(request) for request in requests]

    def _guess(self, request: DraftRequest) -> list[int]:
        key, said = tuple(request.tokens[:_KEY]), len(request.tokens) - request.prompt_length
        answer = self.answers.get(key, ())[said : said + request.limit]
        return [self._perhaps(token, key[0], said + place) for place, token in enumerate(answer)]

    def _perhaps(self, token: int, session: int, place: int) -> int:
        is_right = random.Random(session * 2**20 + place).random() < self.acceptance
        return token if is_right else (token + 1) % self.vocab_size


def measured_gains(
    shape_name: str,
    config: EngineConfig,
    counts: Sequence[int],
    acceptances: Sequence[float],
    tokens: int,
    repeats: int,
) -> Iterator[Gain]:
    """A row for each number of sessions and each acceptance. Raises ConfigError for what cannot be opened."""
    shape = SHAPES[shape_name]
    config = replace(config, capacity=max(counts), share_beginnings=ShareBeginnings.OFF, proposer=NO_PROPOSER)
    is_cuda = chosen_backend(config).backend is BackendChoice.CUDA
    checkpoint = SureCheckpoint(shape, torch.device("cuda" if is_cuda else "cpu"))
    foretold = Foretold(config.draft_tokens, shape.model.vocab_size)
    with ExitStack() as stack:

        def opened(*proposers: Proposer, as_it_pays: bool = False) -> Runtime:
            runtime = Runtime.open(
                checkpoint, config, name=shape.name, proposers=proposers, as_it_pays=as_it_pays
            )
            return stack.enter_context(runtime)

        runtimes = {
            PLAIN: opened(),
            BLOCKS: opened(foretold),
            AS_IT_PAYS: opened(foretold, as_it_pays=True),
        }
        for count in counts:
            prompts = shape.histories(count, _PROMPT_TOKENS)
            contest = Contest(runtimes, foretold, prompts, tokens)
            for acceptance in acceptances:
                yield contest.gain(shape.name, acceptance, repeats)


@dataclass(frozen=True)
class _Turn:
    """One way's answers to all prompts at once."""

    tally: Tally
    said: list[list[int]]

    @property
    def speed(self) -> float:
        return self.tally.speed or self.tally.whole_speed


@dataclass(frozen=True)
class Contest:
    """The same prompts, answered each way in turns."""

    runtimes: Mapping[str, Runtime]
    foretold: Foretold
    prompts: Sequence[Sequence[int]]
    tokens: int

    def gain(self, model: str, acceptance: float, repeats: int) -> Gain:
        """What comes of one turn each way that is not counted, the plain one first, and of `repeats` more;
        every other one goes backwards."""
        self.foretold.acceptance = acceptance
        turns: dict[str, list[_Turn]] = {way: [] for way in self.runtimes}
        for repetition in range(repeats + 1):
            for way in list(self.runtimes)[:: -1 if repetition % 2 else 1]:
                turns[way].append(self._turn(way))
                if way == PLAIN and not repetition:
                    for prompt, answer in zip(self.prompts, turns[PLAIN][0].said, strict=True):
                        self.foretold.learn(prompt, answer)
        speeds = {way: Samples.of(turn.speed for turn in each[1:]) for way, each in turns.items()}
        drafted = turns[BLOCKS][-1].tally
        return Gain(
            model,
            len(self.prompts),
            acceptance,
            speeds[PLAIN],
            speeds[BLOCKS],
            speeds[AS_IT_PAYS],
            proposed=drafted.proposed,
            accepted=drafted.accepted,
            tokens=sum(drafted.counts),
            same=min(_same(turns[PLAIN][-1], turns[way][-1]) for way in (BLOCKS, AS_IT_PAYS)),
        )

    def _turn(self, way: str) -> _Turn:
        runtime = self.runtimes[way]
        kept: list[list[TokenEvent]] = [[] for _ in self.prompts]
        with sessions(runtime, self.prompts) as session_ids:
            tally = generate_all(runtime, session_ids, self.tokens, kept=kept)
        return _Turn(tally, [[event.token_id for event in each] for each in kept])


def _same(one: _Turn, other: _Turn) -> float:
    """The share of answers that are alike."""
    return sum(a == b for a, b in zip(one.said, other.said, strict=True)) / len(one.said)
