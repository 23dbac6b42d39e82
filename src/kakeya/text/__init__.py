"""Text: tokenizer, chat template, turns of a conversation, an answer's tokens as text.

No I/O, and never torch.
"""

from kakeya.text.answer import AnswerText
from kakeya.text.detokenizer import Detokenizer
from kakeya.text.stop import StopStrings
from kakeya.text.tokenizer import Tokenizer

__all__ = ["AnswerText", "Detokenizer", "StopStrings", "Tokenizer"]
