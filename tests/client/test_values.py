"""Messages as values: what an older client does not know is an error."""

import pytest

from kakeya.client.values import generate_result
from kakeya.errors import RemoteError
from kakeya.wire import runtime_pb2 as pb


def test_a_stop_reason_from_the_future_is_an_error() -> None:
    with pytest.raises(RemoteError, match="number 0"):
        generate_result(pb.Done(), 0)
