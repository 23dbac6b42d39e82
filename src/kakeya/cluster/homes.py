"""The homes of a cluster as a front end knows them: who is there, how to reach each, where a session is.

What is known comes from the homes themselves. So a front end goes on with what it knows while nobody else
answers, and asks the cluster's head only when no home does.
"""

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc
from grpc.aio import AioRpcError

from kakeya.cluster.members import (
    CHANNEL,
    Metadata,
    Whereabouts,
    credentials,
    home_in,
    newest,
    replica_of,
)
from kakeya.cluster.placement import choose_home
from kakeya.cluster.replicas import Replica, Session
from kakeya.errors import ERROR_NAME_KEY, KakeyaError, ModelNotFound, Unavailable
from kakeya.wire import cluster_pb2 as pb, cluster_pb2_grpc

log = logging.getLogger(__name__)
_LOOK_EVERY_S = 0.5
_LOOK_TIMEOUT_S = 2.0
_PROBE_EVERY_S = 0.1
# Asking the head takes a process of its own.
_ASK_HEAD_EVERY_S = 2.0
HOLD_S = 60.0
# A home that a new list of homes has not heard of is waited for as long as a cluster takes to come up again.
_FORGET_S = 600.0

# Not the module's own numbers, which belong to the program that embeds a front end.
_ANY = random.Random()

# Finds addresses of homes when none that is known answers.
LookUp = Callable[[], Awaitable[Sequence[str]]]


class Link:
    """The connection to one home's process. `is_suspect` after a call that did not come through."""

    def __init__(self, home: pb.Home) -> None:
        self.name, self.address, self.http_url = home.name, home.address, home.http_url
        self.is_suspect = False
        self.probing: asyncio.Task[bool] | None = None
        self.channel: Any = grpc.aio.insecure_channel(home.address, options=CHANNEL)
        self.stub: Any = cluster_pb2_grpc.HomeServiceStub(self.channel)

    async def close(self) -> None:
        await self.channel.close()


