"""Chat templates: written as the model's authors expect, sandboxed, and refusing with a reason."""

from datetime import datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from kakeya.errors import InvalidArgument
from kakeya.text.chat_template import ChatTemplate

CONVERSATION = [
    {"role": "system", "content": "Be <brief> & “kind”."},
    {"role": "user", "content": "  Hi \n"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye."},
]

LLAMA_LIKE = """{{- bos_token }}
{%- set date = strftime_now("%Y") if strftime_now is defined else "1999" %}
{% for message in messages %}
    {% if message['role'] not in ['system', 'user', 'assistant'] %}
        {{ raise_exception('unknown role ' + message['role']) }}
    {% endif %}
    <|{{ message['role'] }}|>{{ message['content'] | trim }}{{ eos_token }}
{% endfor %}
{%- if tools is not none %}{{ tools | tojson }}{% endif %}
{% if add_generation_prompt %}
<|assistant|>{{ date }}
{%- endif %}
"""
CONTROLS = """{% for message in messages %}
  {% if loop.index0 == 0 %}{% continue %}{% endif %}
  {% if loop.index0 == 3 %}{% break %}{% endif %}
  {% generation %}{{ message.content }}{% endgeneration %}
{% endfor %}"""
JSON = (
    "{{ messages | tojson }}|{{ messages[0] | tojson(indent=2) }}"
    "|{{ {'b': 1, 'a': 'ü'} | tojson(sort_keys=true, separators=(',', ':')) }}"
)
NAMESPACE = (
    "{% set ns = namespace(first=true) %}{% for m in messages %}{% if not ns.first %}--{% endif %}"
    "{{ m.content.strip() }}{% set ns.first = false %}{% endfor %}{{ pad_token }}"
)


@pytest.mark.parametrize("source", [LLAMA_LIKE, CONTROLS, JSON, NAMESPACE])
@pytest.mark.parametrize("prompt", [True, False])
def test_rendering_agrees_with_transformers(source: str, prompt: bool) -> None:
    ours = ChatTemplate(source, bos_token="<s>", eos_token="</s>", pad_token=None)
    [theirs], _ = render_jinja_template(
        conversations=[CONVERSATION],
        chat_template=source,
        add_generation_prompt=prompt,
        bos_token="<s>",
        eos_token="</s>",
    )
    assert ours.render(CONVERSATION, add_generation_prompt=prompt) == theirs


def test_the_date_is_today() -> None:
    template = ChatTemplate("{{ strftime_now('%Y') }}")
    assert template.render(CONVERSATION, add_generation_prompt=False) == str(datetime.now().year)


def test_messages_are_not_changed() -> None:
    conversation = [dict(message) for message in CONVERSATION]
    template = ChatTemplate("{% set _ = messages[0].update({'role': 'x'}) %}")
    with pytest.raises(InvalidArgument, match="refused the messages"):
        template.render(conversation, add_generation_prompt=True)
    assert conversation == CONVERSATION


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ messages[9].content }}", "has no element 9"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ range(1000000000) | length }}", "Range too big"),
        ("{{ undefined_function() }}", "undefined"),
    ],
)
def test_whatever_a_template_raises_is_a_refusal(source: str, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=f"the chat template refused the messages: .*{reason}"):
        ChatTemplate(source).render(CONVERSATION, add_generation_prompt=True)


def test_a_template_that_is_not_jinja_is_refused() -> None:
    template = ChatTemplate("{% for %}")
    assert template.exists
    with pytest.raises(InvalidArgument, match="chat template is not valid"):
        template.render(CONVERSATION, add_generation_prompt=True)


def test_no_template_is_said_clearly() -> None:
    assert not ChatTemplate(None).exists
    with pytest.raises(InvalidArgument, match="this model has no chat template"):
        ChatTemplate(None).render(CONVERSATION, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "messages is empty"),
        ("hello", "messages must be a list of messages, got str"),
        ({"role": "user", "content": "x"}, "messages must be a list of messages, got dict"),
        (None, "messages must be a list of messages, got NoneType"),
        ([CONVERSATION[0], "hello"], r"messages\[1\] must have a role and a content, got 'hello'"),
        ([{"content": "x"}], r"messages\[0\].role must be one of system, .*, got None"),
        ([{"role": "robot", "content": "x"}], r"messages\[0\].role must be one of .*, got 'robot'"),
        ([{"role": ["user"], "content": "x"}], r"messages\[0\].role must be one of"),
        ([{"role": "user"}], r"messages\[0\].content must be a string, got None"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\].content must be a string"),
    ],
)
def test_bad_messages_are_named(messages: Any, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        ChatTemplate("{{ messages }}").render(messages, add_generation_prompt=True)
