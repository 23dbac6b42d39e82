"""The drafter's numbers are those of a plain loop, whatever it was shown, alone and among others."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kakeya import kernels as native
from kakeya.config import CacheConfig, EngineConfig
from kakeya.engine.cpu.backend import CpuBackend
from kakeya.engine.proposer import DraftRequest
from kakeya.engine.sampler import SampleRequest
from kakeya.models.drafter import DrafterConfig, DrafterKind, read_drafter
from kakeya.proposers.draft_states import WAITING, DrafterState, state_bytes
from kakeya.proposers.drafter import TrainedDrafter, head_rows
from kakeya.types import DType, KernelChoice, SamplingParams, TokenEvent, WeightFormat
from support import tiny

WINDOW, BLOCK = 12, 5
KINDS: tuple[DrafterKind, ...] = ("steps", "block")
FLOATS = tiny.engine_config(window=WINDOW, spare=8, threads=1)
NATIVE = replace(FLOATS, kernels=KernelChoice.NATIVE, dtype=DType.BFLOAT16, weights=WeightFormat.INT8)
HIDDEN = int(tiny.LLAMA["hidden_size"])


class Reference:
    """The network from its tensors, one row and one head at a time, in float64 and without a cache."""

    def __init__(self, directory: Path, config: DrafterConfig, tensors: Mapping[str, Tensor]) -> None:
        self.config = config
        self.own = {name: tensor.double() for name, tensor in tensors.items()}
        self.table = load_file(directory / "model.safetensors")["model.embed_tokens.weight"].double()

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean() + self.config.norm_eps).sqrt() * self.own[name]

    def rotated(self, x: Tensor, position: int) -> Tensor:
        half = self.config.head_dim // 2
        speed = float(tiny.LLAMA["rope_theta"]) ** (-torch.arange(half, dtype=torch.float64) / half)
        turned = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(speed), position * speed)
        return torch.cat([turned.real, turned.imag])

    def feature(self, outputs: Tensor) -> Tensor:
        return self.own["fuse.weight"] @ outputs.double() + self.own["fuse.bias"]

    def attended(self, layer: int, query: Tensor, at: int, pairs: Sequence[tuple[int, Tensor]]) -> Tensor:
        """What a row at one position reads from keys and values, unrotated, at others."""
        dim, heads, kv_heads = self.config.head_dim, self.config.num_heads, self.config.num_kv_heads
        mixed = []
        for head in range(heads):
            key_head = head // (heads // kv_heads)
            q = self.rotated(query[head * dim : (head + 1) * dim], at)
            keys, values = [], []
            for position, both in pairs:
                k, v = both.view(2, kv_heads, dim)[:, key_head]
                keys.append(self.rotated(k, position))
                values.append(v)
            weights = (torch.stack(keys) @ q / math.sqrt(dim)).softmax(0)
            mixed.append(weights @ torch.stack(values))
        return torch.cat(mixed)

    def draft(self, shown: Mapping[int, Tensor], newest: int, anchor: int, count: int) -> list[Tensor]:
        """The logits of each guess behind `anchor`, chosen greedily, of the positions that were shown."""
        features = {p: self.feature(outputs) for p, outputs in shown.items()}
        drafted: list[list[tuple[int, Tensor]]] = [[] for _ in range(self.config.layers)]
        logits: list[Tensor] = []
        state = features[anchor]
        for index in range(count):
            embedded = self.table[newest]
            if self.config.kind == "block":
                state = features[anchor]
                embedded = self.table[newest] if index == 0 else self.own["unknown"][index - 1]
            for layer in range(self.config.layers):
                state = self.layer(layer, embedded, state, anchor + 1 + index, features, drafted[layer])
            logits.append(self.table @ self.norm(state, "final_norm"))
            if self.config.kind == "steps":
                newest = int(logits[-1].argmax())
        return logits

    def layer(
        self,
        layer: int,
        embedded: Tensor,
        state: Tensor,
        at: int,
        features: Mapping[int, Tensor],
        drafted: list[tuple[int, Tensor]],
    ) -> Tensor:
        name = f"layers.{layer}."
        history = [
            (p, self.own[name + "history_kv"] @ self.norm(g, name + "history_norm"))
            for p, g in features.items()
        ]
        seen = torch.cat([self.norm(embedded, name + "token_norm"), self.norm(state, name + "state_norm")])
        qkv = self.own[name + "qkv"] @ seen
        query_size = self.config.num_heads * self.config.head_dim
        drafted.append((at, qkv[query_size:]))
        attended = self.attended(layer, qkv[:query_size], at, [*history, *drafted][-WINDOW:])
        state = state + self.own[name + "output"] @ attended
        gate, up = (self.own[name + "gate_up"] @ self.norm(state, name + "mlp_norm")).chunk(2)
        return state + self.own[name + "down"] @ (gate * torch.sigmoid(gate) * up)


@dataclass
class Heard:
    """A verifier that writes down the logits that tokens were chosen from."""

    backend: CpuBackend
    heard: list[Tensor] = field(default_factory=list)
    choices: int = 0

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.backend.embed(token_ids)

    def logits(self, normed: Tensor) -> Tensor:
        return self.backend.logits(normed)

    def choose(self, logits: Tensor, requests: Sequence[SampleRequest]) -> list[TokenEvent]:
        self.choices += 1
        self.heard.append(logits.clone())
        return self.backend.choose(logits, requests)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_llama(tmp_path_factory.mktemp("verifier"))


class Bench:
    """A drafter, its verifier and its reference. Hidden states are random, a row for each position."""

    def __init__(
        self,
        directory: Path,
        path: Path,
        kind: DrafterKind,
        config: EngineConfig = FLOATS,
        layers: int = 2,
        guessable: int = tiny.VOCAB,
    ) -> None:
        decoder = tiny.load(directory, config)
        shape = {"block": BLOCK, "layers": layers, "intermediate_size": 64, "draft_vocab_size": guessable}
        stored = read_drafter(tiny.write_random_drafter(path / "drafter", decoder.config, kind, **shape))
        self.verifier = Heard(tiny.make_backend(decoder, config))
        kernels = native.load(config.kernels)
        self.drafter = TrainedDrafter(stored, self.verifier, decoder.config, config, kernels)
        self.ids = stored.draft_vocab
        self.reference = Reference(directory, stored.config, stored.tensors)
        self.outputs = torch.randn(200, 2 * HIDDEN, generator=torch.Generator().manual_seed(3))

    def show(self, state: DrafterState, *spans: range) -> DrafterState:
        for span in spans:
            rows = self.outputs[span.start : span.stop]
            self.drafter.observe(state, span.start, {0: rows[:, :HIDDEN], 1: rows[:, HIDDEN:]})
        return state

    def shown(self, *spans: range) -> DrafterState:
        return self.show(self.drafter.new_state(), *spans)

    def request(self, state: DrafterState, anchor: int, limit: int = BLOCK, **more: object) -> DraftRequest:
        return DraftRequest(state, [7] * (anchor + 1) + [anchor % tiny.VOCAB], limit, **more)

    def guess(self, *requests: DraftRequest) -> list[list[int]]:
        self.verifier.heard.clear()
        return [list(each) for each in self.drafter.propose(requests)]

    def expected(self, spans: Sequence[range], anchor: int, count: int = BLOCK) -> Tensor:
        shown = {p: self.outputs[p] for span in spans for p in span}
        return torch.stack(self.reference.draft(shown, anchor % tiny.VOCAB, anchor, count))


# What was shown, up to the anchor: in one go, row by row, past the window, with gaps.
SHOWN: dict[str, list[range]] = {
    "one position": [range(1)],
    "one block": [range(7)],
    "row by row": [range(p, p + 1) for p in range(9)],
    "a window exactly": [range(WINDOW)],
    "a long block": [range(40)],
    "past the window": [range(WAITING + 3), *(range(p, p + 2) for p in range(WAITING + 3, 41, 2))],
    "not the beginning": [range(20, 26)],
    "a gap within the window": [range(5), range(8, 10), range(13, 15)],
    "after the wrap a gap": [range(30), range(34, 36)],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spans", SHOWN.values(), ids=SHOWN)
def test_the_numbers_are_those_of_a_plain_loop(
    directory: Path, tmp_path: Path, kind: DrafterKind, spans: list[range]
) -> None:
    bench = Bench(directory, tmp_path, kind)
    anchor = spans[-1][-1]
    (guessed,) = bench.guess(bench.request(bench.shown(*spans), anchor))
    expected = bench.expected(spans, anchor)
    torch.testing.assert_close(torch.cat(bench.verifier.heard).double(), expected, rtol=1e-4, atol=1e-4)
    assert guessed == expected.argmax(1).tolist()


def test_what_lies_a_window_before_a_gap_is_forgotten(directory: Path, tmp_path: Path) -> None:
    bench = Bench(directory, tmp_path, "steps")
    for gap, kept in ((WINDOW - 1, [range(6), range(5 + WINDOW, 20)]), (WINDOW, [range(6 + WINDOW, 20)])):
        state = bench.shown(range(6), range(6 + gap, 20))
        (guessed,) = bench.guess(bench.request(state, 19))
        assert guessed == bench.expected(kept, 19).argmax(1).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_eight_bits_are_near(directory: Path, tmp_path: Path, kind: DrafterKind) -> None:
    bench = Bench(directory, tmp_path, kind, NATIVE, layers=1)
    errors = []
    for end in range(3, 43):
        state = bench.shown(range(end))
        bench.guess(bench.request(state, end - 1, 1))
        state.close()
        expected = bench.expected([range(end)], end - 1, 1)
        errors.append((bench.verifier.heard[0].double() - expected).norm() / expected.norm())
    assert torch.stack(errors).mean() < 0.04  # eight matmuls with 8-bit activations, each gaining 1.5


@pytest.mark.parametrize("config", [FLOATS, NATIVE], ids=["torch", "native"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=5),
        SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0),
    ],
    ids=["greedy", "seeded", "penalized"],
)
def test_sessions_together_are_as_alone(
    directory: Path, tmp_path: Path, kind: DrafterKind, sampling: SamplingParams, config: EngineConfig
) -> None:
    bench = Bench(directory, tmp_path, kind, config)
    asked = [(range(7), 3), (range(20), BLOCK), (range(4, 6), 1), (range(30), 2)]
    requests = [bench.request(bench.shown(span), span[-1], limit, sampling=sampling) for span, limit in asked]
    before = bench.verifier.choices
    together = bench.guess(*requests)
    if kind == "steps":
        assert bench.verifier.choices - before == BLOCK
    assert [len(guess) for guess in together] == [limit for _, limit in asked]
    assert together == [bench.guess(request)[0] for request in requests]


def test_guesses_are_drawn_with_the_numbers_of_their_positions(directory: Path, tmp_path: Path) -> None:
    bench = Bench(directory, tmp_path, "block")
    sampling = SamplingParams(temperature=1.5, seed=8)
    (guessed,) = bench.guess(bench.request(bench.shown(range(9)), 8, sampling=sampling))
    logits, first = torch.cat(bench.verifier.heard), 10
    requests = [SampleRequest(sampling, first + index) for index in range(BLOCK)]
    assert guessed == [event.token_id for event in bench.verifier.choose(logits, requests)]
    assert guessed != logits.argmax(1).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_it_guesses_among_the_tokens_that_it_knows(
    directory: Path, tmp_path: Path, kind: DrafterKind
) -> None:
    bench = Bench(directory, tmp_path, kind, guessable=tiny.VOCAB // 2)
    (guessed,) = bench.guess(bench.request(bench.shown(range(9)), 8))
    heard = torch.cat(bench.verifier.heard)
    assert guessed == [int(bench.ids[row[bench.ids].argmax()]) for row in heard]
    first = bench.expected([range(9)], 8, 1)
    torch.testing.assert_close(heard[:1, bench.ids].double(), first[:, bench.ids], rtol=1e-4, atol=1e-4)
    others = torch.ones(tiny.VOCAB, dtype=torch.bool).index_fill(0, bench.ids, value=False)
    assert (heard[:, others] < -1e20).all()


def test_a_grammar_may_leave_none_of_the_tokens_that_it_knows(directory: Path, tmp_path: Path) -> None:
    """Then it guesses what the grammar allows."""
    bench = Bench(directory, tmp_path, "steps", guessable=tiny.VOCAB // 2)
    unknown = next(token for token in range(tiny.VOCAB) if token not in bench.ids.tolist())
    mask = (1 << unknown).to_bytes(-(-tiny.VOCAB // 8), "little")
    logits = bench.drafter._logits(torch.randn(1, HIDDEN))
    request = SampleRequest(SamplingParams(), 3, mask=mask)
    assert [event.token_id for event in bench.verifier.choose(logits, [request])] == [unknown]


def test_rows_of_a_head_of_its_own_are_found(directory: Path) -> None:
    """A verifier whose head is not its embedding is only asked for logits."""
    model = replace(tiny.load(directory, FLOATS).config, tied_head=False)
    head = torch.randn(tiny.VOCAB, model.hidden_size)

    class Untied(Heard):
        def logits(self, normed: Tensor) -> Tensor:
            return normed @ head.T

    ids = torch.tensor([3, 9, 11])
    torch.testing.assert_close(head_rows(Untied(None), model, ids), head[ids])  # type: ignore[arg-type]


def test_what_it_was_not_shown_it_does_not_guess_for(directory: Path, tmp_path: Path) -> None:
    bench = Bench(directory, tmp_path, "steps")
    seen, unseen = bench.shown(range(6)), bench.drafter.new_state()
    requests = [bench.request(unseen, 5), bench.request(seen, 5), bench.request(seen, 6)]
    nothing, some, behind = bench.guess(*requests)
    assert (nothing, len(some), behind) == ([], BLOCK, [])
    assert bench.guess(requests[0], requests[2]) == [[], []]
    assert bench.guess(DraftRequest(unseen, [3], 4)) == [[]]
    assert bench.guess() == []


def test_it_may_be_asked_again(directory: Path, tmp_path: Path) -> None:
    bench = Bench(directory, tmp_path, "steps")
    request = bench.request(bench.shown(range(18)), 17)
    assert bench.guess(request) == bench.guess(request)


@pytest.mark.parametrize("length", [3, 14, 24, 25, 29])
def test_what_was_taken_back_leaves_no_trace(directory: Path, tmp_path: Path, length: int) -> None:
    bench = Bench(directory, tmp_path, "steps")
    state = bench.shown(range(25), range(25, 30))
    state.rollback(length)
    assert bench.guess(bench.request(state, length - 1)) == [[]], "the feature is gone"
    bench.outputs[length:] = bench.outputs[length:].flip(0)
    bench.show(state, range(length, length + 4))
    # Further back than there are spare slots, the history is overwritten: it begins anew.
    kept = range(length) if 30 - length <= BLOCK else range(0)
    anchor = length + 3
    (guessed,) = bench.guess(bench.request(state, anchor))
    assert guessed == bench.expected([kept, range(length, length + 4)], anchor).argmax(1).tolist()


@pytest.mark.parametrize("length", [20, 21, 18])
def test_a_rollback_to_a_gap_or_behind_it(directory: Path, tmp_path: Path, length: int) -> None:
    bench = Bench(directory, tmp_path, "steps")
    state = bench.shown(range(16), range(20, 22))
    state.rollback(length)
    bench.show(state, range(length, 24))
    before = [] if length < 20 else [range(16), range(20, length)]
    (guessed,) = bench.guess(bench.request(state, 23))
    assert guessed == bench.expected([*before, range(length, 24)], 23).argmax(1).tolist()


def test_a_rollback_of_nothing_changes_nothing(directory: Path, tmp_path: Path) -> None:
    bench = Bench(directory, tmp_path, "steps")
    state, fresh = bench.shown(range(25)), bench.drafter.new_state()
    before = bench.guess(bench.request(state, 24))
    state.rollback(25)
    fresh.rollback(0)
    assert bench.guess(bench.request(state, 24)) == before


@pytest.mark.parametrize("spans", [[range(9)], [range(30), range(30, 33)]], ids=["young", "wrapped"])
def test_forks_and_imports_go_on_alike(directory: Path, tmp_path: Path, spans: list[range]) -> None:
    bench = Bench(directory, tmp_path, "steps")
    state = bench.shown(*spans)
    end = spans[-1].stop
    fork = state.fork()
    assert isinstance(fork, DrafterState)
    imported = bench.drafter.restore(state.export())
    more = range(end, end + 2)
    for each in (state, fork, imported):
        bench.show(each, more)
    guesses = bench.guess(*(bench.request(each, end + 1) for each in (state, fork, imported)))
    assert guesses == [bench.expected([*spans, more], end + 1).argmax(1).tolist()] * 3


def test_an_export_is_a_copy(directory: Path, tmp_path: Path) -> None:
    bench = Bench(directory, tmp_path, "steps")
    state = bench.shown(range(9))
    expected = bench.guess(bench.request(state, 8))
    exported = state.export()
    bench.show(state, range(9, 30))
    assert bench.guess(bench.request(bench.drafter.restore(exported), 8)) == expected


def test_what_another_drafter_exported_is_left_alone(directory: Path, tmp_path: Path) -> None:
    bench = Bench(directory, tmp_path, "steps")
    exported = bench.shown(range(9)).export()
    other = exported | {"drafter": exported["drafter"].flip(0)}
    shorter = exported | {"history": exported["history"][..., 1:, :]}
    lacking = {name: tensor for name, tensor in exported.items() if name != "feature"}
    for tensors in (other, shorter, lacking):
        state = bench.drafter.restore(tensors)
        assert bench.guess(bench.request(state, 8)) == [[]]
        state.close()


def test_places_are_given_back_and_come_empty(directory: Path, tmp_path: Path) -> None:
    bench = Bench(directory, tmp_path, "steps")
    pool = bench.drafter.memory.pool
    for _ in range(2 * FLOATS.capacity):
        state, unused = bench.shown(range(20)), bench.drafter.new_state()
        fork = state.fork()
        assert unused.fork().export() == {}
        for each in (state, fork, unused):
            each.close()
    assert pool.free_count == FLOATS.capacity
    state = bench.shown(range(3, 4))
    bench.guess(bench.request(state, 3, 1))
    held = state.slab.storage.count_nonzero(dim=(0, 1, 2, 4)).nonzero()
    assert held.flatten().tolist() == [0, 1], "a position and a guess"


def test_memory_is_as_planned(directory: Path, tmp_path: Path) -> None:
    for config in (FLOATS, NATIVE):
        drafter = Bench(directory, tmp_path, "steps", config).drafter
        planned = state_bytes(drafter._network.config, config)
        assert drafter.memory.nbytes == config.capacity * planned
    drafter = Bench(directory, tmp_path, "steps", replace(FLOATS, cache=CacheConfig(window=30_000))).drafter
    assert drafter.memory.pool.geometry.cache.window == 1024, "however long the verifier's is"


def test_a_draft_is_no_longer_than_the_block_or_as_configured(directory: Path, tmp_path: Path) -> None:
    assert Bench(directory, tmp_path, "steps").drafter.max_draft == BLOCK
    assert Bench(directory, tmp_path, "steps", replace(FLOATS, draft_tokens=2)).drafter.max_draft == 2
