"""The tokenizer inside a GGUF file, rebuilt as a `tokenizer.json`.

GGUF holds a vocabulary, merges or scores, and the name of a pre-tokenizer. The rules of the pre-tokenizer are
not in the file: they are the ones that the named models were published with.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from kakeya.errors import CorruptCheckpoint, UnsupportedModel
from kakeya.models.fields import Fields
from kakeya.types import TokenizerFiles

_PREFIX = "tokenizer.ggml."
_SPACE_MARK = "▁"


class TokenType(IntEnum):
    """What GGUF says a token is."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class _PreTokenizer:
    """How a byte-level model cuts text into words before it merges, and what else goes by that name."""

    steps: Callable[[], list[Any]]
    whole_words_first: bool = False  # a word that is a token is taken as it is, merges or not
    composes: bool = False  # text is brought to Unicode's composed form (NFC) first
    adds_bos: bool = False  # when the file does not say


@dataclass(frozen=True)
class _Vocabulary:
    """Checked tokens: unique, one type each, and the named special ids inside the range."""

    tokens: Sequence[str]
    types: Sequence[TokenType]
    ids: dict[str, int]
    bos: int | None
    eos: int | None
    unk: int | None
    pad: int | None

    def text(self, token_id: int | None) -> str | None:
        return None if token_id is None else self.tokens[token_id]


def tokenizer_files(metadata: Mapping[str, Any]) -> TokenizerFiles:
    """Rebuild the tokenizer from a GGUF file's metadata.

    Raises UnsupportedModel for a tokenizer or a pre-tokenizer that is not known here, by name, and
    CorruptCheckpoint for metadata that is missing or contradicts itself.
    """
    fields = Fields(metadata, "GGUF metadata")
    vocabulary = _read_vocabulary(fields)
    kind = fields.text(_PREFIX + "model")
    if kind not in _KINDS:
        raise UnsupportedModel(
            f"GGUF tokenizer {kind!r} is not supported; supported: {', '.join(map(repr, _KINDS))}"
        )
    tokenizer, adds_bos = _KINDS[kind](vocabulary, fields)
    # What Phi-3's tokenizer.json says and its GGUF files do not: markers take the space behind them along.
    swallows = kind == "llama" and fields.raw("general.architecture") == "phi3"
    _add_tokens(tokenizer, vocabulary, swallows)
    if fields.flag(_PREFIX + "add_bos_token", adds_bos and vocabulary.bos is not None):
        _prepend_bos(tokenizer, vocabulary)
    return TokenizerFiles(
        tokenizer_json=tokenizer.to_str().encode(),
        chat_template=fields.maybe_text("tokenizer.chat_template"),
        bos_token=vocabulary.text(vocabulary.bos),
        eos_token=vocabulary.text(vocabulary.eos),
        unk_token=vocabulary.text(vocabulary.unk),
        pad_token=vocabulary.text(vocabulary.pad),
    )


# --- byte-level BPE ---------------------------------------------------------------------------------------

_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_LLAMA3 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_CONTRACTED = rf"{_CONTRACTIONS}?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTED}"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)


def _gpt2_words() -> list[Any]:
    return [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]


def _single_digits() -> list[Any]:
    return [pre_tokenizers.Digits(individual_digits=True), *_gpt2_words()]


def _words(pattern: str) -> Callable[[], list[Any]]:
    def steps() -> list[Any]:
        return [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]

    return steps


_GPT2_PRE = _PreTokenizer(_gpt2_words)
_LLAMA3_PRE = _PreTokenizer(_words(_LLAMA3), whole_words_first=True, adds_bos=True)
_LLAMA3_MERGED = _PreTokenizer(_words(_LLAMA3))
_QWEN2_PRE = _PreTokenizer(_words(_QWEN2), composes=True)
_DIGITS_PRE = _PreTokenizer(_single_digits)

