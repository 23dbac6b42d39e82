"""What a chat template writes around the words of both sides."""

from dataclasses import replace

import pytest

from kakeya.errors import ConfigError
from kakeya.text import Tokenizer
from kakeya.training.template import template_pieces
from support.tiny import TEMPLATE, byte_level_files

END, USER, ASSISTANT = 0, 1, 2


def test_the_pieces_make_a_conversation() -> None:
    tokenizer = Tokenizer(byte_level_files())
    pieces = template_pieces(tokenizer, [END])
    assert pieces.opening == [USER]
    assert pieces.to_answer == [END, *tokenizer.encode("\n"), ASSISTANT]
    assert pieces.to_question == [*tokenizer.encode("\n"), USER]
    assert pieces.ends == {END}


def test_words_may_end_otherwise_than_answers() -> None:
    """As where only the user's words stand between marks."""
    tokenizer = Tokenizer(
        replace(
            byte_level_files(),
            chat_template="{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}"
            "<|assistant|>{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}",
        )
    )
    pieces = template_pieces(tokenizer, [END])
    assert (pieces.opening, pieces.to_answer, pieces.to_question) == ([USER], [ASSISTANT], [USER])
    assert pieces.ends == {END, ASSISTANT}


def test_a_template_for_one_question_alone_gives_no_second() -> None:
    once = "{% if messages | length > 1 %}{{ raise_exception('once') }}{% endif %}" + TEMPLATE
    tokenizer = Tokenizer(replace(byte_level_files(), chat_template=once))
    assert template_pieces(tokenizer, [END]).to_question == []


@pytest.mark.parametrize(
    "template, message",
    [
        (None, "the model has no chat template"),
        ("{{ messages[0].content }}", "does not say where a user's words begin and end"),
    ],
)
def test_models_that_cannot_be_asked_are_refused(template: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        template_pieces(Tokenizer(replace(byte_level_files(), chat_template=template)), [END])
