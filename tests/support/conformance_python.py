"""The Python SDK plays cases of the conformance suite. `sdks/typescript/tests/conformance.ts` is its twin."""

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from kakeya.client import (
    AsyncClient,
    AsyncSession,
    AsyncStream,
    GenerateOptions,
    GenerateResult,
    Retry,
    ServerInfo,
    SessionInfo,
    Token,
)
from kakeya.errors import KakeyaError
from kakeya.text import Tokenizer
from kakeya.types import TokenizerFiles
from support.conformance import Case, Outcome, Step

_RETRY = {"first_delay": 0.01, "longest_delay": 0.1}
_OPTIONS = GenerateOptions.__annotations__.keys()


async def play(case: Case, address: str, server: str, tokenizers: dict[str, Any]) -> list[Outcome]:
    """What came of each step at an address before the server's. The case's sessions are closed at the end."""
    player = _Player(case, address, server, tokenizers)
    try:
        return [await player.outcome(step) for step in case.steps]
    finally:
        await player.leave()


class _Player:
    def __init__(self, case: Case, address: str, server: str, tokenizers: dict[str, Any]) -> None:
        direct = {"direct": _client(server)}
        named = {name: _client(address, **each) for name, each in (case.clients or {"main": {}}).items()}
        self._clients = direct | named
        self._tokenizers = tokenizers
        self._sessions: dict[str, AsyncSession] = {}
        self._held: dict[str, AsyncStream[Token]] = {}
        self._files: dict[str, bytes] = {}

    async def outcome(self, step: Step) -> Outcome:
        try:
            return {"gives": await getattr(self, step["do"])(step)}
        except (KakeyaError, TypeError) as error:
            status = getattr(error, "status", None)
            told = {"error": type(error).__name__, "message": str(error)}
            return {"fails": told | {"status": None if status is None else status.name}}

    async def leave(self) -> None:
        for stream in self._held.values():
            await stream.aclose()
        for session in self._sessions.values():
            with suppress(KakeyaError):  # most were closed by their case
                await self._clients["direct"].session(session.session_id).close()
        for client in self._clients.values():
            await client.close()

    def _session(self, step: Step) -> AsyncSession:
        return self._sessions[step.get("session", "s")]

    def _client(self, step: Step) -> AsyncClient:
        return self._clients[step.get("client", "main")]

    async def create(self, step: Step) -> None:
        names = ("label", "system", "eos_token_ids", "ignore_eos", "pinned_prefix_tokens", "recall_tokens")
        given = {name: step[name] for name in names if name in step}
        self._sessions[step.get("session", "s")] = await self._client(step).create_session(**given)

    async def attach(self, step: Step) -> None:
        session_id = step["id"] if "id" in step else self._sessions[step["to"]].session_id
        self._sessions[step["session"]] = self._client(step).session(session_id)

    async def append(self, step: Step) -> int:
        return await self._session(step).append(step["token_ids"], step.get("expected_history_length"))

    async def generate(self, step: Step) -> dict[str, Any]:
        stream = self._session(step).generate(step["max_tokens"], **_options(step))
        tokens = await self._read(stream, step)
        told: dict[str, Any] = {"token_ids": [token.id for token in tokens], "result": _told(stream.result)}
        if "logprobs" in step:
            told["logprobs"] = [_candidates(token) for token in tokens]
        return told

    async def _read(self, stream: AsyncStream[Token], step: Step) -> list[Token]:
        if step.get("cancel_after") == 0:
            stream.cancel()
        tokens = []
        async for token in stream:
            tokens.append(token)
            if len(tokens) == step.get("cancel_after"):
                stream.cancel()
            if len(tokens) == step.get("leave_after"):
                await stream.aclose()
            if len(tokens) == step.get("hold_after"):
                self._held[step.get("session", "s")] = stream
                break
        return tokens

    async def release(self, step: Step) -> None:
        await self._held.pop(step.get("session", "s")).aclose()

    async def chat(self, step: Step) -> dict[str, Any]:
        stream = self._session(step).chat(step["text"], max_tokens=step["max_tokens"], **_options(step))
        pieces = [piece async for piece in stream]
        return {"text": "".join(pieces), "result": _told(stream.result)}

    async def info(self, step: Step) -> Any:
        return _told(await self._session(step).info())

    async def recall(self, step: Step) -> Any:
        ranges = await self._session(step).recall(
            [(start, end) for start, end in step["ranges"]], remember=step.get("remember", False)
        )
        return [asdict(each) for each in ranges]

    async def export_session(self, step: Step) -> None:
        self._files[step["file"]] = await self._session(step).export()

    async def import_session(self, step: Step) -> None:
        file = self._files[step["file"]]
        session = await self._client(step).import_session(
            file[: step.get("cut")], label=step.get("label", "")
        )
        self._sessions[step["session"]] = session

    async def fork(self, step: Step) -> None:
        self._sessions[step["as"]] = await self._session(step).fork()

    async def close(self, step: Step) -> int | None:
        return await self._session(step).close()

    async def list_sessions(self, step: Step) -> list[str]:
        return [info.client_label for info in await self._client(step).list_sessions()]

    async def server_info(self, step: Step) -> Any:
        return _told(await self._client(step).server_info())

    async def encode(self, step: Step) -> list[int]:
        special, bos = step.get("special", True), step.get("bos", False)
        return (await self._tokenizer(step)).encode(step["text"], special=special, bos=bos)

    async def decode(self, step: Step) -> str:
        return (await self._tokenizer(step)).decode(step["token_ids"], special=step.get("special", False))

    async def token_text(self, step: Step) -> str:
        return (await self._tokenizer(step)).token_text(step["token_id"])

    async def render(self, step: Step) -> str:
        tools, prompt = step.get("tools", []), step.get("add_generation_prompt", True)
        tokenizer = await self._tokenizer(step)
        return tokenizer.render_chat(step["messages"], add_generation_prompt=prompt, tools=tools)

    async def chat_ids(self, step: Step) -> list[int]:
        return (await self._tokenizer(step)).chat_ids(step["messages"])

    async def at_once(self, step: Step) -> list[list[Outcome]]:
        async def branch(steps: list[Step]) -> list[Outcome]:
            return [await self.outcome(each) for each in steps]

        return await asyncio.gather(*map(branch, step["branches"]))

    async def _tokenizer(self, step: Step) -> Tokenizer:
        if "template" in step:
            return _with_template(self._tokenizers["sentencepiece"], step["template"])
        if "tokenizer" in step:
            return _tokenizer(self._tokenizers[step["tokenizer"]])
        return await self._client(step).tokenizer


