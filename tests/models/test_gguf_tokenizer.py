"""GGUF tokenizer metadata against tokenizers built independently of it."""

import itertools
import json
import unicodedata
from collections.abc import Mapping
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from kakeya.errors import CorruptCheckpoint, UnsupportedModel
from kakeya.models.gguf_tokenizer import tokenizer_files

CORPUS = [
    "The quick brown fox jumps over the lazy dog; it's 1234567 o'clock, and WE'RE fine.",
    "def main(argv):\n    return 0  # 42\n\n\nprint('don\\'t')\r\n\tif x >= 10: pass",
    "Être ou ne pas être — là est la question. Größe, naïve, café, 日本語のテスト, 你好世界 🙂🙃.",
    "aaa aaaa  aaaaa   aaaaaa the thethe theThe HelloWorld CamelCase/path/to/file...!!! 3.14159",
] * 3
SAMPLES = [
    *CORPUS[:4],
    "",
    " ",
    "  leading and trailing  ",
    "tabs\tand\n\nnewlines \r\n mixed   \n",
    "I'LL they'll THEY'D 12 345 6789 x1y22z333",
    "e\u0301 combining, \u00bd, \u0663\u0664, \U0001f469\u200d\U0001f4bb",
    "a/b//c\n/d McDonald's iPhone ÉCOLE",
]
SPECIALS = ["<|end|>", "<|start|>", "<unk>"]

# As published in the models' own tokenizer.json files.
PATTERNS = {
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt-4o": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
PATTERNS |= {"dbrx": PATTERNS["llama-bpe"], "smaug-bpe": PATTERNS["llama-bpe"]}


def reference_cutting(pre: str) -> Any:
    if pre in PATTERNS:
        split = pre_tokenizers.Split(Regex(PATTERNS[pre]), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre in ("smollm", "refact", "starcoder"):
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole])
    return whole


def trained(pre: str) -> tokenizers.Tokenizer:
    """A byte-level tokenizer, trained here on a little text."""
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken")))
    tokenizer.pre_tokenizer = reference_cutting(pre)
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIALS]
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def metadata_of(tokenizer: tokenizers.Tokenizer, pre: str) -> dict[str, Any]:
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIALS else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.unknown_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
    }


def encode(metadata: Mapping[str, Any], text: str, *, bos: bool = False) -> list[int]:
    tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_files(metadata).tokenizer_json)
    return list(tokenizer.encode(text, add_special_tokens=bos).ids)


@pytest.fixture(scope="module")
def byte_level() -> dict[str, Any]:
    return metadata_of(trained("smollm"), "smollm")


@pytest.mark.parametrize("pre", ["gpt-2", "olmo", "smollm", "refact", "starcoder", *PATTERNS])
def test_byte_level_ids_agree_with_the_trained_tokenizer(pre: str) -> None:
    reference = trained(pre)
    rebuilt = tokenizers.Tokenizer.from_buffer(tokenizer_files(metadata_of(reference, pre)).tokenizer_json)
    for text in [*SAMPLES, "<|start|>hi<|end|> 12<|end|>"]:
        expected = reference.encode(text, add_special_tokens=False).ids
        assert rebuilt.encode(text, add_special_tokens=False).ids == expected
        composed = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
        assert rebuilt.decode(expected, skip_special_tokens=False) == composed


def test_the_ways_to_cut_differ(byte_level: dict[str, Any]) -> None:
    # Were they all the same, the agreement above would show nothing.
    names = ("gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "gpt-4o")
    cut = {pre: tuple(map(tuple, words(byte_level, pre, SAMPLES))) for pre in names}
    assert len(set(cut.values())) == len(names)


def words(metadata: Mapping[str, Any], pre: str, texts: list[str]) -> list[list[str]]:
    built = tokenizers.Tokenizer.from_buffer(
        tokenizer_files({**metadata, "tokenizer.ggml.pre": pre}).tokenizer_json
    )
    assert built.pre_tokenizer is not None
    return [[word for word, _ in built.pre_tokenizer.pre_tokenize_str(text)] for text in texts]


@pytest.mark.parametrize(
    ("same", "pre"),
    [
        ("default", "gpt-2"),
        ("llama3", "llama-bpe"),
        ("llama-v3", "llama-bpe"),
        ("falcon3", "llama-bpe"),
        ("smaug-bpe", "dbrx"),
        ("deepseek-r1-qwen", "qwen2"),
    ],
)
def test_other_names_mean_the_same(same: str, pre: str, byte_level: dict[str, Any]) -> None:
    assert tokenizer_files({**byte_level, "tokenizer.ggml.pre": same}) == tokenizer_files(
        {**byte_level, "tokenizer.ggml.pre": pre}
    )


def test_no_name_is_the_default(byte_level: dict[str, Any]) -> None:
    unnamed = {key: value for key, value in byte_level.items() if not key.endswith("pre")}
    assert tokenizer_files(unnamed) == tokenizer_files({**unnamed, "tokenizer.ggml.pre": "default"})


@pytest.mark.parametrize(
    ("pre", "whole"), [("llama-bpe", True), ("tekken", True), ("qwen2", False), ("dbrx", False)]
)
def test_a_word_without_merges_is_one_token_where_the_model_says_so(
    pre: str, whole: bool, byte_level: dict[str, Any]
) -> None:
    tokens = [*byte_level["tokenizer.ggml.tokens"], "Ġzyzzyva"]
    metadata = {
        **byte_level,
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*byte_level["tokenizer.ggml.token_type"], 1],
    }
    assert (encode(metadata, " zyzzyva") == [len(tokens) - 1]) is whole


