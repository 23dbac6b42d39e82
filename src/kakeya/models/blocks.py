"""Matrices in GGML's block formats: the bytes as a file has them, and the weights that they stand for.

Every format cuts a row into blocks. A block has one or two floats of its own and integers: a level for each
column and, in the formats of 256 columns, a factor and perhaps an offset for each group of 16 or 32 of them.

    weight = level * scale + minimum                       32 columns
    weight = level * (scale * factor) - minimum * offset   256 columns
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from kakeya.errors import CorruptCheckpoint
from kakeya.kernels.native import BLOCK_BYTES

# Rows are expanded a slice at a time, so that temporaries stay in a CPU's cache, or small beside the model on
# a device.
_CPU_SLICE_ELEMENTS = 1 << 19
DEVICE_SLICE_ELEMENTS = 1 << 22

# The sixteen levels of the formats whose 4-bit integers are places in a table. MXFP4's are doubled.
_IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MXFP4_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_MXFP4_LARGEST_EXPONENT = 252  # of which twelve halves are still a float32


class BlockFormat(Enum):
    """GGML's number of the format, and where a block has its float16 scale and minimum.

    MXFP4 has a power of two for a scale: one byte, the first.
    """

    Q4_0 = (2, 0, None)
    Q4_1 = (3, 0, 2)
    Q5_0 = (6, 0, None)
    Q5_1 = (7, 0, 2)
    Q8_0 = (8, 0, None)
    Q2_K = (10, 80, 82)
    Q3_K = (11, 108, None)
    Q4_K = (12, 0, 2)
    Q5_K = (13, 0, 2)
    Q6_K = (14, 208, None)
    IQ4_NL = (20, 0, None)
    IQ4_XS = (23, 0, None)
    MXFP4 = (39, None, None)

    def __init__(self, ggml_type: int, scale_at: int | None, minimum_at: int | None) -> None:
        self.ggml_type = ggml_type
        self.scale_at = scale_at
        self.minimum_at = minimum_at

    @property
    def columns(self) -> int:
        """Of one block."""
        return BLOCK_BYTES[self.name][0]

    @property
    def nbytes(self) -> int:
        """Of one block."""
        return BLOCK_BYTES[self.name][1]


@dataclass(frozen=True)
class BlockTensor:
    """A matrix of whole blocks. `raw` may be a view of a file: do not write to it."""

    format: BlockFormat
    raw: Tensor  # uint8 [rows, row_bytes], contiguous, on any device
    name: str = "of blocks"  # for errors

    def __post_init__(self) -> None:
        assert self.raw.dtype == torch.uint8
        assert self.raw.is_contiguous()
        assert self.raw.shape[1] % self.format.nbytes == 0

    @property
    def shape(self) -> tuple[int, int]:
        rows, row_bytes = self.raw.shape
        return rows, row_bytes // self.format.nbytes * self.format.columns

    @property
    def nbytes(self) -> int:
        return self.raw.numel()

    def __getitem__(self, rows: slice) -> "BlockTensor":
        """Neighbouring rows, a view."""
        return replace(self, raw=self.raw[rows])

    def to(self, device: torch.device) -> "BlockTensor":
        return replace(self, raw=self.raw.to(device))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix in `dtype`, where `raw` is: computed in float32, rounded once."""
        rows, columns = self.shape
        out = torch.empty(rows, columns, dtype=dtype, device=self.raw.device)
        on_cpu = self.raw.device.type == "cpu"
        for part in row_slices(self.shape, _CPU_SLICE_ELEMENTS if on_cpu else DEVICE_SLICE_ELEMENTS):
            blocks = self.raw[part].view(-1, self.format.nbytes)
            out[part] = _expand(self.format, blocks).view(-1, columns)
        return out

    def check(self) -> None:
        """Raises CorruptCheckpoint unless every weight is a finite number."""
        if not self.has_finite_scales():
            raise CorruptCheckpoint(f"tensor {self.name} holds scales that are not finite numbers")

    def has_finite_scales(self) -> bool:
        """Whether every weight is a finite number: looks at the floats of the blocks alone."""
        blocks = self.raw.view(-1, self.format.nbytes)
        if self.format is BlockFormat.MXFP4:
            return int(blocks[:, 0].max()) <= _MXFP4_LARGEST_EXPONENT
        floats = [at for at in (self.format.scale_at, self.format.minimum_at) if at is not None]
        # The five bits of a float16's exponent, in its second byte, are all set in infinities and NaNs.
        return all(int((blocks[:, at + 1] & 0x7C).max()) < 0x7C for at in floats)


