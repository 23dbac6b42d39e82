"""When a group of homes grows and shrinks."""

from kakeya.cluster.replicas import Scaling
from kakeya.cluster.scaling import Scaler, Wish
from kakeya.wire import cluster_pb2 as pb


def home(name: str, free: int, queue_seconds: float = 0.0, **others: bool) -> pb.Home:
    figures = {"slabs": 10, "free_slabs": free, "most_sessions": 1000, "queue_seconds": queue_seconds}
    return pb.Home(name=name, **figures, **others)  # type: ignore[arg-type]


def test_it_grows_when_slabs_run_out() -> None:
    scaler = Scaler(Scaling(most=4))
    assert scaler.look([home("a", free=5)]) == Wish()
    assert scaler.look([home("a", free=1)]) == Wish(more=1)
    assert scaler.look([home("a", free=1)], starting=1) == Wish()
    assert scaler.look([home("a", free=0), home("b", free=0, draining=True)]) == Wish(more=1)
    full = [home(name, free=0) for name in "abcd"]
    assert scaler.look(full) == Wish()
    assert scaler.look([*full[:3], home("d", free=0, silent=True)]) == Wish(more=1)


def test_it_grows_when_requests_wait_for_long() -> None:
    scaler = Scaler(Scaling(longest_queue_s=1.0))
    assert scaler.look([home("a", free=5, queue_seconds=1.5), home("b", free=5)]) == Wish()
    assert scaler.look([home("a", free=5, queue_seconds=3.0), home("b", free=5)]) == Wish(more=1)
    assert scaler.look([home("a", free=5), home("b", free=5)]) == Wish()
    silent = home("b", free=5, queue_seconds=30.0, silent=True)
    assert scaler.look([home("a", free=5, queue_seconds=0.5), silent]) == Wish()


def test_it_shrinks_after_a_while_of_calm() -> None:
    now = [0.0]
    scaler = Scaler(Scaling(fewest=1), calm_s=60.0, clock=lambda: now[0])
    idle = [home("a", free=9), home("b", free=9)]
    assert scaler.look(idle) == Wish()
    now[0] = 59.0
    assert scaler.look(idle) == Wish()
    assert scaler.look([home("a", free=1), home("b", free=1)]) == Wish(more=1)
    now[0] = 61.0
    assert scaler.look(idle) == Wish()
    now[0] = 121.0
    assert scaler.look(idle) == Wish(fewer=True)
    assert scaler.look(idle) == Wish()
    assert scaler.look(idle[:1]) == Wish()