def test_smollm_splits_digits_one_by_one(byte_level: dict[str, Any]) -> None:
    [cut] = words(byte_level, "smollm", ["it is 2024, ok"])
    assert cut == ["it", "Ġis", "Ġ", "2", "0", "2", "4", ",", "Ġok"]


def test_special_tokens_are_one_id_and_named(byte_level: dict[str, Any]) -> None:
    files = tokenizer_files({**byte_level, "tokenizer.chat_template": "{{ messages }}"})
    assert (files.bos_token, files.eos_token) == ("<|start|>", "<|end|>")
    assert (files.unk_token, files.pad_token) == ("<unk>", "<|end|>")
    assert files.chat_template == "{{ messages }}"
    assert encode(byte_level, "<|start|><|end|>") == [1, 0]


def test_both_ends_of_a_text_are_special_without_types(byte_level: dict[str, Any]) -> None:
    without = {key: value for key, value in byte_level.items() if not key.endswith("token_type")}
    assert encode(without, "<|start|><|end|>") == [1, 0]
    assert encode(without, "<unk>") == encode(without, "<") + encode(without, "unk") + encode(without, ">")


def test_user_defined_tokens_are_one_id_but_text(byte_level: dict[str, Any]) -> None:
    types = list(byte_level["tokenizer.ggml.token_type"])
    types[2] = 4
    files = tokenizer_files({**byte_level, "tokenizer.ggml.token_type": types})
    tokenizer = tokenizers.Tokenizer.from_buffer(files.tokenizer_json)
    assert tokenizer.encode("<unk>", add_special_tokens=False).ids == [2]
    assert tokenizer.decode([2, 0], skip_special_tokens=True) == "<unk>"


@pytest.mark.parametrize(
    ("pre", "said", "expected"),
    [
        ("smollm", None, False),
        ("smollm", True, True),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("tekken", None, True),
        ("dbrx", None, False),
        ("gpt-4o", None, False),
    ],
)
def test_a_text_begins_as_the_model_expects(
    pre: str, said: bool | None, expected: bool, byte_level: dict[str, Any]
) -> None:
    metadata = {**byte_level, "tokenizer.ggml.pre": pre}
    if said is not None:
        metadata["tokenizer.ggml.add_bos_token"] = said
    plain = encode(metadata, "hello")
    assert encode(metadata, "hello", bos=True) == ([1, *plain] if expected else plain)


# --- SentencePiece style ----------------------------------------------------------------------------------

PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]


def sentencepiece_metadata(*, space_prefix: bool = True, bytes_too: bool = True) -> dict[str, Any]:
    """Pieces of a small trained vocabulary with falling scores, laid out as converters do."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False, max_token_length=8)
    tokenizer.train_from_iterator(CORPUS[:4], trainer)
    vocab = tokenizer.get_vocab()
    trained_pieces = sorted(vocab, key=lambda piece: vocab[piece])
    head = PIECES if bytes_too else PIECES[:3]
    # Some characters are left out, pieces and all, so that texts have something to spell in bytes.
    pieces = [piece for piece in trained_pieces if not set(piece) & set("日本語é🙂")]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*head, *pieces],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * (len(head) - 3), *[1] * len(pieces)],
        "tokenizer.ggml.scores": [0.0] * len(head) + [-float(rank) for rank in range(len(pieces))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": space_prefix,
    }


def sentencepiece_oracle(metadata: Mapping[str, Any], text: str) -> list[int]:
    """SentencePiece's rule, spelled out: join the best pair, the leftmost of equals, until none is left."""
    ids = {piece: index for index, piece in enumerate(metadata["tokenizer.ggml.tokens"])}
    scores, types = metadata["tokenizer.ggml.scores"], metadata["tokenizer.ggml.token_type"]
    prefix = " " if metadata["tokenizer.ggml.add_space_prefix"] and text else ""
    symbols = list((prefix + text).replace(" ", "▁"))
    while True:
        joined = [left + right for left, right in itertools.pairwise(symbols)]
        known = [at for at, piece in enumerate(joined) if piece in ids and types[ids[piece]] == 1]
        if not known:
            break
        at = max(known, key=lambda index: (scores[ids[joined[index]]], -index))
        symbols[at : at + 2] = [joined[at]]
    found: list[int] = []
    for symbol in symbols:
        found += [ids[symbol]] if symbol in ids else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return found


