"""Small tokenizers of both kinds, built with the `tokenizers` library alone."""

import json

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from kakeya.types import TokenizerFiles

CORPUS = ["the quick brown fox, it's 12345", "Größe naïve 日本語", "hello hello  world\n\n"] * 4
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level_files() -> TokenizerFiles:
    """Special tokens 0 to 2, then bytes and merges, and one added token that only looks like bytes."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("ïĠ", normalized=False)])
    return TokenizerFiles(tokenizer.to_str().encode(), chat_template=TEMPLATE, eos_token="<|end|>")


def sentencepiece_files() -> TokenizerFiles:
    """<unk>, <s>, </s>, the bytes, then pieces. Texts get a space in front and begin with <s>."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=120, show_progress=False, max_token_length=6)
    )
    model = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *BYTE_TOKENS, *sorted(model["vocab"], key=model["vocab"].get)]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return TokenizerFiles(tokenizer.to_str().encode(), bos_token="<s>", eos_token="</s>", unk_token="<unk>")
