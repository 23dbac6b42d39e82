"""Admission: places, the queue for them, and every way out of it."""

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from kakeya.errors import ResourceExhausted, Unavailable
from kakeya.grpc_server import Server
from kakeya.runtime import Runtime
from kakeya.serving.admission import Admission, Place
from kakeya.serving.commons import Commons
from kakeya.serving.config import AdmissionConfig
from kakeya.types import AdmissionPolicy
from kakeya.wire import runtime_pb2 as pb
from support import serving
from support.http_serving import eventually
from support.loops import on_a_loop
from support.serving import new_session, token_ids


def house(**settings: Any) -> tuple[Admission, list[str]]:
    refusals: list[str] = []
    return Admission(AdmissionConfig(**settings), refusals.append), refusals


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def coming(admission: Admission, owner: str) -> "asyncio.Task[Place]":
    async def take() -> Place:
        return await admission.admit(owner)

    return asyncio.create_task(take())


@on_a_loop
async def test_a_full_house_rejects_at_once() -> None:
    admission, refusals = house(max_concurrent=2, policy=AdmissionPolicy.REJECT)
    async with admission.admit("a"):
        place = await admission.admit("b")
        assert admission.running == 2
        with pytest.raises(ResourceExhausted, match="all 2 places"):
            await admission.admit("c")
        place.release()
        place.release()
        assert admission.running == 1
    async with await admission.admit("c"):
        assert admission.running == 1
    assert (admission.running, refusals) == (0, ["rejected"])


@on_a_loop
async def test_a_place_goes_to_who_holds_fewest_then_to_who_came_first() -> None:
    admission, _ = house(max_concurrent=2)
    held = [await admission.admit("busy"), await admission.admit("busy")]
    order: list[str] = []

    async def visit(owner: str, name: str) -> None:
        async with admission.admit(owner):
            order.append(name)
            await settle()

    visits = [
        asyncio.create_task(visit(owner, name))
        for owner, name in (("busy", "b1"), ("x", "x1"), ("x", "x2"), ("y", "y1"))
    ]
    await settle()
    assert (admission.waiting, order) == (4, [])
    held[0].release()
    await asyncio.gather(*visits)
    assert order == ["x1", "x2", "y1", "b1"]
    assert (admission.running, admission.waiting) == (1, 0)


@on_a_loop
async def test_equal_owners_are_served_in_turn_of_what_they_hold() -> None:
    admission, _ = house(max_concurrent=2)
    first, second = await admission.admit("x"), await admission.admit("y")
    waiting = [coming(admission, owner) for owner in ("x", "x", "y")]
    await settle()
    second.release()
    await settle()
    # y holds none now and x one, so y overtakes both.
    assert [task.done() for task in waiting] == [False, False, True]
    first.release()
    await settle()
    assert [task.done() for task in waiting] == [True, False, True]
    (await waiting[0]).release()
    (await waiting[1]).release()
    (await waiting[2]).release()
    assert admission.running == 0


@on_a_loop
async def test_the_queue_is_bounded_in_length_and_time() -> None:
    admission, refusals = house(max_concurrent=1, queue_depth=1, queue_max_wait_s=0.05)
    async with admission.admit("a"):
        assert admission.longest_wait_s == 0.0
        late = coming(admission, "b")
        await settle()
        with pytest.raises(ResourceExhausted, match="queue is full"):
            await admission.admit("c")
        await asyncio.sleep(0.01)
        assert 0.01 <= admission.longest_wait_s < 5.0
        with pytest.raises(ResourceExhausted, match="no place became free in 0.05 s"):
            await late
    assert (admission.running, admission.waiting) == (0, 0)
    assert refusals == ["queue_full", "timed_out"]


@on_a_loop
async def test_zero_waits_for_ever() -> None:
    admission, _ = house(max_concurrent=1, queue_max_wait_s=0)
    place = await admission.admit("a")
    waiting = coming(admission, "b")
    await asyncio.sleep(0.1)
    assert not waiting.done()
    place.release()
    (await waiting).release()


