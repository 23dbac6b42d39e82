"""Measures the parts of `bench quality` through the real engine."""

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kakeya.bench.benchmark import Work
from kakeya.bench.machine import public_name
from kakeya.bench.peers.llama import LlamaProcess, require_llama
from kakeya.bench.quality.benchmark import ASKED_BY, BLOCKS, PASSAGE_TOKENS, Part, QualityBench
from kakeya.bench.quality.results import (
    BOUNDED,
    FULL,
    PINNED,
    REFERENCE,
    STRETCH_TOKENS,
    Answer,
    Choice,
    ChoiceRow,
    MemoryResults,
    PeerResults,
    RecallResults,
    RecallRow,
    Scores,
    far_stretches,
    fresh_row,
    peer_row,
    perplexity,
    way_row,
)
from kakeya.bench.text import prose, stretch
from kakeya.config import CacheConfig
from kakeya.errors import ConfigError
from kakeya.runtime import Runtime
from kakeya.types import TokenEvent

SAID = "\n\nNote this down: the secret number is {key}. Remember it, {key} is the secret number.\n\n"
ASKED = "\n\nQuestion: What is the secret number?\nAnswer: The secret number is"
# Prose before the number, so that it is not what a session begins with.
LEAD = (16, 64)
ANSWER_TOKENS = 10
# Room for what a document begins with.
START_TOKENS = 8

Found = Iterator[dict[str, Any]]
# A passage and the reference's log-probabilities for it [n, vocab].
Passage = tuple[list[int], Tensor]


def measure(bench: QualityBench, token_ids: Sequence[int], work: Work) -> Found:
    """What the parts have found so far, after each choice, way, memory and file, by fields of the results.

    Raises ConfigError for a file that llama.cpp cannot read.
    """
    if Part.CHOICES in bench.parts:
        yield from measure_choices(bench, work)
    if Part.MEMORY in bench.parts:
        yield from measure_memory(bench, token_ids, work)
    if Part.RECALL in bench.parts:
        yield from measure_recall(bench, token_ids, work)
    if Part.PEER in bench.parts:
        yield from measure_peer(bench, work)


def text_tokens(bench: QualityBench, text: str) -> list[int]:
    """The long text in tokens. Raises ConfigError for one shorter than what should be read of it."""
    with _alone(bench, CacheConfig(sink=0, window=1)) as runtime:
        token_ids = runtime.tokenizer.encode(text, special=False)
    bench.check_length(len(token_ids), "tokens")
    return token_ids


def _alone(bench: QualityBench, cache: CacheConfig, model: str | None = None, **changes: Any) -> Runtime:
    """A runtime for one session with this memory."""
    return Runtime.open(model or bench.model, replace(bench.config, cache=cache, capacity=1, **changes))


def surprises(runtime: Runtime, token_ids: Sequence[int], work: Work) -> list[float]:
    """How much each token but the first surprises the model, in nats, through one session."""
    start = runtime.tokenizer.encode("", bos=True)
    whole = [*start, *token_ids]
    following = torch.tensor(whole[1:], dtype=torch.int64)
    found: list[float] = []
    with closing(runtime.score_blocks(whole)) as blocks:
        for block in blocks:
            wanted = following[len(found) : len(found) + len(block)].to(block.device)
            rows = block[: len(wanted)].float()
            chosen = rows.gather(1, wanted[:, None])[:, 0]
            found += (rows.logsumexp(dim=-1) - chosen).tolist()
            work.advance(len(block))
    return found[len(start) :]


def cut(token_ids: Sequence[int], size: int) -> list[list[int]]:
    """The text in passages of `size` tokens; the last one may be shorter."""
    return [list(token_ids[start : start + size]) for start in range(0, len(token_ids), size)]


# Choices: each scores the same text once fed in blocks of many rows, as prompts are, and once in blocks of
# few, as decoding is: the matmuls may take different paths.