SPACED = sentencepiece_metadata()
UNSPACED = sentencepiece_metadata(space_prefix=False)
BUILT = [
    (metadata, tokenizers.Tokenizer.from_buffer(tokenizer_files(metadata).tokenizer_json))
    for metadata in (SPACED, UNSPACED)
]


@settings(deadline=None)
@given(st.one_of(st.sampled_from(SAMPLES), st.text("abeth oqu.日\n🙂é", max_size=30), st.text(max_size=10)))
@pytest.mark.slow
def test_sentencepiece_ids_agree_with_its_rule(text: str) -> None:
    for metadata, tokenizer in BUILT:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == sentencepiece_oracle(metadata, text)
        assert tokenizer.decode(ids) == text


@given(
    st.lists(st.text("ab", min_size=2, max_size=4), unique=True, max_size=9),
    st.lists(st.text("ab", max_size=14), max_size=10),
)
def test_any_scores_agree_with_sentencepieces_rule(pieces: list[str], texts: list[str]) -> None:
    ordered = ["a", "b", *pieces]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*PIECES, *ordered],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(ordered)],
        "tokenizer.ggml.scores": [0.0] * len(PIECES) + [-float(rank) for rank in range(len(ordered))],
        "tokenizer.ggml.add_space_prefix": False,
    }
    tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_files(metadata).tokenizer_json)
    for text in texts:
        assert tokenizer.encode(text).ids == sentencepiece_oracle(metadata, text)


def test_sentencepiece_begins_a_text_with_bos_and_space() -> None:
    assert encode(SPACED, "the", bos=True)[0] == 1
    assert SPACED["tokenizer.ggml.tokens"][encode(SPACED, "the")[0]].startswith("▁")
    assert encode({**SPACED, "tokenizer.ggml.add_bos_token": False}, "the", bos=True) == encode(SPACED, "the")
    without_bos = {key: value for key, value in SPACED.items() if not key.endswith("bos_token_id")}
    assert encode(without_bos, "the", bos=True) == encode(SPACED, "the")


def test_sentencepiece_special_tokens_are_one_id() -> None:
    files = tokenizer_files(SPACED)
    assert (files.bos_token, files.eos_token, files.unk_token, files.pad_token) == (
        "<s>",
        "</s>",
        "<unk>",
        None,
    )
    assert encode(UNSPACED, "<s></s>") == [1, 2]


def test_user_defined_spaces_win_over_merges() -> None:
    # Gemma's files write runs of spaces and line ends as user-defined tokens, with plain spaces.
    tokens = [*UNSPACED["tokenizer.ggml.tokens"], "   ", "\n\n\n\n"]
    metadata = {
        **UNSPACED,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*UNSPACED["tokenizer.ggml.token_type"], 4, 4],
        "tokenizer.ggml.scores": [*UNSPACED["tokenizer.ggml.scores"], -1e3, -1e3],
    }
    spaces, lines = len(tokens) - 2, len(tokens) - 1
    text = "the   \n\n\n\nfox"
    ids = encode(metadata, text)
    assert ids == [*encode(UNSPACED, "the"), spaces, lines, *encode(UNSPACED, "fox")]
    assert tokenizers.Tokenizer.from_buffer(tokenizer_files(metadata).tokenizer_json).decode(ids) == text


def test_without_byte_tokens_the_unknown_token_stands_in() -> None:
    metadata = sentencepiece_metadata(bytes_too=False)
    assert encode(metadata, "the 語")[-1] == 0
    metadata["tokenizer.ggml.token_type"][0] = 1
    with pytest.raises(CorruptCheckpoint, match="neither all byte tokens nor an unknown token"):
        tokenizer_files(metadata)


