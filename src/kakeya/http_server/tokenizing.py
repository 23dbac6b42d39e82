"""POST /tokenize and /detokenize, as clients of vLLM and of llama.cpp expect them: both at once."""

from functools import partial
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter
from pydantic import BaseModel, Field, model_validator

from kakeya.http_server.completions.schema import ChatFunctionTool, ChatMessage
from kakeya.http_server.errors import blames
from kakeya.http_server.schema import (
    MOST_TOKENS,
    MOST_TOOLS,
    Strict,
    TemplateVariables,
    check_model,
    conversation_end,
)
from kakeya.http_server.security import Owner
from kakeya.http_server.state import State
from kakeya.http_server.tools import function_tool
from kakeya.text.prompting import written_tools, written_variables

if TYPE_CHECKING:
    from kakeya.http_server.loaded import Loaded
    from kakeya.text import Tokenizer

router = APIRouter(tags=["tokens"])


class TokenizeRequest(Strict):
    """The body of POST /tokenize: one of `prompt` (vLLM), `content` (llama.cpp) and `messages`.

    A prompt begins with the special tokens that the model's texts begin with, unless `add_special_tokens` is
    false. A content does not, unless `add_special` is true. In messages the template writes them.
    """

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: Annotated[list[ChatMessage] | None, Field(min_length=1)] = None
    tools: Annotated[list[ChatFunctionTool] | None, Field(max_length=MOST_TOOLS)] = None
    chat_template_kwargs: TemplateVariables = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    return_token_strs: bool | None = None
    with_pieces: bool | None = None

    @model_validator(mode="after")
    def _has_one_text(self) -> "TokenizeRequest":
        if sum(each is not None for each in (self.prompt, self.content, self.messages)) != 1:
            raise ValueError("give one of prompt, content and messages")
        if self.messages is not None and (self.add_special_tokens or self.add_special):
            raise ValueError("the chat template writes the special tokens of messages by itself")
        return self

    def token_ids(self, loaded: "Loaded") -> list[int]:
        """Runs on a worker. Raises ApiError, naming the field, for what cannot be written."""
        tokenizer, is_parsed = loaded.runtime.tokenizer, self.parse_special is not False
        if self.prompt is not None:
            with blames("prompt"):
                return tokenizer.encode(
                    self.prompt, special=is_parsed, bos=self.add_special_tokens is not False
                )
        if self.content is not None:
            with blames("content"):
                return tokenizer.encode(self.content, special=is_parsed, bos=bool(self.add_special))
        messages = [message.to_message() for message in self.messages or ()]
        tools = written_tools([function_tool(tool.function.model_dump()) for tool in self.tools or ()])
        end = conversation_end(
            opens_answer=self.add_generation_prompt,
            continues_last=self.continue_final_message,
            last=messages[-1],
        )
        variables = written_variables(self.chat_template_kwargs)
        return loaded.sessions.prompter.whole(messages, tools, variables, end)


class PieceOfText(BaseModel):
    """A token and what it stands for: bytes where they are part of a character only."""

    id: int
    piece: str | list[int]


class Tokenized(BaseModel):
    """The tokens of a text."""

    tokens: list[int] | list[PieceOfText]
    count: int
    max_model_len: int
    """How many tokens a session remembers; what is said may be longer."""
    token_strs: list[str] | None


class DetokenizeRequest(Strict):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, le=MOST_TOKENS)]]


class Detokenized(BaseModel):
    """The text of tokens, special ones spelled out; by its name in vLLM and in llama.cpp."""

    prompt: str
    content: str


@router.post("/tokenize", summary="The tokens of a text or of a conversation")
async def tokenize(body: TokenizeRequest, owner: Owner, state: State) -> Tokenized:
    loaded = state.require_loaded()
    if body.model is not None:
        check_model(body.model, loaded.runtime)
    return await state.workers.call(partial(_tokenized, body, loaded))


@router.post("/detokenize", summary="The text of tokens")
async def detokenize(body: DetokenizeRequest, owner: Owner, state: State) -> Detokenized:
    loaded = state.require_loaded()
    if body.model is not None:
        check_model(body.model, loaded.runtime)
    with blames("tokens"):
        decode = partial(loaded.runtime.tokenizer.decode, body.tokens, special=True)
        text = await state.workers.call(decode)
    return Detokenized(prompt=text, content=text)


def _tokenized(body: TokenizeRequest, loaded: "Loaded") -> Tokenized:
    token_ids, tokenizer = body.token_ids(loaded), loaded.runtime.tokenizer
    pieces = [_piece(tokenizer, token_id) for token_id in token_ids if body.with_pieces]
    return Tokenized(
        tokens=pieces or token_ids,
        count=len(token_ids),
        max_model_len=loaded.runtime.config.cache.capacity,
        token_strs=[tokenizer.token_text(each) for each in token_ids] if body.return_token_strs else None,
    )


def _piece(tokenizer: "Tokenizer", token_id: int) -> PieceOfText:
    data = tokenizer.token_bytes(token_id)
    try:
        return PieceOfText(id=token_id, piece=data.decode())
    except UnicodeDecodeError:
        return PieceOfText(id=token_id, piece=list(data))
