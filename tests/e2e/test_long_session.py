"""One conversation far past the wrap: what it holds is the same number every turn."""

import pytest

import kakeya

pytestmark = pytest.mark.untraced

TURNS = 300
# sink 2 + window 30; two layers, two kv heads of 16, float32, keys and values
CAPACITY = 32
BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4


def test_memory_grows_to_a_plateau_and_stays(address: str) -> None:
    live = []
    with kakeya.Client(address) as client, client.create_session(ignore_eos=True) as session:
        assert session.info().kv_live_bytes == 0
        for turn in range(TURNS):
            session.append([turn % 200 + 1, 7, 9])
            assert len(list(session.generate(max_tokens=3))) == 3
            live.append(session.info())
    expected = [min(info.history_length - 1, CAPACITY) * BYTES_PER_TOKEN for info in live]
    assert [info.kv_live_bytes for info in live] == expected
    assert live[-1].history_length == 6 * TURNS
    assert live[-1].dropped_token_count == 6 * TURNS - CAPACITY
    assert {info.kv_capacity_bytes for info in live} == {live[0].kv_capacity_bytes}
    assert (
        sum(info.cache_invariant_inv1_violations + info.cache_invariant_inv2_violations for info in live) == 0
    )