def _client(
    address: str,
    api_key: str | None = "first-key",
    model: str | None = None,
    timeout_s: float = 30.0,
    attempts: int = 6,
) -> AsyncClient:
    retry = Retry(attempts, **_RETRY)
    return AsyncClient(address, api_key=api_key, model=model, timeout=timeout_s, retry=retry)


def _tokenizer(files: dict[str, Any]) -> Tokenizer:
    return Tokenizer(TokenizerFiles(**files | {"tokenizer_json": files["tokenizer_json"].encode()}))


def _with_template(files: dict[str, Any], template: str) -> Tokenizer:
    return _tokenizer(files | {"chat_template": template})


def _options(step: Step) -> GenerateOptions:
    convert: dict[str, Callable[[Any], Any]] = {
        "logit_bias": lambda bias: {int(token): value for token, value in bias.items()}
    }
    options: Any = {name: convert.get(name, lambda v: v)(step[name]) for name in _OPTIONS if name in step}
    if "timeout_s" in step:
        options["timeout"] = step["timeout_s"]
    return options | step.get("odd_options", {})


def _candidates(token: Token) -> list[int]:
    assert token.logprob is not None
    assert all(top.logprob <= 0 for top in token.top_logprobs)
    return [top.id for top in token.top_logprobs]


def _told(value: GenerateResult | SessionInfo | ServerInfo | None) -> Any:
    """As JSON has it, which knows no tuples."""
    return None if value is None else json.loads(json.dumps(asdict(value)))