_PRE_TOKENIZERS = {
    "default": _GPT2_PRE,
    "gpt-2": _GPT2_PRE,
    "olmo": _GPT2_PRE,
    "smollm": _DIGITS_PRE,
    "refact": _DIGITS_PRE,  # Granite 3
    "starcoder": _DIGITS_PRE,
    "llama-bpe": _LLAMA3_PRE,
    "llama3": _LLAMA3_PRE,
    "llama-v3": _LLAMA3_PRE,
    "falcon3": _LLAMA3_PRE,
    "dbrx": _LLAMA3_MERGED,  # OLMo 2 and 3, Phi-4, Granite 4
    "smaug-bpe": _LLAMA3_MERGED,  # SmolLM3
    "gpt-4o": _PreTokenizer(_words(_GPT4O)),  # Phi-4-mini
    "qwen2": _QWEN2_PRE,
    "deepseek-r1-qwen": _QWEN2_PRE,
    "tekken": _PreTokenizer(_words(_TEKKEN), whole_words_first=True, adds_bos=True),
}


def _byte_level(vocabulary: _Vocabulary, fields: Fields) -> tuple[Tokenizer, bool]:
    name = fields.text(_PREFIX + "pre", "default")
    pre_tokenizer = _PRE_TOKENIZERS.get(name)
    if pre_tokenizer is None:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise UnsupportedModel(f"GGUF pre-tokenizer {name!r} is not supported; supported: {known}")
    model = models.BPE(
        vocab=vocabulary.ids,
        merges=_read_merges(vocabulary, fields),
        ignore_merges=pre_tokenizer.whole_words_first,
    )
    tokenizer = Tokenizer(model)
    if pre_tokenizer.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(pre_tokenizer.steps())
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre_tokenizer.adds_bos


def _read_merges(vocabulary: _Vocabulary, fields: Fields) -> list[tuple[str, str]]:
    merges = [_split_merge(line) for line in _strings(fields, "merges")]
    for left, right in merges:
        for token in (left, right, left + right):
            if token not in vocabulary.ids:
                raise CorruptCheckpoint(f"merge {left!r} + {right!r} needs {token!r}, which is not a token")
    return merges


def _split_merge(line: str) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    if not left or not right or " " in right:
        raise CorruptCheckpoint(f"{_PREFIX}merges holds {line!r}; two tokens and one space are right")
    return left, right


# --- SentencePiece-style BPE ------------------------------------------------------------------------------


def _sentencepiece(vocabulary: _Vocabulary, fields: Fields) -> tuple[Tokenizer, bool]:
    scores = _numbers(fields, "scores", len(vocabulary.tokens))
    return _with_space_marks(vocabulary, fields, _merges_by_score(vocabulary, scores)), True


def _merged_sentencepiece(vocabulary: _Vocabulary, fields: Fields) -> tuple[Tokenizer, bool]:
    """Gemma 4: the pieces of SentencePiece, and the file has the merges themselves."""
    return _with_space_marks(vocabulary, fields, _read_merges(vocabulary, fields)), True


