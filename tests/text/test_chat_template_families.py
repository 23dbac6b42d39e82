"""Templates in the style of each family, against `transformers`: tools, thoughts, empty or absent systems."""

from typing import Any

import pytest
import tokenizers
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from kakeya.errors import InvalidArgument
from kakeya.text.chat_template import ChatTemplate
from support.conformance import read_conversations, read_templates

TEMPLATES = read_templates()
CONVERSATIONS: dict[str, list[dict[str, Any]]] = read_conversations()["conversations"]
TOOLS = read_conversations()["tools"]


def by_transformers(source: str, messages: list[dict[str, Any]], prompt: bool, tools: Any) -> str | None:
    """None where the template refuses."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>"
    )
    try:
        text = tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=source, tokenize=False, add_generation_prompt=prompt
        )
    except Exception:  # a template raises what it likes
        return None
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("kind", CONVERSATIONS)
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("with_tools", [True, False])
@pytest.mark.slow
def test_rendering_agrees_with_transformers(family: str, kind: str, prompt: bool, with_tools: bool) -> None:
    source, messages = TEMPLATES[family], CONVERSATIONS[kind]
    expected = by_transformers(source, messages, prompt, TOOLS if with_tools else None)
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    tools = TOOLS if with_tools else []
    if expected is None:
        with pytest.raises(InvalidArgument, match="refused the messages"):
            template.render(messages, add_generation_prompt=prompt, tools=tools)
    else:
        assert template.render(messages, add_generation_prompt=prompt, tools=tools) == expected


def test_the_templates_say_different_things() -> None:
    """Agreement on nothing would show nothing: tools and thoughts leave their marks where they should."""
    tools, thinking = CONVERSATIONS["tools"], CONVERSATIONS["thinking"]
    qwen = by_transformers(TEMPLATES["qwen"], thinking, False, None)
    assert qwen is not None
    assert "Easy." in qwen
    assert "Simple." not in qwen
    assert "“now” in a <city> &" in (by_transformers(TEMPLATES["mistral"], tools, True, TOOLS) or "")
    assert by_transformers(TEMPLATES["gemma"], tools, True, None) is None
    assert "Reasoning Mode: /no_think" in (
        by_transformers(TEMPLATES["smollm3"], CONVERSATIONS["system"], True, None) or ""
    )