def measure_choices(bench: QualityBench, work: Work) -> Found:
    """A choice that cannot be had here is reported as refused, with the reason."""
    work.begin(f"reference: {REFERENCE.label()}")
    with _chosen(bench, REFERENCE, BLOCKS["prompt"]) as runtime:
        tokens = runtime.tokenizer.encode(prose())[: bench.choice_tokens]
        texts = cut(tokens, bench.choice_passage)
        passages = [(text, torch.log_softmax(runtime.score(text), dim=-1)) for text in texts]
    reference = compare(passages, [logits for _, logits in passages])
    work.advance(bench.work_of_a_choice)
    rows: list[ChoiceRow] = []
    for choice in bench.choices:
        work.begin(choice.label())
        try:
            rows.append(_scored(bench, choice, passages))
        except ConfigError as error:
            rows.append(ChoiceRow(**vars(choice), refused=str(error)))
        work.advance(bench.work_of_a_choice)
        yield {"reference": reference, "choices": tuple(rows)}


def _scored(bench: QualityBench, choice: Choice, passages: Sequence[Passage]) -> ChoiceRow:
    scores: dict[str, Any] = {}
    held_as = ""
    for fed, block in BLOCKS.items():
        with _chosen(bench, choice, block) as runtime:
            held_as = runtime.describe().weights
            scores[fed] = compare(passages, (runtime.score(text) for text, _ in passages))
    return ChoiceRow(**vars(choice), held_as=held_as, **scores)


def _chosen(bench: QualityBench, choice: Choice, block: int) -> Runtime:
    return _alone(bench, bench.config.cache, **vars(choice), prefill_block=block)


def compare(passages: Sequence[Passage], logits: Iterable[Tensor]) -> Scores:
    """Next-token distributions [n, vocab] beside the reference's, over all passages."""
    positions, divergence, agreements = 0, 0.0, 0
    nats: list[float] = []
    for (text, reference), found in zip(passages, logits, strict=True):
        scores = torch.log_softmax(found, dim=-1)
        positions += len(text)
        divergence += float((reference.exp() * (reference - scores)).sum(dim=-1).sum(dtype=torch.float64))
        agreements += int((reference.argmax(dim=-1) == scores.argmax(dim=-1)).sum())
        following = torch.tensor(text[1:], dtype=torch.int64)
        nats += (-scores[:-1].gather(1, following[:, None])[:, 0]).tolist()
    if not positions:
        return Scores()
    return Scores(positions, divergence / positions, agreements / positions, perplexity(nats))


# Memory: one long text through one session for each way to remember.


def measure_memory(bench: QualityBench, token_ids: Sequence[int], work: Work) -> Found:
    """Each way, and at last sessions begun afresh beside the judged one."""
    results, streamed = MemoryResults(), list[float]()
    for way in bench.ways:
        work.begin(f"memory: {way.label()}")
        with _alone(bench, CacheConfig(sink=way.sink, window=way.window)) as runtime:
            began = time.perf_counter()
            nats = surprises(runtime, token_ids[: bench.tokens_of(way)], work)
            row = way_row(way, nats, time.perf_counter() - began, runtime.describe().session_bytes)
            trained = runtime.model_config.max_positions
        results = replace(results, ways=(*results.ways, row), trained_tokens=trained)
        streamed = nats if way == bench.judged else streamed
        yield {"memory": results}
    if starts := far_stretches(bench.history_tokens, bench.far_tokens):
        work.begin(f"memory: the same text afresh, for {bench.judged.label()}")
        afresh = _afresh(bench, token_ids, starts, work)
        yield {"memory": replace(results, fresh=fresh_row(bench.judged, streamed, afresh))}


def _afresh(
    bench: QualityBench, token_ids: Sequence[int], starts: Sequence[int], work: Work
) -> dict[int, list[float]]:
    """Each stretch in a session of its own that begins a window earlier and forgets nothing.

    Its later tokens see more than a window's worth, so the comparison errs against the long session.
    """
    before, size = bench.judged.window, STRETCH_TOKENS
    with _alone(bench, CacheConfig(sink=0, window=before + size)) as runtime:
        texts = {start: token_ids[max(0, start - before) : start + size] for start in starts}
        return {start: surprises(runtime, text, work)[-size:] for start, text in texts.items()}


# Recall: a number is said, prose goes by, and then it is asked for.