def _with_space_marks(vocabulary: _Vocabulary, fields: Fields, merges: list[tuple[str, str]]) -> Tokenizer:
    has_bytes = all(f"<0x{byte:02X}>" in vocabulary.ids for byte in range(256))
    if not has_bytes and vocabulary.unk is None:
        raise CorruptCheckpoint("the vocabulary has neither all byte tokens nor an unknown token")
    model = models.BPE(
        vocab=vocabulary.ids,
        merges=merges,
        unk_token=vocabulary.text(vocabulary.unk),
        fuse_unk=True,
        byte_fallback=has_bytes,
    )
    tokenizer = Tokenizer(model)
    space_prefix = fields.flag(_PREFIX + "add_space_prefix", True)
    marks = [normalizers.Prepend(_SPACE_MARK)] if space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*marks, normalizers.Replace(" ", _SPACE_MARK)])
    strip = [decoders.Strip(" ", 1, 0)] if space_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_by_score(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose result scores best; here as an ordered list of merges.

    Every way to cut a piece into two pieces is a merge, ranked by the score of the whole piece.
    """
    usable = (TokenType.NORMAL, TokenType.UNDEFINED, TokenType.USER_DEFINED)
    pieces = {
        token: scores[token_id]
        for token, token_id in vocabulary.ids.items()
        if vocabulary.types[token_id] in usable
    }
    cuts = [
        (piece, cut)
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    cuts.sort(key=lambda found: -pieces[found[0]])
    return [(piece[:cut], piece[cut:]) for piece, cut in cuts]


_KINDS = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _merged_sentencepiece}

# --- what all kinds share ---------------------------------------------------------------------------------

_NEVER_SWALLOW = ("<unk>", "<s>", "<|endoftext|>")


def _add_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary, swallows: bool) -> None:
    """Make control and user-defined tokens match as a whole; both ends of a text always count as control.

    `swallows`: markers take the space behind them along, except those that are no part of a chat.
    """
    boundaries = {vocabulary.bos, vocabulary.eos}
    added = []
    for token_id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        special = kind in (TokenType.CONTROL, TokenType.UNKNOWN) or token_id in boundaries
        if special or kind is TokenType.USER_DEFINED:
            rstrip = swallows and token not in _NEVER_SWALLOW
            added.append(AddedToken(token, special=special, normalized=False, rstrip=rstrip))
    tokenizer.add_tokens(added)


def _prepend_bos(tokenizer: Tokenizer, vocabulary: _Vocabulary) -> None:
    if vocabulary.bos is None:
        raise CorruptCheckpoint(f"texts should begin with a token, but {_PREFIX}bos_token_id is missing")
    bos = vocabulary.tokens[vocabulary.bos]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, vocabulary.bos)]
    )


def _read_vocabulary(fields: Fields) -> _Vocabulary:
    tokens = _strings(fields, "tokens")
    ids: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        if ids.setdefault(token, token_id) != token_id:
            raise CorruptCheckpoint(f"tokens {ids[token]} and {token_id} are both {token!r}")
    types = _read_types(fields, len(tokens))
    unk = _special_id(fields, "unknown", len(tokens))
    if unk is None and TokenType.UNKNOWN in types:
        unk = types.index(TokenType.UNKNOWN)
    bos, eos, pad = (_special_id(fields, name, len(tokens)) for name in ("bos", "eos", "padding"))
    return _Vocabulary(tokens, types, ids, bos=bos, eos=eos, unk=unk, pad=pad)


def _read_types(fields: Fields, count: int) -> list[TokenType]:
    if _PREFIX + "token_type" not in fields:
        return [TokenType.NORMAL] * count
    kinds = {int(kind): kind for kind in TokenType}
    codes = _numbers(fields, "token_type", count)
    unknown = next((code for code in codes if code not in kinds), None)
    if unknown is not None:
        raise CorruptCheckpoint(f"{_PREFIX}token_type holds {unknown}; 0 to {max(kinds)} are right")
    return [kinds[int(code)] for code in codes]


def _special_id(fields: Fields, name: str, count: int) -> int | None:
    token_id = fields.maybe_integer(f"{_PREFIX}{name}_token_id")
    if token_id is not None and not 0 <= token_id < count:
        raise CorruptCheckpoint(f"{_PREFIX}{name}_token_id is {token_id}, but there are {count} tokens")
    return token_id


def _strings(fields: Fields, key: str) -> list[str]:
    values = fields.required(_PREFIX + key)
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        raise CorruptCheckpoint(f"{_PREFIX}{key} must be a list of strings that is not empty")
    return values


def _numbers(fields: Fields, key: str, count: int) -> list[float]:
    values = fields.required(_PREFIX + key)
    is_list = isinstance(values, list) and len(values) == count
    if not is_list or not all(isinstance(value, (int, float)) for value in values):
        raise CorruptCheckpoint(f"{_PREFIX}{key} must hold {count} numbers, one for each token")
    return list(values)
