"""The buckets of steps, and how steps are laid out in them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from kakeya.config import EngineConfig
from kakeya.engine.batch import PENDING, Segment
from kakeya.engine.cuda.arranging import Arranger, Wave
from kakeya.engine.cuda.shapes import StepBuckets, StepShape, decode_buckets
from kakeya.engine.cuda.tables import BUFFERS, HostTables, StepTables
from kakeya.engine.sampler import SampleRequest
from kakeya.kernels.gpu import MAX_KV_SPLITS, TILE_ROWS, kv_splits
from kakeya.types import BackendChoice, Numerics, SamplingParams
from support import tiny

CPU = torch.device("cpu")
GREEDY = SamplingParams()
WARM = SamplingParams(temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, seed=2**64 - 1)
FOUR = StepShape(4)


def test_buckets_are_dense_where_it_matters_and_end_where_nobody_comes() -> None:
    assert decode_buckets(1) == (1,)
    assert decode_buckets(5) == (1, 2, 4, 8)
    assert decode_buckets(256) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    assert decode_buckets(200)[-2:] == (192, 256)
    assert decode_buckets(130)[-1] == 192
    assert decode_buckets(2304)[-3:] == (1536, 2048, 2304)


@given(st.integers(1, 5000), st.integers(1, 64))
def test_every_batch_has_a_bucket(most: int, kv_heads: int) -> None:
    buckets = decode_buckets(most)
    assert list(buckets) == sorted(set(buckets))
    assert buckets[-1] >= most
    for bucket in buckets:
        splits = kv_splits(bucket, kv_heads)
        assert splits & (splits - 1) == 0
        assert splits <= MAX_KV_SPLITS


configurations = st.builds(
    lambda capacity, block, more, numerics: EngineConfig(
        capacity=capacity, prefill_block=block, max_batch_tokens=block + more, numerics=numerics
    ),
    st.integers(1, 3000),
    st.integers(1, 2100),
    st.integers(0, 6144),
    st.sampled_from(Numerics),
)


@given(configurations, st.data())
def test_every_step_within_the_budget_fits_the_limits(config: EngineConfig, data: st.DataObject) -> None:
    buckets, most = StepBuckets(config), config.step_tokens
    limits = buckets.limits
    captured = buckets.captured
    assert [shape.rows for shape in captured] == sorted((shape.rows for shape in captured), reverse=True)
    assert len(captured) <= 60
    decode = data.draw(st.integers(0, min(most, config.capacity)))
    prompts = data.draw(st.integers(0, most - decode).filter(lambda n: n != 1))
    segments = data.draw(st.integers(min(1, prompts), prompts // 2)) if prompts else 0
    logits = data.draw(st.integers(0, decode + prompts))
    shape = buckets.captured_mixed(decode, prompts, segments, logits) if prompts else None
    if config.numerics is Numerics.EXACT:
        assert shape is None
    assert shape is None or shape in captured
    for each in (shape or buckets.uncaptured(decode, prompts, segments, logits), *captured):
        assert each.rows <= limits.rows
        assert each.segments <= limits.segments
        assert each.tiles <= limits.tiles
        assert each.logit_rows <= limits.rows
    for each in captured:
        assert each.head_rows <= limits.head_rows
    if decode:
        assert buckets.decode(decode) in captured
        assert buckets.decode(decode).decode_rows >= decode


def test_what_a_device_wants_by_default() -> None:
    config = EngineConfig(backend=BackendChoice.CUDA, capacity=256)
    assert (config.block_tokens, config.step_tokens) == (2048, 2304)
    mixed = [shape for shape in StepBuckets(config).captured if shape.is_mixed]
    assert StepShape(256, 2048, 128, 384) in mixed
    assert StepShape(0, 128, 64, 128) in mixed
    assert len(mixed) == 18


@pytest.mark.parametrize("capacity", [300, 768, 2304, 4096, 20000])
def test_larger_batches_take_few_more_graphs(capacity: int) -> None:
    config = EngineConfig(backend=BackendChoice.CUDA, capacity=capacity)
    buckets = StepBuckets(config)
    assert len(buckets.captured) < 60
    step = buckets.captured_mixed(min(capacity, 300), 2048, 1, min(capacity, 300) + 1)
    assert step in buckets.captured
    assert step.prefill_rows == 2048
    two_prompts = buckets.captured_mixed(0, 2100, 2, 2)
    assert two_prompts.prefill_rows <= 4096, "no prompt is padded to the whole budget"


class Layouts:
    """Tables filled for made-up segments. Budget 200, 6 slabs of 14 slots, pieces of 5 rows."""

    def __init__(self, numerics: Numerics) -> None:
        config = tiny.engine_config(capacity=6, max_batch_tokens=200, numerics=numerics)
        self.tables = StepTables(StepBuckets(config).limits, CPU)
        self.host = self.tables.begin()
        self.arranger = Arranger(StepBuckets(config), config.cache, numerics is Numerics.EXACT)

    def column(self, name: str, count: int) -> list[int]:
        return self.host.table(name)[:count].tolist()


def segment(slab: int, start: int, tokens: list[int], logit_rows: int = 1, sink: int = 2) -> Segment:
    sequence = SimpleNamespace(slab=SimpleNamespace(index=slab, sink=sink))
    return Segment(sequence, start, tokens, 0, logit_rows)


def test_single_tokens_lie_as_they_come() -> None:
    layouts = Layouts(Numerics.FAST)
    step = layouts.arranger.arrange(
        layouts.host, [segment(3, 9, [PENDING]), segment(1, 70, [5], sink=4), segment(0, 0, [8])], 3
    )
    assert step.is_captured
    assert (step.shape, step.waves) == (StepShape(4), (Wave(0, 4),))
    assert layouts.column("token_ids", 3) == [PENDING, 5, 8]
    assert layouts.column("slabs", 4) == [3, 1, 0, -1]
    assert layouts.column("positions", 3) == [9, 70, 0]
    assert layouts.column("sinks", 3) == [2, 4, 2]


def test_prompts_lie_behind_single_tokens() -> None:
    layouts = Layouts(Numerics.FAST)
    prompt = list(range(10, 10 + TILE_ROWS + 6))
    segments = [segment(2, 100, prompt), segment(4, 7, [50]), segment(5, 30, [1, 2, 3], 3)]
    step = layouts.arranger.arrange(layouts.host, segments, 5)
    shape = step.shape
    assert step.is_captured
    assert (shape.decode_rows, shape.prefill_rows) == (8, 128)
    assert step.waves == (Wave(0, 8),)
    assert layouts.column("slabs", shape.rows) == [4, *[-1] * 7, *[2] * 70, *[5] * 3, *[-1] * 55]
    assert layouts.column("token_ids", 81)[0] == 50
    assert layouts.column("token_ids", 81)[8:] == [*prompt, 1, 2, 3]
    assert layouts.column("positions", 81)[8:] == [*range(100, 170), 30, 31, 32]
    assert layouts.column("segments", 10) == [2, 100, 0, 70, 2, 5, 30, 70, 3, 2]
    assert layouts.column("tiles", 2 * shape.tiles) == [0, 0, 0, 64, 1, 0, *[-1] * (2 * shape.tiles - 6)]
    assert layouts.column("row_segments", 128) == [*[0] * 70, *[1] * 3, *[-1] * 55]
    assert step.order.tolist() == [*range(8, 78), 0, 78, 79, 80]
    # Logits come in segment order: the prompt's last row, the single token, the draft.
    assert layouts.column("logit_rows", 6) == [77, 0, 78, 79, 80, 0]
    assert layouts.column("logit_slabs", shape.logit_rows)[:6] == [2, 4, 5, 5, 5, -1]


def test_a_step_too_large_for_a_graph_is_padded_no_further_than_it_must() -> None:
    layouts = Layouts(Numerics.FAST)
    segments = [segment(0, 0, [1] * 30, 30), segment(1, 5, [7])]
    for captured in (True, False):
        step = layouts.arranger.arrange(layouts.host, segments, 31, captured=captured)
        assert step.is_captured is captured
    assert step.shape == StepShape(1, 30, 1, 31)
    assert layouts.column("logit_rows", 31) == [*range(1, 31), 0]


def test_a_single_token_inside_a_prompt_has_no_logits() -> None:
    layouts = Layouts(Numerics.FAST)
    step = layouts.arranger.arrange(layouts.host, [segment(0, 3, [9], 0), segment(1, 4, [8])], 1)
    assert step.shape == StepShape(2, logit_rows=1)
    assert layouts.column("logit_rows", 1) == [1]


def test_exact_rows_go_in_waves() -> None:
    layouts = Layouts(Numerics.EXACT)
    segments = [segment(0, 40, list(range(7))), segment(1, 4, [8]), segment(2, 9, [20, 21], 2)]
    step = layouts.arranger.arrange(layouts.host, segments, 4)
    assert not step.is_captured
    assert step.waves == [Wave(0, 8, has_neighbours=True), Wave(8, 2, has_neighbours=True)]
    assert layouts.column("token_ids", 10) == [0, 1, 2, 3, 4, 8, 20, 21, 5, 6]
    assert layouts.column("positions", 10) == [40, 41, 42, 43, 44, 4, 9, 10, 45, 46]
    assert step.order.tolist() == [0, 1, 2, 3, 4, 8, 9, 5, 6, 7]
    assert step.shape == StepShape(10, logit_rows=4)
    assert layouts.column("logit_rows", 4) == [9, 5, 6, 7]
    assert layouts.column("logit_slabs", 4) == [0, 1, 2, 2]


def test_the_first_lap_round_the_ring_is_one_round() -> None:
    """Nothing can be displaced there: 14 slots, then pieces of 5."""
    layouts = Layouts(Numerics.EXACT)
    segments = [segment(0, 2, list(range(20)), 0), segment(1, 50, list(range(20, 26)))]
    step = layouts.arranger.arrange(layouts.host, segments, 1)
    sizes = [(each.first, each.count) for each in step.waves]
    assert sizes == [(0, 12 + 5), (17, 5 + 1), (23, 3)]
    assert layouts.column("token_ids", 26) == [*range(12), *range(20, 25), *range(12, 17), 25, *range(17, 20)]
    assert step.order.tolist() == [*range(12), *range(17, 22), *range(23, 26), *range(12, 17), 22]


def test_exact_single_tokens_need_no_storing_first() -> None:
    layouts = Layouts(Numerics.EXACT)
    step = layouts.arranger.arrange(layouts.host, [segment(0, 4, [8]), segment(1, 4, [8])], 2)
    assert step.waves == (Wave(0, 2),)
    assert step.is_captured
    step = layouts.arranger.arrange(layouts.host, [segment(0, 4, [8]), segment(1, 4, [8])], 2, captured=False)
    assert step.waves == [Wave(0, 2)]


class CountedCopies(StepTables):
    """Remembers which tables travelled."""

    def __init__(self) -> None:
        self.copies: list[tuple[str, str]] = []
        super().__init__(StepBuckets(tiny.engine_config()).limits, CPU)

    def _copy(self, buffer: HostTables, first: str, last: str) -> None:
        self.copies.append((first, last))
        super()._copy(buffer, first, last)

    def step(self, *params: SamplingParams, shape: StepShape = FOUR) -> list[tuple[str, str]]:
        self.copies.clear()
        self.send(self.begin(), [SampleRequest(each, 77) for each in params], shape)
        return list(self.copies)


ROWS = ("token_ids", "sampling_positions")


def test_only_what_changed_travels() -> None:
    tables = CountedCopies()
    assert tables.step(GREEDY, GREEDY) == [ROWS, ("temperature", "temperature")]
    assert tables.step(GREEDY, GREEDY) == [ROWS]
    assert tables.step(GREEDY) == [ROWS]
    assert tables.step(GREEDY, WARM) == [ROWS, ("seed", "min_p")]
    assert tables.step(GREEDY, WARM) == [ROWS]
    assert tables.step(WARM, GREEDY) == [ROWS, ("seed", "min_p")]
    assert tables.step(GREEDY, shape=StepShape(0, 32, 2, 4)) == [
        ("token_ids", "tiles"),
        ("temperature", "temperature"),
    ]
    assert tables.step() == [ROWS]


def test_sampling_settings_arrive_unchanged() -> None:
    tables = CountedCopies()
    tables.step(GREEDY, WARM)
    rows, sampling = tables.logits(StepShape(4), 0, 4)
    assert sampling.temperature.tolist() == [0.0, 0.5, 0.0, 0.0]
    assert sampling.top_k.tolist()[:2] == [0, 7]
    assert sampling.top_p.tolist()[:2] == [1.0, pytest.approx(0.9)]
    assert sampling.min_p.tolist()[:2] == [0.0, pytest.approx(0.1)]
    assert sampling.seed.tolist()[:2] == [0, -1]
    assert sampling.seed.dtype == torch.int64
    assert sampling.positions.tolist()[:2] == [77, 77]
    assert rows.slabs.data_ptr() == tables.rows(0, 4).slabs.data_ptr()


def test_buffers_take_turns() -> None:
    tables = StepTables(StepBuckets(tiny.engine_config()).limits, CPU)
    seen = [tables.begin() for _ in range(2 * BUFFERS)]
    assert len(set(map(id, seen))) == BUFFERS
    assert seen[:BUFFERS] == seen[BUFFERS:]


def test_a_fresh_table_belongs_to_nobody() -> None:
    """A step run over it, as when graphs are captured, touches no slab."""
    tables = StepTables(StepBuckets(tiny.engine_config()).limits, CPU)
    shape = StepShape(4, 32, 16, 36)
    assert (tables.rows(0, 36).slabs == -1).all()
    assert (tables.prefill(shape).tiles == -1).all()
    assert (tables.prefill(shape).row_segments == -1).all()
    assert (tables.logits(shape, 0, 36)[0].slabs == -1).all()
    assert np.all(tables.begin().table("slabs") == 0)
