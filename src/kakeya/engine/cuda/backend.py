"""Runs planned batches on a CUDA device. The next step is launched before the results of the last one are
read.

A launch fills tables, sends them, replays a graph and starts to fetch the sampled tokens. It waits for the
device only when the tables of all earlier steps are still in flight. Reading a result waits for that step
alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import TypeVar

import torch
from torch import Tensor

from kakeya.config import EngineConfig
from kakeya.engine.backend import LaunchedStep, Reduction
from kakeya.engine.batch import Segment
from kakeya.engine.cuda.arranging import Arrangement, Arranger, captured_step
from kakeya.engine.cuda.decoder import FusedDecoder
from kakeya.engine.cuda.drafter import DeviceDrafter, DrafterPlan
from kakeya.engine.cuda.graphs import StepGraphs
from kakeya.engine.cuda.launched import HostRows, LaunchedDrafts, LaunchedTokens, SampledTokens
from kakeya.engine.cuda.shapes import StepBuckets, StepShape
from kakeya.engine.cuda.tables import BUFFERS, StepTables
from kakeya.engine.cuda.weights import DeviceWeights
from kakeya.engine.cuda.workspace import Workspace, WorkspacePlan
from kakeya.engine.device import is_lost
from kakeya.engine.sampler import SampleRequest
from kakeya.engine.slab import SlabPool
from kakeya.kernels.gpu import GpuKernels
from kakeya.kernels.gpu.torch_kernels import TorchKernels
from kakeya.models.drafter import StoredDrafter, drafter_rope
from kakeya.types import Numerics, SamplingParams

T = TypeVar("T")

GREEDY = SamplingParams()
_LONGEST_RUN = 2 + 16  # a count, and the tokens that a session gets of one step at most


class CudaBackend:
    """The decoder, its slabs and its tables on one device. Owned by the engine thread."""

    def __init__(
        self,
        weights: DeviceWeights,
        pool: SlabPool,
        numerics: Numerics,
        kernels: GpuKernels,
        fingerprint: str,
        config: EngineConfig,
        device: torch.device,
        drafter: StoredDrafter | None = None,
    ) -> None:
        # Float32 means float32, not TF32.
        torch.set_float32_matmul_precision("highest")
        self._pool, self._fingerprint, self._model = pool, fingerprint, weights.config
        buckets = StepBuckets(config, drafter.config.block if drafter is not None else 0)
        self._head_rows = buckets.limits.head_rows
        self._tables = StepTables(buckets.limits, device)
        self._space = Workspace(WorkspacePlan(weights.config, buckets.limits, weights.dtype), device)
        self._decoder = FusedDecoder(
            weights,
            pool,
            kernels,
            self._tables,
            self._space,
            numerics,
            buckets.limits.rows,
            buckets.draft_counts,
        )
        self._arranger = Arranger(buckets, config.cache, numerics is Numerics.EXACT)
        self._sampled = cycle([SampledTokens(buckets.limits.rows, device) for _ in range(BUFFERS)])
        self._graphs = StepGraphs(self._run_captured)
        self._buckets, self._kernels = buckets, kernels
        self._drafter = self._open_drafter(drafter, weights) if drafter is not None else None
        self._runs = torch.zeros(buckets.most_drafting, _LONGEST_RUN, dtype=torch.int32, device=device)
        self._fetched = cycle([SampledTokens(self._runs.numel(), device) for _ in range(BUFFERS)])

    def _open_drafter(self, stored: StoredDrafter, weights: DeviceWeights) -> DeviceDrafter:
        limits, decoder = self._buckets.limits, self._decoder
        plan = DrafterPlan(
            stored.config, self._model, limits.rows, self._buckets.most_drafting, weights.dtype
        )
        rope = decoder.rope_of_layer[drafter_rope(self._model)]
        return DeviceDrafter(
            stored, weights, self._pool, self._kernels, self._tables, plan, decoder.attention, rope
        )

    def capture(self) -> None:
        """Capture a graph for each bucket, before the first step. On a CPU and with the torch kernels nothing
        is captured, and steps run launch by launch."""
        if self._pool.device.type == "cuda" and not isinstance(self._kernels, TorchKernels):
            self._capture()

    @property
    def pool(self) -> SlabPool:
        return self._pool

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @property
    def any_cut(self) -> bool:
        return True

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    @property
    def runs_ahead(self) -> bool:
        return True

    @property
    def draft_counts(self) -> Sequence[int]:
        return self._buckets.draft_counts if self._drafter is not None else ()

    @property
    def most_drafting(self) -> int:
        return self._buckets.most_drafting

    def is_lost(self) -> bool:
        return is_lost(self._pool.device)

    def launch(
        self,
        segments: Sequence[Segment],
        requests: Sequence[SampleRequest],
        hidden_layers: Sequence[int] = (),
    ) -> LaunchedStep:
        tables = self._tables.begin()
        step = self._arranger.arrange(tables, segments, len(requests), captured=not hidden_layers)
        self._tables.send(tables, requests, step.shape)
        on_host, hidden = HostRows(requests), dict[int, Tensor]()
        if step.is_captured:
            self._graphs.run(step.shape)
            on_host.keep(self._space.logits[: len(requests)])
        else:
            self._run_uncaptured(step, on_host, len(requests), _Taps(step, hidden_layers, hidden))
        rows = None if step.shape.is_mixed else tables.single_rows(step.shape, len(requests))
        return LaunchedTokens(self._fetch(len(requests)), on_host, hidden, rows)

    def launch_drafting(
        self, segments: Sequence[Segment], requests: Sequence[SampleRequest], count: int
    ) -> LaunchedStep:
        tables = self._tables.begin()
        shape = self._arranger.drafting(tables, segments, count)
        self._tables.send(tables, _for_every_place(requests, shape), shape)
        return self._launch_drafts(shape, len(segments))

    def _launch_drafts(self, shape: StepShape, sessions: int) -> LaunchedStep:
        self._graphs.run(shape)
        runs = next(self._fetched)
        runs.fetch(self._runs_of(shape).flatten(), sessions * (shape.drafts + 2))
        return LaunchedDrafts(runs, shape, sessions)

    def follow(self, step: LaunchedStep) -> LaunchedStep:
        if isinstance(step, LaunchedDrafts):
            return self._launch_drafts(step.shape, step.sessions)  # the tables have gone on by themselves
        assert isinstance(step, LaunchedTokens), "a step of another backend"
        assert step.rows is not None, "only a step of single tokens can be followed"
        rows = self._tables.send_next(step.rows)
        self._graphs.run(rows.shape)
        return LaunchedTokens(self._fetch(rows.count), HostRows(()), {}, rows)

    def prepare(self, segments: Sequence[Segment], requests: Sequence[SampleRequest]) -> Callable[[], None]:
        """Arrange the rows of a captured step and send its tables.

        The function that is returned replays the step's graph. It can be called again and again, until
        another step is prepared or launched. Nobody reads the tokens that it samples.
        """
        tables = self._tables.begin()
        step = self._arranger.arrange(tables, segments, len(requests))
        assert step.is_captured, f"no graph is captured for {step.shape}"
        self._tables.send(tables, requests, step.shape)
        return partial(self._replay, step.shape)

    def score(self, segment: Segment, reduce: Reduction[T]) -> list[T]:
        tables = self._tables.begin()
        step = self._arranger.arrange(tables, [segment], segment.rows, captured=False)
        self._tables.send(tables, (), step.shape)
        self._run(step)
        return [reduce(segment.start + first, logits) for first, logits in self._logits(step, segment.rows)]

    def _fetch(self, count: int) -> SampledTokens:
        """Start to fetch the tokens of the step that was just launched."""
        tokens = next(self._sampled)
        tokens.fetch(self._space.sampled, count)
        return tokens

    def _replay(self, shape: StepShape) -> None:
        with torch.inference_mode():
            self._graphs.run(shape)

    def _run_captured(self, shape: StepShape) -> None:
        """What a graph holds: everything from the tables to the sampled tokens."""
        decoder = self._decoder
        if shape.drafts and self._drafter is not None:
            self._drafter.draft(shape, decoder.rotations(shape), decoder.newest)
        self._run(captured_step(shape))
        decoder.sample(shape, decoder.head(shape))
        if shape.drafts and self._drafter is not None:
            self._drafter.judge(shape, self._space.sampled, decoder.newest, self._runs_of(shape))

    def _run(self, step: Arrangement, taps: "_Taps | None" = None) -> None:
        """All layers, observed by the drafter."""
        rotations, drafter = self._decoder.rotations(step.shape), self._drafter
        if drafter is None:
            self._decoder.run(step, rotations, taps)
        else:
            self._decoder.run(step, rotations, taps, drafter.taps(step.shape.rows))
            drafter.observe(step.shape, rotations)

    def _runs_of(self, shape: StepShape) -> Tensor:
        """[sessions, drafts + 2], contiguous."""
        return self._runs.flatten()[: shape.sessions * (shape.drafts + 2)].view(shape.sessions, -1)

    def _run_uncaptured(self, step: Arrangement, on_host: HostRows, count: int, taps: "_Taps") -> None:
        self._run(step, taps if taps.layers else None)
        for first, logits in self._logits(step, count):
            self._decoder.sample(step.shape, logits, first)
            on_host.keep(logits, first)

    def _logits(self, step: Arrangement, count: int) -> Iterator[tuple[int, Tensor]]:
        """The logits, as many rows at a time as the head takes. Each block is valid until the next one."""
        for first in range(0, count, self._head_rows):
            yield first, self._decoder.head(step.shape, first, min(self._head_rows, count - first))

    def _capture(self) -> None:
        with torch.inference_mode():
            self._graphs.capture(self._buckets.captured)


def _for_every_place(requests: Sequence[SampleRequest], shape: StepShape) -> Sequence[SampleRequest]:
    """The requests of a drafting step's rows: those of the newest tokens, further by a place in each wave."""
    padding = [SampleRequest(GREEDY, 0)] * (shape.sessions - len(requests))
    return [
        SampleRequest(request.params, request.position + place)
        for place in range(1 + shape.drafts)
        for request in (*requests, *padding)
    ]


@dataclass(frozen=True)
class _Taps:
    """Copies the outputs of some layers, in segment order."""

    step: Arrangement
    layers: Sequence[int]
    kept: dict[int, Tensor]

    def __call__(self, layer: int, hidden: Tensor) -> None:
        if layer in self.layers:
            order = torch.from_numpy(self.step.order).to(hidden.device, non_blocking=True)
            self.kept[layer] = hidden.index_select(0, order)
