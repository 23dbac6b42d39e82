"""What does not fit the wire is refused before it is sent."""

import pytest

from kakeya import errors
from kakeya.client import AsyncClient


@pytest.mark.parametrize(
    "options, named",
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 5, "seed": 2**64}, "seed"),
        ({"max_tokens": 5, "temperature": "hot"}, "temperature"),
        ({"max_tokens": 5, "logit_bias": {-4: 1.0}}, "logit_bias"),
    ],
)
def test_what_does_not_fit_the_wire_is_refused_by_name(options: dict[str, object], named: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=named):
        AsyncClient().session("any").generate(**options)  # type: ignore[arg-type]


def test_an_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="temprature"):
        AsyncClient().session("any").generate(5, temprature=1.0)  # type: ignore[call-arg]
