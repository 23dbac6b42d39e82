"""Launch parameters: what was quickest on an H200, and rules for shapes that were not measured."""

from dataclasses import dataclass

ATTENTION_BLOCK = 32  # slots that a program takes at once
MATRIX_ROWS = 16  # the fewest rows a matrix unit takes
MAX_PRODUCT_ROWS = 256  # beyond, a library's products have enough to do
TILE = 64  # rows of a tile, and columns of x that are multiplied at once
_PROGRAMS = 132  # one for each multiprocessor
_LONGEST_SHARE = 576  # columns of x
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


def tile_stages(columns: int, *, gated: bool) -> int:
    """How many stages are on their way at once, such that a multiprocessor has room for two programs."""
    return 4 if gated and columns == TILE else 6


def decode_warps(head_dim: int, itemsize: int) -> int:
    return 2 if head_dim * itemsize <= 256 else 4 if head_dim * itemsize <= 512 else 8


def prompt_warps(head_dim: int, itemsize: int) -> int:
    return 4 if head_dim * itemsize <= 256 else 8


def attention_stages(head_dim: int, itemsize: int) -> int:
    """How many blocks of keys and values are on their way at once: up to 3, if shared memory holds them."""
    return 3 if head_dim * itemsize <= 256 else 2 if head_dim * itemsize <= 512 else 1


def shared_out(units: int, rows: int, programs: int) -> tuple[int, int]:
    """How many programs share the units of each row, and how many units each takes.

    `programs` in all or fewer, but never less than one a row.
    """
    share = -(-units // max(1, min(units, programs // rows)))
    return -(-units // share), share


def power_of_two(n: int) -> int:
    """The least one that is not less than n."""
    return 1 << (n - 1).bit_length()
