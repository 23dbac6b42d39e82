"""The buckets of steps: each step is padded to the next bucket, and each bucket has a CUDA graph."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from kakeya.config import EngineConfig
from kakeya.kernels.gpu import TILE_ROWS
from kakeya.types import Numerics

# Up to 128 rows a matmul costs about what it costs for one row, so coarse buckets lose little.
_SMALL_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96)
# From here on attention has no KV splits, so any number of rows is possible.
_FEW_ROWS = 64
# Prefill rows beside decode rows.
_PREFILL_BUCKETS = (128, 256, 512, 1024, 2048, 4096)
_DECODE_BESIDE_PREFILL = (0, 64, 256, 1024)
# How many sessions a drafting step has room for, and how many tokens it drafts for each.
_DRAFTING_SESSIONS = (1, 2, 4, 8, 16, 32, 64)
_DRAFT_COUNTS = (3, 7)
# Rows of logits that a captured step has for prompts and drafts, beside those of its decode rows.
_LOGITS_BESIDE = 128
# Segments of prompts and drafts that a captured step has room for.
_SEGMENTS_BESIDE = 128


@dataclass(frozen=True)
class StepShape:
    """How many rows of each kind a step has, padding included.

    Decode rows, single tokens of a session each, come first; the rows of `segments` longer segments follow.
    `logit_rows` rows are gathered for the head; 0 if the decode rows are just those. In a drafting step the
    decode rows are a wave of newest tokens and a wave for each of `drafts` guesses that the device makes.
    """

    decode_rows: int
    prefill_rows: int = 0
    segments: int = 0
    logit_rows: int = 0
    drafts: int = 0

    @property
    def rows(self) -> int:
        return self.decode_rows + self.prefill_rows

    @property
    def is_mixed(self) -> bool:
        """Whether it is more than one token per session with its logits."""
        return self.prefill_rows > 0 or self.logit_rows > 0

    @property
    def sessions(self) -> int:
        """Of a step without prompts, padding included."""
        return self.decode_rows // (1 + self.drafts)

    @property
    def head_rows(self) -> int:
        return self.logit_rows or self.decode_rows

    @property
    def tiles(self) -> int:
        """As many as the segments can need: the last tile of each may not be full."""
        return self.prefill_rows // TILE_ROWS + self.segments


@dataclass(frozen=True)
class StepLimits:
    """The largest step that tables and buffers have room for."""

    rows: int
    segments: int
    tiles: int
    head_rows: int
    """Rows that go through the head at once."""


def decode_buckets(most: int) -> tuple[int, ...]:
    """Batch sizes for up to `most` rows: powers of two and, from 16 on, the sizes halfway between. A large
    last bucket is no larger than it must be."""
    buckets = list(_SMALL_BUCKETS)
    power = 128
    while buckets[-1] < most:
        buckets += [power, power + power // 2]
        power *= 2
    *lower, last = buckets[: bisect_left(buckets, most) + 1]
    return (*lower, last if last <= _FEW_ROWS else min(last, -(-most // _FEW_ROWS) * _FEW_ROWS))


class StepBuckets:
    """The buckets of one engine: which shapes are captured, and which one a step takes.

    In exact numerics only steps of single tokens are captured: the others take their rows in waves.
    """

    def __init__(self, config: EngineConfig, draft_block: int = 0) -> None:
        self.draft_counts = _draft_counts(config, draft_block)
        self._drafting = _up_to(_DRAFTING_SESSIONS, min(config.capacity, _DRAFTING_SESSIONS[-1]))
        self.most_rows = config.step_tokens
        self._decode = decode_buckets(min(config.capacity, config.step_tokens))
        self._beside: Sequence[int] = ()
        self._prefill: Sequence[int] = ()
        if config.numerics is Numerics.FAST:
            self._beside = _up_to(_DECODE_BESIDE_PREFILL, self._decode[-1])
            self._prefill = _up_to(_PREFILL_BUCKETS, self.most_rows)

    @property
    def captured(self) -> tuple[StepShape, ...]:
        """Every shape that gets a graph, the largest first."""
        decode = [StepShape(rows) for rows in self._decode]
        mixed = [
            _mixed(rows, prefill)
            for beside, rows in enumerate(self._beside)
            for place, prefill in enumerate(self._prefill)
            if self._can_come(beside, place)
        ]
        drafting = [self._drafted(rows, count) for rows in self._drafting for count in self.draft_counts]
        return tuple(sorted(decode + mixed + drafting, key=lambda shape: shape.rows, reverse=True))

    @property
    def most_drafting(self) -> int:
        """The sessions of the largest drafting step."""
        return self._drafting[-1] if self.draft_counts else 0

    def drafting(self, sessions: int, count: int) -> StepShape:
        """The captured shape of a step in which the device drafts `count` tokens for each session."""
        return self._drafted(self._drafting[bisect_left(self._drafting, sessions)], count)

    @staticmethod
    def _drafted(sessions: int, count: int) -> StepShape:
        return StepShape(sessions * (1 + count), drafts=count)

    @property
    def limits(self) -> StepLimits:
        shapes = self.captured
        rows = max(self.most_rows + _FEW_ROWS, *(shape.rows for shape in shapes))
        segments = max(1, self.most_rows // 2)
        head_rows = max(shape.head_rows for shape in shapes)
        return StepLimits(rows, segments, rows // TILE_ROWS + segments, head_rows)

    def decode(self, rows: int) -> StepShape:
        """The captured shape of a step of `rows` single tokens."""
        return StepShape(self._decode[bisect_left(self._decode, rows)])

    def uncaptured(self, decode: int, prefill: int, segments: int, logits: int) -> StepShape:
        """The shape of a step without a graph: padded only where attention has KV splits."""
        few = 0 < decode <= _FEW_ROWS
        return StepShape(self.decode(decode).decode_rows if few else decode, prefill, segments, logits)

    def captured_mixed(self, decode: int, prefill: int, segments: int, logits: int) -> StepShape | None:
        """The captured shape for a step with prompts or drafts; None if the step is too large for all."""
        beside, place = bisect_left(self._beside, decode), bisect_left(self._prefill, prefill)
        if beside == len(self._beside) or place == len(self._prefill):
            return None
        shape = _mixed(self._beside[beside], self._prefill[place])
        return shape if segments <= shape.segments and logits <= shape.logit_rows else None

    def _can_come(self, beside: int, place: int) -> bool:
        """Whether a step within the token budget can need these buckets and not the ones below."""
        fewest_beside = self._beside[beside - 1] + 1 if beside else 0
        fewest_prefill = self._prefill[place - 1] + 1 if place else 2
        return fewest_beside + fewest_prefill <= self.most_rows


def _draft_counts(config: EngineConfig, block: int) -> tuple[int, ...]:
    """Two drafting steps on their way must fit into the spare slots, so that a cancel can take them back."""
    most = min(block, config.draft_tokens, (config.cache.spare + 1) // 2 - 1)
    return tuple(sorted({min(count, most) for count in _DRAFT_COUNTS if most > 0}))


def _up_to(buckets: Sequence[int], most: int) -> tuple[int, ...]:
    """Those below `most`, and that."""
    return (*(bucket for bucket in buckets if bucket < most), most)


def _mixed(decode: int, prefill: int) -> StepShape:
    segments, logits = min(prefill // 2, _SEGMENTS_BESIDE), min(prefill, _LOGITS_BESIDE)
    return StepShape(decode, prefill, segments, decode + logits)