@pytest.mark.parametrize("too_late", [False, True])
@on_a_loop
async def test_who_gives_up_leaves_nothing_behind(too_late: bool) -> None:
    admission, refusals = house(max_concurrent=1)
    place = await admission.admit("a")
    impatient, patient = coming(admission, "b"), coming(admission, "c")
    await settle()
    if too_late:  # its place comes at the very moment of the cancellation
        place.release()
    impatient.cancel()
    with pytest.raises(asyncio.CancelledError):
        await impatient
    place.release()
    (await patient).release()
    assert (admission.running, admission.waiting, refusals) == (0, 0, [])


@on_a_loop
async def test_a_draining_house_lets_nobody_in_and_throws_nobody_out() -> None:
    admission, _ = house(max_concurrent=1)
    place = await admission.admit("a")
    waiting, cancelled = coming(admission, "b"), coming(admission, "b")
    await settle()
    admission.close()
    cancelled.cancel()
    admission.close()
    for attempt in (waiting, admission.admit("c")):
        with pytest.raises(Unavailable, match="shutting down"):
            await _any(attempt)
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert admission.running == 1
    place.release()
    assert admission.running == 0


async def _any(attempt: Awaitable[Place]) -> Place:
    return await attempt


# Over gRPC.

ENDLESS = 10_000_000


@contextmanager
def admitting(model: Path, **settings: Any) -> Iterator[tuple[Any, Admission]]:
    """A stub, and the admission of its server."""

    async def started() -> Server:
        server = Server(serving.ANY_PORT, Commons(admission))
        await server.start()
        await server.open(runtime)
        return server

    admission = Admission(AdmissionConfig(**settings))
    runtime = Runtime.open(str(model), serving.ENGINE)
    server = serving.on_loop(started())
    try:
        with serving.connected(server.address) as stub:
            yield stub, admission
    finally:
        serving.on_loop(server.drain(0))


def generate(stub: Any, count: int, **call: Any) -> Any:
    session_id = new_session(stub, [5, 6, 7])
    return stub.Generate(pb.GenerateRequest(session_id=session_id, max_tokens=count), **call)


def test_a_full_house_rejects_and_a_place_is_given_back_on_every_way_out(model: Path) -> None:
    with admitting(model, max_concurrent=1, policy=AdmissionPolicy.REJECT) as (stub, admission):
        endless = generate(stub, ENDLESS)
        next(endless)
        with pytest.raises(grpc.RpcError) as refused:
            next(generate(stub, 1))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "all 1 places" in refused.value.details()
        endless.cancel()
        eventually(lambda: admission.running == 0)
        assert len(token_ids(generate(stub, 3))) == 3
        with pytest.raises(grpc.RpcError):
            next(stub.Generate(pb.GenerateRequest(session_id="nobody", max_tokens=1)))
        eventually(lambda: admission.running == 0)


def test_a_queue_is_waited_in_and_left(model: Path) -> None:
    with admitting(model, max_concurrent=1) as (stub, admission):
        endless = generate(stub, ENDLESS)
        next(endless)
        with pytest.raises(grpc.RpcError) as late:
            next(generate(stub, 1, timeout=0.3))
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        eventually(lambda: admission.waiting == 0)
        waiting = generate(stub, 3)
        eventually(lambda: admission.waiting == 1)
        endless.cancel()
        assert len(token_ids(waiting)) == 3
        eventually(lambda: admission.running == 0)


def test_a_drain_tells_who_waits(model: Path) -> None:
    with admitting(model, max_concurrent=1) as (stub, admission):
        endless = generate(stub, ENDLESS)
        next(endless)
        waiting = generate(stub, 3)
        eventually(lambda: admission.waiting == 1)

        async def close() -> None:
            admission.close()

        serving.on_loop(close())
        with pytest.raises(grpc.RpcError) as told:
            next(waiting)
        assert told.value.code() is grpc.StatusCode.UNAVAILABLE
        endless.cancel()
