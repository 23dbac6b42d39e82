"""Text on top of a session: the server's tokenizer, and a conversation turn by turn."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from copy import copy

from kakeya.client.connection import Connection
from kakeya.client.values import ServerInfo, Token
from kakeya.errors import InvalidArgument
from kakeya.text import AnswerText, Tokenizer
from kakeya.text.transcript import Transcript, Turn
from kakeya.text.turns import pinned_tokens
from kakeya.types import TokenEvent, TokenizerFiles
from kakeya.wire import runtime_pb2 as pb


async def fetch_tokenizer(connection: Connection) -> Tokenizer:
    """The tokenizer of the model that the server runs."""
    reply: pb.GetTokenizerResponse = await connection.call("GetTokenizer", pb.GetTokenizerRequest())
    # Large vocabularies take a while; the event loop has other streams to carry.
    return await asyncio.to_thread(Tokenizer, _files(reply))


def _files(reply: pb.GetTokenizerResponse) -> TokenizerFiles:
    return TokenizerFiles(
        tokenizer_json=reply.tokenizer_json.encode(),
        chat_template=reply.chat_template or None,
        bos_token=reply.bos_token if reply.HasField("bos_token") else None,
        eos_token=reply.eos_token if reply.HasField("eos_token") else None,
        unk_token=reply.unk_token if reply.HasField("unk_token") else None,
        pad_token=reply.pad_token if reply.HasField("pad_token") else None,
    )


class Chat:
    """The conversation that a session holds. Raises InvalidArgument for a model without a chat template."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Iterable[int], system: str | None = None) -> None:
        if not tokenizer.has_chat_template:
            raise InvalidArgument("this model has no chat template; use session.append and session.generate")
        self._tokenizer = tokenizer
        self._transcript = Transcript(tokenizer, eos_token_ids, system)

    @property
    def end_token_ids(self) -> list[int]:
        """The model's own, and the one with which its template closes an answer."""
        return sorted(self._transcript.end_token_ids)

    def pinned_prefix_tokens(self, server: ServerInfo) -> int:
        """Enough to keep the system message for ever, up to half of what a session remembers."""
        return pinned_tokens(self._transcript.opening_tokens(), server.sink, server.window)

    def fork(self) -> "Chat":
        """The same conversation so far, independent from here on."""
        twin = copy(self)
        twin._transcript = self._transcript.fork()
        return twin

    def next_turn(self, text: str) -> Turn:
        """The ids that this message adds."""
        return self._transcript.next_turn(text)

    async def answer(self, text: str, tokens: AsyncGenerator[Token, None]) -> AsyncGenerator[str, None]:
        """The pieces of the answer. However it ends, the exchange is part of the conversation."""
        answer = AnswerText(self._tokenizer, self._transcript.end_token_ids)
        try:
            async for token in tokens:
                answer.feed(TokenEvent(token.id))
                if piece := answer.ready().text:
                    yield piece
            answer.finish()
            if piece := answer.ready().text:
                yield piece
        finally:
            self._transcript.add(text, answer.text, closed=answer.closed)
