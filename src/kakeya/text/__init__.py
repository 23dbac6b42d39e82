"""Text: tokenizer, chat template, incremental detokenizer, stop strings. Never imports torch."""

from kakeya.text.detokenizer import Detokenizer
from kakeya.text.stop import StopStrings
from kakeya.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "StopStrings", "Tokenizer"]