class Homes:
    """Used from one event loop, after `open`. What front ends serve, so it lives and ends like a runtime.

    A call for a home that does not answer waits up to `hold_s` seconds for it to come back.
    """

    def __init__(
        self, secret: str, seeds: Sequence[str], look_up: LookUp | None = None, hold_s: float = HOLD_S
    ) -> None:
        self.ended: Future[str | None] = Future()
        self.homes: dict[str, pb.Home] = {}
        self.hold_s = hold_s
        self._secret = secret
        self._seeds = list(seeds)
        self._look_up = look_up
        self._asked_head = 0.0
        self._links: dict[str, Link] = {}
        self._places: dict[str, Replica] = {}
        self._listed: dict[str, tuple[str, float]] = {}
        self._where = Whereabouts()
        self._made = Whereabouts(2**16)
        self._looking: asyncio.Task[None] | None = None
        self._refreshing: asyncio.Task[bool] | None = None

    # Its life.

    async def open(self) -> None:
        """Find the homes, and go on looking. Raises Unavailable when there is none."""
        if self._looking is not None:
            return
        deadline = time.monotonic() + self.hold_s
        while not await self.refresh():
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"no home of the cluster answers at {', '.join(self._seeds) or 'any address'}"
                )
            await asyncio.sleep(_LOOK_EVERY_S)
        self._looking = asyncio.create_task(self._keep_looking(), name="kakeya-homes")

    async def end(self) -> None:
        """Close every connection."""
        for task in (self._looking, self._refreshing):
            if task is not None:
                task.cancel()
        self._looking = self._refreshing = None
        for link in self._links.values():
            await link.close()
        self._links.clear()

    def check_alive(self) -> None:
        """A front end has nothing that could die by itself."""

    def drain(self, timeout: float | None = None) -> bool:
        """What runs belongs to the homes."""
        return True

    def close(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    # Who is there.

    def require_any(self) -> None:
        """Raises Unavailable unless some home was heard of."""
        if not any(not home.silent for home in self.homes.values()):
            raise Unavailable("no home of the cluster can be reached")

    @property
    def default_model(self) -> str:
        """The model of calls that name none: that of the first home. Raises Unavailable."""
        if not self.homes:
            raise Unavailable("the cluster has no home")
        return self.homes[min(self.homes)].model

    def serving(self, model: str) -> list[pb.Home]:
        """The homes that have a model, by name. Raises ModelNotFound."""
        found = [home for _, home in sorted(self.homes.items()) if home.model == model]
        if not found:
            there = ", ".join(sorted({home.model for home in self.homes.values()}))
            raise ModelNotFound(f"there is no model {model!r} in this cluster; there are: {there}")
        return found

    def credentials(self, owner: str) -> Metadata:
        """What shows a home that this front end may call in an owner's name."""
        return credentials(self._secret, owner)

    # Where a call goes.

    async def reach_for_new(self, owner: str, model: str, request_id: str = "") -> Link:
        """The home of a new session, or another one that answers; a repeated request id gets the same.

        Raises what `choose_home` does, and Unavailable.
        """
        known = self.made_at(owner, request_id)
        if known:
            return await self.reach(known)
        link = await self.reach(*self._chosen(model, request_id))
        if request_id:
            self._made.put(f"{owner} {request_id}", link.name)
        return link

    async def reach_beside(self, name: str, owner: str, request_id: str) -> Link | None:
        """A home with room for the copy of a session that is at the home `name`, the nearest one; None where
        there is none that it fits. Raises Unavailable."""
        home = self.homes[name]
        full = replace(replica_of(home), most_sessions=0)
        others = [each for each in self._places.values() if each.name != name]
        try:
            chosen = choose_home(Session("", home.model, 0, shape=home.shape), [*others, full], near=name)
        except KakeyaError:
            return None
        link = await self.reach(chosen.name)
        if request_id:
            self._made.put(f"{owner} {request_id}", link.name)
        return link

    def made_at(self, owner: str, request_id: str) -> str:
        """The home that answered a request to make a session; empty where that is not known."""
        known = self._made.get(f"{owner} {request_id}") if request_id else ""
        return known if known in self.homes else ""

    def _chosen(self, model: str, request_id: str) -> list[str]:
        """The best home for a new session, and those that may have it if that one does not answer."""
        every = self.home_for(model, request_id.encode())
        if all(self.homes[name].silent for name in every):  # an outage, which is waited for
            return every
        chosen = choose_home(Session("", model, 0), self._places.values())
        self._places[chosen.name] = chosen.with_session()  # until the homes tell
        return [chosen.name, *(name for name in every if name != chosen.name)]

    def home_for(self, model: str, key: bytes) -> list[str]:
        """The homes for what `key` stands for, the same ones for the same key: the first that answers."""
        homes = self.serving(model)
        ready = [home.name for home in homes if not (home.draining or home.silent)]
        return ranked(key, ready or [home.name for home in homes])

    def any_home(self) -> str:
        """Some home that was heard of. Raises Unavailable."""
        self.require_any()
        return _ANY.choice([name for name, home in self.homes.items() if not home.silent])

    async def home_of(self, session_id: str) -> str:
        """Where a session should be. If its first home is no more, everybody is asked."""
        name = self._where.get(session_id) or home_in(session_id)
        if name in self.homes:
            return name
        return await self.locate(session_id, "") or self.any_home()  # who says that there is no such session

    async def locate(self, session_id: str, not_at: str) -> str:
        """Where a session is that is not where it was looked for; empty where nobody has it.

        Raises Unavailable when a home that might have it does not answer.
        """
        found = await self._asked(not_at, session_id) if not_at in self.homes else None
        name = found.moved_to if found is not None else ""
        if not name or name not in self.homes:
            name = await self._search(session_id, not_at)
        if name:
            self._where.put(session_id, name)
        return name

    async def _search(self, session_id: str, not_at: str) -> str:
        """Ask everybody else, until one has it or all have said that they do not."""
        deadline = time.monotonic() + self.hold_s
        while True:
            await self.refresh()
            others = [other for other in self.homes if other != not_at]
            found = await asyncio.gather(*(self._asked(other, session_id) for other in others))
            answers = dict(zip(others, found, strict=True))
            # It may have come to a home after that one was asked, and left another before that one was.
            for name in {answer.moved_to for answer in found if answer is not None} & self.homes.keys():
                answers[name] = await self._asked(name, session_id)
            here = [name for name, answer in answers.items() if answer is not None and answer.here]
            if here:
                return here[0]
            mute = [name for name, answer in answers.items() if answer is None]
            if not mute:
                return ""
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"session {session_id!r} may be at {mute[0]!r}, which does not answer: try again later"
                )
            await asyncio.sleep(_PROBE_EVERY_S)

    async def reach(self, *names: str) -> Link:
        """The connection to the first of these homes that answers, once one does. Raises Unavailable when
        that takes too long."""
        deadline = time.monotonic() + self.hold_s
        while True:
            for name in names:
                link = self._links.get(name)
                if link is not None and (not link.is_suspect or await self._probe(link)):
                    return link
            if time.monotonic() > deadline or self.homes.keys().isdisjoint(names):
                raise Unavailable(f"home {names[0]!r} of the cluster cannot be reached: try again later")
            await asyncio.sleep(_PROBE_EVERY_S)
            await self.refresh()

    def broke(self, link: Link) -> None:
        """A call to it did not come through: look before the next."""
        link.is_suspect = True

    # Behind the door.

    async def refresh(self) -> bool:
        """Ask homes, one after another, who is there; whether one has answered. Many wait for one look."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._refresh())
        return await asyncio.shield(self._refreshing)

    async def _refresh(self) -> bool:
        known = list(self._links.values())
        _ANY.shuffle(known)
        known.sort(key=lambda link: link.is_suspect)
        for link in known:
            if await self._probe(link):
                return True
        for address in self._seeds:
            if await self._ask_stranger(address):
                return True
        if self._look_up is not None and time.monotonic() - self._asked_head > _ASK_HEAD_EVERY_S:
            self._asked_head = time.monotonic()
            for address in await self._look_up():
                if await self._ask_stranger(address):
                    return True
        return False

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            try:
                await self.refresh()
            except Exception:
                log.exception("the homes of the cluster cannot be looked for")

    async def _probe(self, link: Link) -> bool:
        """Whether the home answers. Then what it says of the cluster is known."""
        if link.probing is None or link.probing.done():
            link.probing = asyncio.create_task(self._probe_now(link))
        return await asyncio.shield(link.probing)

    async def _probe_now(self, link: Link) -> bool:
        try:
            answer = await link.stub.GetView(
                pb.GetViewRequest(), timeout=_LOOK_TIMEOUT_S, metadata=self.credentials("")
            )
        except AioRpcError:
            link.is_suspect = True
            return False
        link.is_suspect = False
        await self._learn(answer.view)
        return True

    def _may_come_back(self, name: str, asked: str, now: float) -> bool:
        """Whether a list does not have a home because it is new, after the death of the last one."""
        listed, at = self._listed[name]
        return asked != listed and now - at < _FORGET_S

    async def _ask_stranger(self, address: str) -> bool:
        stranger = Link(pb.Home(address=address))
        try:
            return await self._probe(stranger)
        finally:
            await stranger.close()

    async def _learn(self, view: pb.View) -> None:
        """A home under a lower epoch than is known was followed by another, and does not know it yet."""
        told = newest(view.homes)
        now = time.monotonic()
        self._listed |= dict.fromkeys(told, (view.list, now))
        for name, home in self.homes.items():
            if name not in told and self._may_come_back(name, view.list, now):
                told[name] = _silent(home)
            elif name in told and told[name].epoch < home.epoch:
                told[name] = home
        self._listed = {name: self._listed[name] for name in told}
        self.homes = told
        self._places = {name: replica_of(home) for name, home in told.items() if not home.silent}
        for name, home in told.items():
            link = self._links.get(name)
            if link is None or (link.address, link.http_url) != (home.address, home.http_url):
                self._links[name] = Link(home)
                if link is not None:
                    _close_later(link)
        for name in self._links.keys() - told.keys():
            _close_later(self._links.pop(name))

    async def _asked(self, name: str, session_id: str) -> pb.FindSessionResponse | None:
        link = self._links.get(name)
        if link is None:
            return None
        with suppress(AioRpcError):
            found: pb.FindSessionResponse = await link.stub.FindSession(
                pb.FindSessionRequest(session_id=session_id),
                timeout=_LOOK_TIMEOUT_S,
                metadata=self.credentials(""),
            )
            return found
        return None


def ranked(key: bytes, names: Iterable[str]) -> list[str]:
    """Rendezvous hashing: whoever comes or goes, the order of the others stays."""
    return sorted(names, key=lambda name: hashlib.sha256(name.encode() + b"\0" + key).digest())


def _silent(home: pb.Home) -> pb.Home:
    silent = pb.Home()
    silent.CopyFrom(home)
    silent.silent = True
    return silent


def came_through(error: AioRpcError) -> bool:
    """Whether the home itself has answered with this error. Its errors are named."""
    return any(key == ERROR_NAME_KEY for key, _ in error.trailing_metadata() or ())


def _close_later(link: Link) -> None:
    """Calls over it may still run: they end with their home."""
    loop = asyncio.get_running_loop()
    loop.call_later(60.0, lambda: loop.create_task(link.close()))
