"""Launch parameters: what was fastest on an H200, and rules for shapes that were not measured."""

from dataclasses import dataclass

MMA_COLUMNS = 8  # the fewest columns of a tensor core's tile
MAX_MATMUL_ROWS = 256  # beyond, cuBLAS fills the device
TILE = 64  # rows of a tile, and the columns of x of one step along K
_SMS = 132
_LINE = 128  # bytes
_MAX_SPLIT_COLUMNS = 576  # of x, where more splits make it shorter
_MAX_OWN_COLUMNS = 1024  # of a split; beyond, cuBLAS is faster
# With PDL, programs that outnumber the places which the predecessor leaves free are spread badly over the
# SMs: attention uses PDL only up to this many.
FEW_PROGRAMS = 64


@dataclass(frozen=True)
class GemvLaunch:
    """A program of a GEMV: how many outputs, how many columns at once, on how many warps."""

    outputs: int
    columns: int
    warps: int


_GEMV_LAUNCHES = {
    (6144, 4096): GemvLaunch(4, 4096, 8),
    (4096, 4096): GemvLaunch(2, 2048, 8),
    (24576, 4096): GemvLaunch(2, 4096, 8),
    (4096, 12288): GemvLaunch(1, 4096, 4),
    (151936, 4096): GemvLaunch(4, 2048, 8),
    (960, 576): GemvLaunch(4, 1024, 8),
    (576, 576): GemvLaunch(2, 1024, 4),
    (3072, 576): GemvLaunch(2, 1024, 4),
    (576, 1536): GemvLaunch(1, 1024, 4),
}
_LARGE, _MEDIUM = 24 << 20, 8 << 20  # elements of a weight


def gemv_launch(weight_rows: int, columns: int, gated: bool) -> GemvLaunch:
    """For a weight of this shape. Each output of a gated matmul reads two of its rows."""
    known = _GEMV_LAUNCHES.get((weight_rows, columns))
    if known is not None:
        return known
    widest = max(16, power_of_two(columns))
    if weight_rows * columns >= _LARGE:
        return GemvLaunch(2 if gated else 4, min(widest, 4096), 8)
    if weight_rows * columns >= _MEDIUM:
        return GemvLaunch(2, min(widest, 2048), 8)
    return GemvLaunch(2, min(widest, 1024), 4)


MAX_FEW_ROWS = 16
_FEW_ROWS_WEIGHT = 4 << 20  # elements; with larger weights cuBLAS is as fast


def fits_few_rows(rows: int, weight_rows: int, columns: int) -> bool:
    """Whether our matmul of a few rows, which takes norms, residuals and gates in, is the fastest way."""
    return rows <= MAX_FEW_ROWS and columns % TILE == 0 and weight_rows * columns <= _FEW_ROWS_WEIGHT


def few_rows_depth(columns: int) -> int:
    """Columns of x of one step along K."""
    return 128 if columns % 128 == 0 else TILE


@dataclass(frozen=True)
class TileLaunch:
    """A program of a matmul: a tile of rows by so many columns of the result, over one split of K."""

    columns: int
    splits: int


def tile_launch(rows: int, outputs: int, columns: int, most_splits: int) -> TileLaunch | None:
    """For x of this many columns, with programs that all run at once; None if they cannot."""
    possible = [n for n in range(1, most_splits + 1) if columns % (n * TILE) == 0]
    if not possible or rows > MAX_MATMUL_ROWS:
        return None
    splits = next((n for n in possible if columns <= n * _MAX_SPLIT_COLUMNS), possible[-1])
    for width in (16, 32, 64):
        if -(-rows // TILE) * -(-outputs // width) * splits <= _SMS:
            return TileLaunch(width, splits)
    return None


def own_k_splits(rows: int, outputs: int, columns: int, most_splits: int) -> int:
    """With how many splits our matmul is faster than cuBLAS; 0 if it is not, as with ragged tiles."""
    launch = tile_launch(rows, outputs, columns, most_splits)
    if launch is None or rows % TILE or columns > launch.splits * _MAX_OWN_COLUMNS:
        return 0
    return launch.splits


def tile_stages(columns: int, *, gated: bool) -> int:
    """Pipeline stages, such that an SM has room for two programs."""
    return 4 if gated and columns == TILE else 6


@dataclass(frozen=True)
class AttentionLaunch:
    """A program of attention: how many slots at once, on how many warps, with how many pipeline stages."""

    slots: int
    warps: int
    stages: int
    registers: int | None = None
    """The most that a thread may use."""


def decode_launch(head_dim: int, itemsize: int, columns: int, splits: int, programs: int) -> AttentionLaunch:
    """For so many columns: the query variants of the heads that share a key head.

    With splits, nothing depends on the number of programs: exact numerics always split, and must run the same
    program for one row and for many.
    """
    slot = head_dim * itemsize
    if slot > 256:
        return AttentionLaunch(16, 4 if slot <= 512 else 8, 2)
    if columns > MMA_COLUMNS:
        return AttentionLaunch(32, min(8, columns // MMA_COLUMNS), 3)
    # With many programs per SM each needs few stages, and 16 programs fit on an SM at once.
    crowded = splits == 1 and programs >= 12 * _SMS
    if slot <= 128:
        return AttentionLaunch(32, 1, 2, 128) if crowded else AttentionLaunch(32, 1, 3)
    if splits >= 8:
        return AttentionLaunch(32, 2, 3)
    return AttentionLaunch(16, 1, 2, 128) if crowded else AttentionLaunch(16, 1, 4)


def prefill_launch(head_dim: int, itemsize: int) -> AttentionLaunch:
    slot = head_dim * itemsize
    return AttentionLaunch(32, 4 if slot <= 256 else 8, 3 if slot <= 256 else 2 if slot <= 512 else 1)


def divide_work(units: int, rows: int, programs: int) -> tuple[int, int]:
    """How many programs each row gets, and how many of the row's units each of them takes.

    At most `programs` in all, but at least one per row.
    """
    share = -(-units // max(1, min(units, programs // rows)))
    return -(-units // share), share


def lines(nbytes: int) -> int:
    """A power of two of cache lines that covers so many bytes."""
    return power_of_two(-(-nbytes // _LINE))


def power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()
