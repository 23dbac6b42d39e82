"""What an HTTP server has once its model is loaded."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kakeya.http_server.completions.chat import ChatService
from kakeya.http_server.responses.service import Responses
from kakeya.http_server.state import HttpState
from kakeya.http_server.text_sessions import TextSessions

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


def load(state: HttpState, runtime: "Runtime") -> Loaded:
    """The services over a runtime. Their caches of sessions are evicted from now on, held conversations
    before the sessions of responses."""
    sessions = TextSessions(runtime, state)
    chat, responses = ChatService(sessions), Responses(sessions)
    state.eviction.add(chat.held.evict)
    state.eviction.add(responses.branches.evict)
    return Loaded(runtime, int(time.time()), sessions, chat, responses)
