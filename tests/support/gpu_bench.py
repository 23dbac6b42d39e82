"""Where device kernels are tried: an implementation, a device and the dtype of its elements."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kakeya.kernels.gpu import GpuKernels, RowTable


@dataclass(frozen=True)
class Bench:
    kernels: GpuKernels
    device: torch.device
    dtype: torch.dtype

    def put(self, values: Tensor) -> Tensor:
        return values.to(self.device)

    def element(self, *shape: int) -> Tensor:
        """Random elements."""
        return torch.randn(*shape).to(self.device, self.dtype)

    def floats(self, *shape: int) -> Tensor:
        """Random float32, near 1 and so fit for norm weights too."""
        return (1 + 0.3 * torch.randn(*shape)).to(self.device)

    def unset(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Room for a result; what is not written shows."""
        return torch.full(shape, float("nan"), dtype=dtype or self.dtype, device=self.device)

    def ints(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def rows(self, slabs: list[int], positions: list[int], sinks: list[int]) -> RowTable:
        return RowTable(self.ints(slabs), self.ints(positions), self.ints(sinks))

    def near(self, actual: Tensor, expected: Tensor, slack: float = 1.0) -> bool:
        """Whether the difference is what the dtype of `actual` and float32 sums explain."""
        allowed = slack * (1.5e-2 if actual.dtype == torch.bfloat16 else 2e-5)
        actual, expected = actual.double().cpu(), expected.double().cpu()
        return bool((actual - expected).norm() <= allowed * expected.norm()) and torch.allclose(
            actual, expected, rtol=4 * allowed, atol=4 * allowed
        )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal, NaN where the other has NaN."""
    a, b = a.cpu(), b.cpu()
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