def test_pieces_with_merges_of_their_own() -> None:
    """Gemma 4's files: SentencePiece's pieces, bytes for the rest, and a list of merges."""
    pieces = SPACED["tokenizer.ggml.tokens"]
    reference = tokenizers.Tokenizer(models.BPE())
    reference.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=PIECES, show_progress=False)
    reference.train_from_iterator(CORPUS[:4], trainer)
    model = json.loads(reference.to_str())["model"]
    reference.model = models.BPE(
        model["vocab"],
        [tuple(merge) for merge in model["merges"]],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    assert len(tokens) > len(pieces)
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - len(PIECES))],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": True,
    }
    rebuilt = tokenizers.Tokenizer.from_buffer(tokenizer_files(metadata).tokenizer_json)
    for text in [*SAMPLES, "Ω unseen Ж"]:
        ids = rebuilt.encode(text, add_special_tokens=False).ids
        assert ids == reference.encode(text, add_special_tokens=False).ids
        assert rebuilt.decode(ids) == text
    assert encode(metadata, "the", bos=True)[0] == 1


def test_phi3s_markers_take_the_space_behind_them_along() -> None:
    plain = {**SPACED, "general.architecture": "llama"}
    phi3 = {**SPACED, "general.architecture": "phi3"}
    assert encode(phi3, "</s> \n the") == encode(phi3, "</s>the")
    assert encode(plain, "</s> the") != encode(plain, "</s>the")
    assert encode(phi3, "<s> the") == encode(plain, "<s> the")


# --- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bert", "t5", "rwkv"])
def test_an_unknown_tokenizer_is_refused_by_name(kind: str, byte_level: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=kind):
        tokenizer_files({**byte_level, "tokenizer.ggml.model": kind})


def test_an_unknown_cutting_is_refused_by_name(byte_level: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match="'viking'.*supported: .*smollm"):
        tokenizer_files({**byte_level, "tokenizer.ggml.pre": "viking"})


@pytest.mark.parametrize("key", ["model", "tokens", "merges"])
def test_missing_metadata_is_named(key: str, byte_level: dict[str, Any]) -> None:
    broken = {name: value for name, value in byte_level.items() if name != f"tokenizer.ggml.{key}"}
    with pytest.raises(CorruptCheckpoint, match=f"tokenizer.ggml.{key} is missing"):
        tokenizer_files(broken)


def test_missing_scores_are_named() -> None:
    with pytest.raises(CorruptCheckpoint, match="scores is missing"):
        tokenizer_files({key: value for key, value in SPACED.items() if not key.endswith("scores")})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokens", [], "tokens must be a list of strings"),
        ("tokens", ["a", 5], "tokens must be a list of strings"),
        ("tokens", 5, "tokens must be a list of strings"),
        ("tokens", ["a", "b", "a"], "tokens 0 and 2 are both 'a'"),
        ("token_type", [1, 1], "token_type must hold 455 numbers"),
        ("token_type", ["x"] * 455, "token_type must hold 455 numbers"),
        ("token_type", [9] * 455, "token_type holds 9; 0 to 6 are right"),
        ("merges", ["a"], "merges holds 'a'"),
        ("merges", ["a b c"], "merges holds 'a b c'"),
        ("merges", [" a"], "merges holds ' a'"),
        ("merges", ["a QQQ"], "merge 'a' . 'QQQ' needs 'QQQ'"),
        ("merges", ["Q Q"], "merge 'Q' . 'Q' needs 'QQ'"),
        ("bos_token_id", 455, "bos_token_id is 455, but there are 455 tokens"),
        ("eos_token_id", -1, "eos_token_id is -1"),
        ("unknown_token_id", 2**32 - 1, "unknown_token_id is 4294967295"),
        ("padding_token_id", 999, "padding_token_id is 999"),
        ("bos_token_id", "1", "bos_token_id must be a whole number, got '1'"),
        ("add_bos_token", "yes", "add_bos_token must be true or false, got 'yes'"),
    ],
)
def test_broken_metadata_is_named(key: str, value: Any, message: str, byte_level: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpoint, match=message):
        tokenizer_files({**byte_level, f"tokenizer.ggml.{key}": value})


def test_a_promised_bos_must_exist(byte_level: dict[str, Any]) -> None:
    metadata = {key: value for key, value in byte_level.items() if not key.endswith("bos_token_id")}
    with pytest.raises(CorruptCheckpoint, match="bos_token_id is missing"):
        tokenizer_files({**metadata, "tokenizer.ggml.add_bos_token": True})


def test_a_template_must_be_text(byte_level: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpoint, match="chat_template must be a text, got"):
        tokenizer_files({**byte_level, "tokenizer.chat_template": []})
    assert tokenizer_files(byte_level).chat_template is None
