import pytest

from kakeya.kernels import native
from kakeya.models import speed
from kakeya.models.fitting import Geometry
from kakeya.models.speed import MeasuredMatmul, measure

PRODUCT = MeasuredMatmul(weight_bytes_per_s=10e9, multiply_adds_per_s=100e9, threads=2, isa="avx2")


def test_a_token_reads_the_weights_once() -> None:
    tied = Geometry(2, 1, 64, 1_000, 10_000, 100_000_000, tied_head=True)
    own = Geometry(2, 1, 64, 1_000, 10_000, 100_000_000, tied_head=False)
    assert PRODUCT.decode_tokens_per_s(tied, 50_000_000) == pytest.approx(200)
    # A tenth of the file is an embedding of which one row is read.
    assert PRODUCT.decode_tokens_per_s(own, 50_000_000) == pytest.approx(200 / 0.9)
    assert PRODUCT.prompt_tokens_per_s(tied) == pytest.approx(100e9 / 90e6)
    assert PRODUCT.prompt_tokens_per_s(own) == pytest.approx(100e9 / 80e6)


def test_a_product_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "SECONDS", 0.0)
    product = measure(row_outputs=64, prompt_outputs=32)
    assert product is not None
    assert product.threads >= 1
    assert product.isa in ("avx512-vnni", "avx2", "neon-dotprod", "generic")
    # Between a pocket calculator and anything that exists.
    assert 1e6 < product.weight_bytes_per_s < 1e13
    assert 1e6 < product.multiply_adds_per_s < 1e15


def test_the_median_of_several_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 0.1, 0.4, 0.4, 0.5, 0.7, 0.8, 0.9, 2.0, 2.1])  # takes 0.3, 0.2 and 1.1

    class Clock:
        perf_counter = staticmethod(lambda: next(ticks))

    class Still:
        calls = 0

        def linear(self, *_: object) -> None:
            self.calls += 1

    monkeypatch.setattr(speed, "time", Clock)
    monkeypatch.setattr(speed, "SECONDS", 0.9)
    still = Still()
    assert speed._usual_time(still, 1, None) == pytest.approx(0.3)  # type: ignore[arg-type]
    assert still.calls == 4  # the first is not timed


def test_without_native_kernels_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "load", lambda choice: native.load(native.KernelChoice.TORCH))
    assert measure() is None
