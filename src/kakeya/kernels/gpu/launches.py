"""Launch parameters: what was quickest on an H200, and rules for shapes that were not measured."""

from dataclasses import dataclass

MATRIX_COLUMNS = 8  # the fewest that a matrix unit takes
MAX_PRODUCT_ROWS = 256  # beyond, a library's products have enough to do
TILE = 64  # rows of a tile, and columns of x that are multiplied at once
_PROGRAMS = 132  # one for each multiprocessor
_LONGEST_SHARE = 576  # columns of x, where more parts make it shorter
_LONGEST_OWN = 1024  # beyond, a library's products are quicker
# Programs that outnumber the places left by the launch ahead of them are spread badly when they are placed
# before it is done: only so many are.
FEW_PROGRAMS = 64


@dataclass(frozen=True)
class ProductLaunch:
    """One program of a one-row product: how many outputs, how many columns at once, on how many warps."""

    outputs: int
    columns: int
    warps: int


_PRODUCTS = {
    (6144, 4096): ProductLaunch(4, 4096, 8),
    (4096, 4096): ProductLaunch(2, 2048, 8),
    (24576, 4096): ProductLaunch(2, 4096, 8),
    (4096, 12288): ProductLaunch(1, 4096, 4),
    (151936, 4096): ProductLaunch(4, 2048, 8),
    (960, 576): ProductLaunch(4, 1024, 8),
    (576, 576): ProductLaunch(2, 1024, 4),
    (3072, 576): ProductLaunch(2, 1024, 4),
    (576, 1536): ProductLaunch(1, 1024, 4),
}
_LARGE, _MEDIUM = 24 << 20, 8 << 20  # elements of a weight


def product_launch(weight_rows: int, columns: int, gated: bool) -> ProductLaunch:
    """For a weight of this shape; a gated product's outputs each read two of its rows."""
    known = _PRODUCTS.get((weight_rows, columns))
    if known is not None:
        return known
    widest = max(16, power_of_two(columns))
    if weight_rows * columns >= _LARGE:
        return ProductLaunch(2 if gated else 4, min(widest, 4096), 8)
    if weight_rows * columns >= _MEDIUM:
        return ProductLaunch(2, min(widest, 2048), 8)
    return ProductLaunch(2, min(widest, 1024), 4)


@dataclass(frozen=True)
class TileLaunch:
    """One program of a product of several rows: a tile of rows by so many outputs, over one part of x."""

    columns: int
    parts: int


def tile_launch(rows: int, outputs: int, columns: int, most_parts: int) -> TileLaunch | None:
    """For x of this many columns, shared out among programs that all run at once; None if they cannot."""
    shares = [n for n in range(1, most_parts + 1) if columns % (n * TILE) == 0]
    if not shares or rows > MAX_PRODUCT_ROWS:
        return None
    parts = next((n for n in shares if columns <= n * _LONGEST_SHARE), shares[-1])
    for width in (16, 32, 64):
        if -(-rows // TILE) * -(-outputs // width) * parts <= _PROGRAMS:
            return TileLaunch(width, parts)
    return None


def own_parts(rows: int, outputs: int, columns: int, most_parts: int) -> int:
    """In how many parts such a product is quicker than a library's; 0 if it is not, as with ragged tiles."""
    launch = tile_launch(rows, outputs, columns, most_parts)
    if launch is None or rows % TILE or columns > launch.parts * _LONGEST_OWN:
        return 0
    return launch.parts


def tile_stages(columns: int, *, gated: bool) -> int:
    """How many stages are on their way at once, such that a multiprocessor has room for two programs."""
    return 4 if gated and columns == TILE else 6


@dataclass(frozen=True)
class AttentionLaunch:
    """One program of attention: how many slots at once, on how many warps, how many blocks on their way."""

    slots: int
    warps: int
    stages: int
    registers: int | None = None
    """That a thread may have at most."""


def decode_launch(head_dim: int, itemsize: int, columns: int, splits: int, programs: int) -> AttentionLaunch:
    """For so many columns: looks of heads that share their keys.

    Where rows are split, nothing depends on how many programs there are: what exact numerics run must be the
    same for one row and for all.
    """
    slot = head_dim * itemsize
    if slot > 256:
        return AttentionLaunch(16, 4 if slot <= 512 else 8, 2)
    if columns > MATRIX_COLUMNS:
        return AttentionLaunch(32, min(8, columns // MATRIX_COLUMNS), 3)
    # Where a multiprocessor's programs are many, each needs little on its way, and 16 fit on it at once.
    crowded = splits == 1 and programs >= 12 * _PROGRAMS
    if slot <= 128:
        return AttentionLaunch(32, 1, 2, 128) if crowded else AttentionLaunch(32, 1, 3)
    if splits >= 8:
        return AttentionLaunch(32, 2, 3)
    return AttentionLaunch(16, 1, 2, 128) if crowded else AttentionLaunch(16, 1, 4)


def prompt_launch(head_dim: int, itemsize: int) -> AttentionLaunch:
    slot = head_dim * itemsize
    return AttentionLaunch(32, 4 if slot <= 256 else 8, 3 if slot <= 256 else 2 if slot <= 512 else 1)


def shared_out(units: int, rows: int, programs: int) -> tuple[int, int]:
    """How many programs share the units of each row, and how many units each takes.

    `programs` in all or fewer, but never less than one a row.
    """
    share = -(-units // max(1, min(units, programs // rows)))
    return -(-units // share), share


def power_of_two(n: int) -> int:
    """The least one that is not less than n."""
    return 1 << (n - 1).bit_length()
