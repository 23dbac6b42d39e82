"""Text through the client: the server's own tokenizer, and chats on sessions."""

import pytest

from kakeya.client import AsyncClient, AsyncStream, StopReason
from kakeya.client.chat import Chat
from kakeya.errors import InvalidArgument
from kakeya.text import Tokenizer
from kakeya.text.transcript import Transcript
from kakeya.types import TokenizerFiles
from support.serving import drive
from support.tiny import byte_level_files

SYSTEM = "hello world"


async def whole(stream: AsyncStream[str]) -> str:
    return "".join([piece async for piece in stream])


def test_the_tokenizer_comes_from_the_server_once(server: str) -> None:
    async def scenario(client: AsyncClient) -> None:
        tokenizer = await client.tokenizer
        assert tokenizer.files == byte_level_files()
        assert tokenizer.decode(tokenizer.encode("Größe 日本語")) == "Größe 日本語"
        assert await client.tokenizer is tokenizer

    drive(server, scenario)


def test_a_chat_says_what_its_tokens_say(server: str) -> None:
    async def scenario(client: AsyncClient) -> None:
        tokenizer = await client.tokenizer
        async with await client.create_session() as chat, await client.create_session() as plain:
            said = await whole(chat.chat("the quick brown fox", max_tokens=24))
            messages = [{"role": "user", "content": "the quick brown fox"}]
            await plain.append(tokenizer.chat_ids(messages))
            ids = [token.id async for token in plain.generate(24)]
            assert said == tokenizer.decode(ids)
            assert chat.last_result is not None
            assert chat.last_result.generated_token_count == len(ids)

    drive(server, scenario)


def test_a_second_turn_appends_only_what_is_new(server: str) -> None:
    async def scenario(client: AsyncClient) -> None:
        tokenizer = await client.tokenizer
        async with await client.create_session(system=SYSTEM) as session:
            first = await whole(session.chat("hello", max_tokens=9))
            before = (await session.info()).history_length
            closed = session.last_result is not None and session.last_result.stop_reason is StopReason.EOS
            transcript = Transcript(tokenizer, [0], SYSTEM)
            transcript.add("hello", first, closed=closed)
            added = transcript.next_turn("it's 12345").token_ids
            await whole(session.chat("it's 12345", max_tokens=9))
            assert session.last_result is not None
            expected = before + len(added) + session.last_result.generated_token_count
            assert (await session.info()).history_length == expected
            # All of the first turn but its last token was computed already.
            assert session.last_result.cached_token_count == before - 1

    drive(server, scenario)


def test_a_fork_goes_on_with_the_conversation(server: str) -> None:
    async def scenario(client: AsyncClient) -> None:
        async with await client.create_session(system=SYSTEM) as session:
            await whole(session.chat("hello", max_tokens=9))
            async with await session.fork() as twin:
                assert await whole(twin.chat("world", max_tokens=9)) == await whole(
                    session.chat("world", max_tokens=9)
                )

    drive(server, scenario)


def test_leaving_a_chat_early_keeps_it_usable(server: str) -> None:
    async def scenario(client: AsyncClient) -> None:
        async with await client.create_session(ignore_eos=True, system=SYSTEM) as session:
            async for _piece in session.chat("hello", max_tokens=20_000):
                break
            assert await whole(session.chat("again", max_tokens=12))

    drive(server, scenario)


def test_a_template_that_rewrites_history_moves_to_a_new_session(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It numbers the messages from the end, so every new one changes all before.
    template = (
        "{% for message in messages %}{{ loop.revindex }}{{ message.content }}<|end|>{% endfor %}"
        "<|assistant|>"
    )
    files = byte_level_files()
    rewriting = Tokenizer(TokenizerFiles(files.tokenizer_json, template, eos_token=files.eos_token))

    async def scenario(client: AsyncClient) -> None:
        client._tokenizer = rewriting
        async with await client.create_session(label="moves", system=SYSTEM) as session:
            first = session.session_id
            answer = await whole(session.chat("hello", max_tokens=5))
            await whole(session.chat("world", max_tokens=5))
            assert session.session_id != first
            assert [info.session_id for info in await client.list_sessions()] == [session.session_id]
            info = await session.info()
            assert info.client_label == "moves"
            messages = [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": answer},
                {"role": "user", "content": "world"},
            ]
            assert session.last_result is not None
            generated = session.last_result.generated_token_count
            assert info.history_length == len(rewriting.chat_ids(messages)) + generated

    drive(server, scenario)


def test_a_model_without_a_template_cannot_chat() -> None:
    files = byte_level_files()
    tokenizer = Tokenizer(TokenizerFiles(files.tokenizer_json, eos_token=files.eos_token))
    with pytest.raises(InvalidArgument, match="no chat template"):
        Chat(tokenizer, [0])


def test_the_system_message_is_pinned_up_to_half_of_the_session(server: str) -> None:
    async def scenario(client: AsyncClient) -> None:
        info = await client.server_info()
        tokenizer = await client.tokenizer
        short = Chat(tokenizer, [0], SYSTEM)
        assert info.sink < short.pinned_prefix_tokens(info) < 66
        assert Chat(tokenizer, [0], SYSTEM * 50).pinned_prefix_tokens(info) == 66
        assert Chat(tokenizer, [0]).pinned_prefix_tokens(info) == info.sink

    drive(server, scenario)
