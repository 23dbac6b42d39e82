"""What an HTTP server has once its model is loaded."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kakeya.http_server.archive import Archive
from kakeya.http_server.completions.chat import ChatService
from kakeya.http_server.responses.service import Responses
from kakeya.http_server.state import HttpState
from kakeya.http_server.text_sessions import HOLDER, TextSessions

if TYPE_CHECKING:  # torch takes a second to import, and the server listens before that
    from kakeya.runtime import Runtime


@dataclass(frozen=True)
class Loaded:
    """The runtime and the services over it. Used from one event loop."""

    runtime: "Runtime"
    opened_at: int
    sessions: TextSessions
    chat: ChatService
    responses: Responses
    archive: Archive


async def load(state: HttpState, runtime: "Runtime") -> Loaded:
    """The services over a runtime, with what is stored of theirs. Their caches of sessions are evicted from
    now on, held conversations before the sessions of responses. Raises StateDamaged."""
    sessions, archive = TextSessions(runtime, state), Archive(runtime)
    chat, responses = ChatService(sessions, archive), Responses(sessions, archive)
    found = runtime.held_sessions(HOLDER)
    used = await responses.recover(found) | await chat.held.recover(found)
    for session_id, (owner, _) in found.items():
        if session_id not in used:  # what used it was not answered before the process died
            await state.workers.call(sessions.discard, owner, session_id)
    state.eviction.add(chat.held.evict)
    state.eviction.add(responses.branches.evict)
    return Loaded(runtime, int(time.time()), sessions, chat, responses, archive)
