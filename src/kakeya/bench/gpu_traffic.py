"""What one call of a device kernel must move or compute, counted from a shape's sizes. Pure arithmetic."""

from dataclasses import dataclass

from kakeya.bench.gpu_shapes import ELEMENT_BYTES, Shape

_FLOAT = 4  # bytes of what is not an element: hidden states, rotations, logits


@dataclass(frozen=True)
class KernelTraffic:
    """Bytes to read and write, each once; past the wrap, where a session remembers `capacity` tokens.

    Norms' weights and the tables that describe the rows are not counted: a few bytes a row.
    """

    shape: Shape
    capacity: int

    def embed(self, rows: int) -> int:
        return rows * self.shape.model.hidden_size * (ELEMENT_BYTES + _FLOAT)

    def rotations(self, rows: int) -> int:
        """Sines and cosines of half a head, for the window and for the sinks."""
        return rows * 2 * self.shape.model.head_dim * _FLOAT

    def add_norm(self, rows: int) -> int:
        """The hidden state is read and written, an addend read, the normed state written."""
        return rows * self.shape.model.hidden_size * 2 * (_FLOAT + ELEMENT_BYTES)

    def norm_rows(self, rows: int) -> int:
        """All queries of a row, read and written."""
        return rows * 2 * self.shape.model.query_size * ELEMENT_BYTES

    def gated(self, rows: int) -> int:
        return rows * 3 * self.shape.model.intermediate_size * ELEMENT_BYTES

    def one_row_product(self, outputs: int, inputs: int) -> int:
        """The matrix alone: the vectors are a hundredth of it or less."""
        return outputs * inputs * ELEMENT_BYTES

    def product(self, rows: int, outputs: int, inputs: int, sides: int) -> int:
        """`sides`: 2 where a gate and what it gates are multiplied into one."""
        return (sides * outputs * inputs + rows * (inputs + outputs)) * ELEMENT_BYTES

    def decode_attention(self, rows: int) -> int:
        """All that a session remembers, of which the new token comes from the product and is stored."""
        kept = (self.capacity + 1) * self._token
        return rows * (kept + self._queries) + self.rotations(rows)

    def store_rows(self, rows: int) -> int:
        """Sinks have no part in it, so that half of the rotations will do."""
        return rows * 2 * self._token + self.rotations(rows) // 2

    def prompt_attention(self, rows: int) -> int:
        """The block is read, and the slab, in which the block's last tokens are stored."""
        slab = (self.capacity + min(rows, self.capacity)) * self._token
        return slab + rows * (self._token + self._queries) + self.rotations(rows)

    def prompt_attention_flops(self, rows: int) -> int:
        """Of scores and mixtures: every row sees as many tokens as a session remembers."""
        return 4 * rows * self.capacity * self.shape.model.query_size

    def choose(self, rows: int) -> int:
        return rows * self.shape.model.vocab_size * _FLOAT

    @property
    def _token(self) -> int:
        """A token's key and value in one layer."""
        return 2 * self.shape.model.kv_size * ELEMENT_BYTES

    @property
    def _queries(self) -> int:
        """A row's queries, and what attention makes of them."""
        return 2 * self.shape.model.query_size * ELEMENT_BYTES