def row_slices(shape: tuple[int, int], elements: int) -> Iterator[slice]:
    """All rows of a matrix, at most `elements` elements at a time."""
    rows, columns = shape
    step = max(1, elements // columns)
    for start in range(0, rows, step):
        yield slice(start, start + step)


class Integers(NamedTuple):
    """The integers of n blocks. Where factors or offsets are None, a block has one scale or minimum."""

    levels: Tensor  # [n, columns]
    factors: Tensor | None = None  # [n, groups]
    offsets: Tensor | None = None  # [n, groups]


def _expand(form: BlockFormat, blocks: Tensor) -> Tensor:
    """Blocks [n, bytes] to weights, float32 [n, columns]."""
    levels, scale, minimum = affine(form, blocks)
    weights = levels.view(*scale.shape, -1).float()
    weights.mul_(scale.unsqueeze(-1))
    if minimum is not None:
        weights.add_(minimum.unsqueeze(-1))
    return weights.view(-1, form.columns)


def affine(form: BlockFormat, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """The levels of blocks [n, bytes], and for each group of them the float32 scale and minimum [n, groups]:
    weight = level * scale + minimum. Scale and minimum are not rounded."""
    integers = unpack(form, blocks)
    scale = _power_of_two(blocks) if form.scale_at is None else float16_at(blocks, form.scale_at)
    if integers.factors is not None:
        scale = scale * integers.factors.float()
    if form.minimum_at is None:
        return integers.levels, scale, None
    minimum = float16_at(blocks, form.minimum_at)
    if integers.offsets is not None:
        minimum = -(minimum * integers.offsets.float())
    return integers.levels, scale, minimum


def unpack(form: BlockFormat, blocks: Tensor) -> Integers:
    """The integers of blocks [n, bytes]."""
    match form:
        case BlockFormat.Q4_0:
            return Integers(_centred(_fields(blocks[:, 2:], 16, 4), 8))
        case BlockFormat.Q4_1:
            return Integers(_fields(blocks[:, 4:], 16, 4))
        case BlockFormat.Q5_0:
            return Integers(_centred(_five_bits(blocks[:, 2:]), 16))
        case BlockFormat.Q5_1:
            return Integers(_five_bits(blocks[:, 4:]))
        case BlockFormat.Q8_0:
            return Integers(blocks[:, 2:].contiguous().view(torch.int8))
        case BlockFormat.Q2_K:
            return Integers(_fields(blocks[:, 16:80], 32, 2), blocks[:, :16] & 0x0F, blocks[:, :16] >> 4)
        case BlockFormat.Q3_K:
            levels = _fields(blocks[:, 32:96], 32, 2).add_(_fields(blocks[:, :32], 32, 1), alpha=4)
            factors = _fields(blocks[:, 96:104], 8, 4).add_(_fields(blocks[:, 104:108], 4, 2), alpha=16)
            return Integers(_centred(levels, 4), _centred(factors, 32))
        case BlockFormat.Q4_K:
            return Integers(_fields(blocks[:, 16:], 32, 4), *_six_bit_pairs(blocks[:, 4:16]))
        case BlockFormat.Q5_K:
            levels = _fields(blocks[:, 48:], 32, 4).add_(_fields(blocks[:, 16:48], 32, 1), alpha=16)
            return Integers(levels, *_six_bit_pairs(blocks[:, 4:16]))
        case BlockFormat.Q6_K:
            levels = _fields(blocks[:, :128], 64, 4).add_(_fields(blocks[:, 128:192], 32, 2), alpha=16)
            return Integers(_centred(levels, 32), blocks[:, 192:208].contiguous().view(torch.int8))
        case BlockFormat.IQ4_NL:
            return Integers(_looked_up(_fields(blocks[:, 2:], 16, 4), _IQ4_LEVELS))
        case BlockFormat.IQ4_XS:
            factors = _fields(blocks[:, 4:8], 1, 4).add_(_fields(blocks[:, 2:4], 1, 2), alpha=16)
            levels = _looked_up(_fields(blocks[:, 8:], 16, 4), _IQ4_LEVELS)
            return Integers(levels, _centred(factors, 32))
        case BlockFormat.MXFP4:
            return Integers(_looked_up(_fields(blocks[:, 1:], 16, 4), _MXFP4_LEVELS))


def float16_at(blocks: Tensor, at: int) -> Tensor:
    """The float16 at a place of every block, float32 [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _power_of_two(blocks: Tensor) -> Tensor:
    """2 ** (e - 128) of the first byte e, [n, 1]: half of what MXFP4 means, since its levels are doubled."""
    exponent = blocks[:, :1].int()
    subnormal = torch.full_like(exponent, 1 << 21) << exponent.clamp(max=1)
    return torch.where(exponent < 2, subnormal, (exponent - 1) << 23).view(torch.float32)


def _fields(packed: Tensor, run: int, width: int) -> Tensor:
    """The fields of `width` bits of bytes [n, m], uint8 [n, 8 / width * m].

    Each `run` neighbouring bytes give their lowest fields first, then their next ones, and so on.
    """
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)
    spread = packed.reshape(packed.shape[0], -1, 1, run) >> shifts.view(-1, 1)
    return spread.bitwise_and_((1 << width) - 1).view(packed.shape[0], -1)


def _centred(levels: Tensor, middle: int) -> Tensor:
    return levels.view(torch.int8).sub_(middle)


def _looked_up(places: Tensor, table: tuple[int, ...]) -> Tensor:
    levels = torch.tensor(table, dtype=torch.int8, device=places.device)
    return levels[places.int()]


def _five_bits(packed: Tensor) -> Tensor:
    """The fifth bits of 32 columns, in order, then their low halves."""
    return _fields(packed[:, 4:], 16, 4).add_(_fields(packed[:, :4], 1, 1), alpha=16)


def _six_bit_pairs(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Factors and offsets of eight groups in twelve bytes.

    Four bytes have the first four factors, four the first four offsets, and the last four the low halves of
    the others, whose upper two bits are those that six bits leave free in the first eight.
    """
    first, others = packed[:, :8], packed[:, 8:]
    upper = (first >> 6) << 4
    factors = torch.cat([first[:, :4] & 0x3F, (others & 0x0F) | upper[:, :4]], dim=1)
    offsets = torch.cat([first[:, 4:] & 0x3F, (others >> 4) | upper[:, 4:]], dim=1)
    return factors, offsets
