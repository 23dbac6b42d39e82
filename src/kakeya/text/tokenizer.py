"""Text to token ids and back, and conversations to text."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any

import tokenizers

from kakeya.errors import CorruptCheckpoint, InvalidArgument
from kakeya.text.chat_template import ChatTemplate
from kakeya.text.spelling import spelling_of
from kakeya.text.tool_calls import CLOSE_TAG, OPEN_TAG
from kakeya.types import TokenizerFiles


class Tokenizer:
    """A model's tokenizer. It does not change once built, so threads may share it.

    Raises CorruptCheckpoint when the files contradict themselves and UnsupportedModel when the
    vocabulary is spelled in a way that cannot be decoded here.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        self.files = files
        self._encoder = _load(files.tokenizer_json)
        self._spelling = spelling_of(self._encoder.decoder)
        added = self._encoder.get_added_tokens_decoder()
        self._added = frozenset(added)
        # The tags of a tool call are read from the text, whatever a vocabulary calls them.
        self._special = frozenset(
            token_id
            for token_id, token in added.items()
            if token.special and token.content not in (OPEN_TAG, CLOSE_TAG)
        )
        self._bytes: dict[int, bytes] = {}
        self.bos_id = self._named_id("bos", files.bos_token)
        self.eos_id = self._named_id("eos", files.eos_token)
        self._template = ChatTemplate(
            files.chat_template,
            bos_token=files.bos_token,
            eos_token=files.eos_token,
            unk_token=files.unk_token,
            pad_token=files.pad_token,
        )

    @property
    def vocab_size(self) -> int:
        """How many tokens the tokenizer knows. A model's own vocabulary may be padded beyond it."""
        return int(self._encoder.get_vocab_size(with_added_tokens=True))

    def has_ids_of(self, other: "Tokenizer") -> bool:
        """Whether every id stands for the same text in both."""
        return bool(self._encoder.get_vocab() == other._encoder.get_vocab())

    @cached_property
    def ids_digest(self) -> str:
        """SHA-256 of which id stands for which token: equal where `has_ids_of` is true."""
        entries = sorted(self._encoder.get_vocab().items(), key=lambda entry: (entry[1], entry[0]))
        written = "\0".join(f"{token_id} {token}" for token, token_id in entries)
        return hashlib.sha256(written.encode("utf-8", "surrogatepass")).hexdigest()

    @property
    def has_chat_template(self) -> bool:
        return self._template.exists

    @property
    def template_knows_tools(self) -> bool:
        """Whether the chat template itself writes tools, and calls of them as `<tool_call>`."""
        return self._template.knows_tools

    @property
    def drops_first_space(self) -> bool:
        """Whether a text's first space belongs to the encoding (SentencePiece) and is dropped in decoding."""
        return self._spelling.drops_first_space

    def encode(self, text: str, *, special: bool = True, bos: bool = False) -> list[int]:
        """The ids of `text`.

        With `special` the spelling of a special token, such as <|im_end|>, becomes its one id; without,
        it is ordinary text. `bos` puts in front what the model expects at the start of a document, which
        is nothing for a model that expects nothing. Raises InvalidArgument for what is not Unicode text.
        """
        encoder = self._encoder if special else self._plain_encoder
        try:
            ids = encoder.encode(text, add_special_tokens=False).ids
        except TypeError as error:
            raise InvalidArgument(
                f"text must be a string without lone surrogates, got {str(text)[:40]!r}"
            ) from error
        return [*self._document_start, *ids] if bos else list(ids)

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """The text of `token_ids`; special tokens are left out unless `special`.

        Bytes that are not UTF-8 become U+FFFD. Raises InvalidArgument for an id outside the vocabulary.
        """
        data = b"".join(self.text_bytes(token_id, special=special) for token_id in token_ids)
        if self.drops_first_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def text_bytes(self, token_id: int, *, special: bool = False) -> bytes:
        """What one token adds to a text: nothing for a special token, unless `special`."""
        data = self.token_bytes(token_id)
        return data if special or token_id not in self._special else b""

    def pieces(self, count: int) -> list[bytes]:
        """What each of the first `count` ids adds to a text; nothing for one that is not known here."""
        known = self._encoder.id_to_token
        return [b"" if known(each) is None else self.text_bytes(each) for each in range(count)]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, special or not. Raises InvalidArgument for an unknown id."""
        data = self._bytes.get(token_id)
        if data is None:
            token = self._token(token_id)
            data = self._bytes[token_id] = self._spelling.token_bytes(token, token_id in self._added)
        return data

    def token_text(self, token_id: int) -> str:
        """One token as text, for showing; part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as the model's chat template writes it, with the tools if it knows how.

        With `add_generation_prompt` it ends where the assistant's answer begins. `variables` are further
        names that the template may look at. Raises InvalidArgument for bad messages, a template that refuses
        them, or a model without a template.
        """
        return self._template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables
        )

    def chat_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The ids of `render_chat`. The template itself writes the beginning-of-text token it wants."""
        text = self.render_chat(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables
        )
        return self.encode(text)

    @cached_property
    def _plain_encoder(self) -> tokenizers.Tokenizer:
        # The switch is a property of the whole object, so each way of encoding has its own.
        encoder = _load(self.files.tokenizer_json)
        encoder.encode_special_tokens = True
        return encoder

    @cached_property
    def _document_start(self) -> list[int]:
        encoding = self._encoder.encode("a", add_special_tokens=True)
        marks = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        return [token_id for token_id, _ in takewhile(lambda mark: mark[1], marks)]

    def _token(self, token_id: int) -> str:
        try:
            token = self._encoder.id_to_token(token_id)
        except (OverflowError, TypeError):
            token = None
        if token is None:
            raise InvalidArgument(
                f"token id {token_id!r} is not in the vocabulary of {self.vocab_size} tokens"
            )
        return str(token)

    def _named_id(self, name: str, token: str | None) -> int | None:
        if token is None:
            return None
        token_id = self._encoder.token_to_id(token)
        if token_id is None:
            raise CorruptCheckpoint(f"the {name} token {token!r} is not in the tokenizer's vocabulary")
        return int(token_id)


def _load(tokenizer_json: bytes) -> tokenizers.Tokenizer:
    try:
        encoder = tokenizers.Tokenizer.from_buffer(tokenizer_json)
    except Exception as error:  # the library raises bare Exception for anything wrong with the text
        raise CorruptCheckpoint(f"tokenizer.json cannot be read: {error}") from error
    # Some published files carry the settings of a training run: never cut or pad a user's text.
    encoder.no_truncation()
    encoder.no_padding()
    return encoder