@dataclass(frozen=True)
class Talk:
    """What one trial says. `pinned`: how long a prefix holds the number; `overhead`: what lies between the
    number's first token and the answer's last, besides the prose."""

    key: str
    token_ids: list[int]
    pinned: int
    overhead: int


def talk(runtime: Runtime, token_ids: Sequence[int], distance: int, seed: str) -> Talk:
    """Some prose with a number at its end, more prose, and the question. It follows from the seed."""
    encode, chance = runtime.tokenizer.encode, random.Random(seed)
    key = str(chance.randrange(10_000, 100_000))
    place, lead = chance.randrange(len(token_ids)), chance.randint(*LEAD)
    opening = [*encode("", bos=True), *stretch(token_ids, place, lead)]
    said, asked = encode(SAID.format(key=key)), encode(ASKED)
    whole = [*opening, *said, *stretch(token_ids, place + lead, distance), *asked]
    return Talk(key, whole, len(opening) + len(said), len(said) + len(asked) + ANSWER_TOKENS)


def measure_recall(bench: QualityBench, token_ids: Sequence[int], work: Work) -> Found:
    """Full attention, bounded memory, and bounded memory with the number pinned: all are asked the same."""
    results = RecallResults(bounded=bench.judged.label())
    for memory, way in ((FULL, bench.forgets_nothing), (BOUNDED, bench.judged), (PINNED, bench.judged)):
        work.begin(f"recall: {memory}")
        with _alone(bench, CacheConfig(sink=way.sink, window=way.window)) as runtime:
            for distance in bench.distances_asked:
                seeds = [f"{bench.seed} {distance} {trial}" for trial in range(bench.trials)]
                talks = [talk(runtime, token_ids, distance, seed) for seed in seeds]
                reach = way.window - max(each.overhead for each in talks)
                answers = [Answer(each.key, _answer(runtime, each, memory)) for each in talks]
                row = RecallRow(memory, distance, distance <= reach, tuple(answers))
                results = replace(results, rows=(*results.rows, row))
                work.advance(bench.trials * distance)
        yield {"recall": results}


def _answer(runtime: Runtime, said: Talk, memory: str) -> str:
    session_id = runtime.create_session(pinned_prefix_tokens=said.pinned if memory == PINNED else None)
    try:
        runtime.append(session_id, said.token_ids)
        events = runtime.generate(session_id, ANSWER_TOKENS)
        answer = [event.token_id for event in events if isinstance(event, TokenEvent)]
    finally:
        runtime.close_session(session_id)
    return runtime.tokenizer.decode(answer)


# Peer: the same tokens of the same files through llama.cpp. What differs is arithmetic alone: every passage
# begins a session, and a context, of its own, and fits in it whole.


def measure_peer(bench: QualityBench, work: Work) -> Found:
    rows = []
    size = PASSAGE_TOKENS + START_TOKENS
    for file in (bench.model, *map(str, bench.also or ())):
        name = public_name(file)
        work.begin(f"{name}: ours")
        with _alone(bench, CacheConfig(sink=0, window=size), file) as runtime:
            facts, encode = runtime.describe(), runtime.tokenizer.encode
            require_llama(facts.path, asked_by=ASKED_BY)
            passages = cut(encode(prose())[: bench.peer_tokens], PASSAGE_TOKENS)
            ours = [nats for passage in passages for nats in surprises(runtime, passage, work)]
            start = encode("", bos=True)
        work.begin(f"{name}: llama.cpp")
        with LlamaProcess(facts.path, bench.config.threads, ()) as peer:
            theirs = their_surprises(peer, start, passages, work)
            rows.append(peer_row(name, facts.weights, ours, theirs))
            yield {"peer": PeerResults(**peer.facts, files=tuple(rows))}


def their_surprises(
    peer: LlamaProcess, start: Sequence[int], passages: Sequence[Sequence[int]], work: Work
) -> list[float]:
    """As `surprises` counts them: neither what a document begins with nor the first token after it."""
    found: list[float] = []
    for passage in passages:
        found += peer.surprises([*start, *passage])[len(start) :]
        work.advance(len(passage))
    return found
