"""Token ids to text, one token at a time."""

import codecs

from kakeya.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns a stream of token ids into pieces of text that never hold half a character.

    The pieces joined, `finish` included, are exactly `tokenizer.decode` of all the ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_space = tokenizer.drops_first_space

    @property
    def is_within_character(self) -> bool:
        """Whether part of a character waits for the rest of it."""
        return bool(self._utf8.getstate()[0])

    def feed(self, token_id: int) -> str:
        """The text that this token completes, often empty in the middle of a character.

        Raises InvalidArgument for an unknown id, and is then as it was before.
        """
        data = self._tokenizer.text_bytes(token_id, special=self._special)
        if self._drop_space and data:
            self._drop_space = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def finish(self) -> str:
        """What an unfinished character leaves behind: U+FFFD, or nothing. Call it once, at the end."""
        return self._utf8.decode(b"", True)
