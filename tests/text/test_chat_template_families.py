"""Templates in the style of each family, against `transformers`: tools, thinking, empty and absent systems."""

# ruff: noqa: E501 - templates are written in long lines

from typing import Any

import pytest
import tokenizers
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from kakeya.errors import InvalidArgument
from kakeya.text.chat_template import ChatTemplate

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather “now” in a <city> & its suburbs",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
CALL = {
    "type": "function",
    "id": "call12345",
    "function": {"name": "weather", "arguments": {"city": "Zürich"}},
}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "plain": [{"role": "user", "content": "Hi  \n"}],
    "empty system": [{"role": "system", "content": ""}, {"role": "user", "content": "Hi"}],
    "system": [
        {"role": "system", "content": " Be <brief> & “kind”. /no_think "},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Bye."},
    ],
    "thinking": [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "<think>\nSimple.\n</think>\n\n4"},
        {"role": "user", "content": "And 3 + 3?"},
        {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\n6", "reasoning_content": "Easy."},
    ],
    "tools": [
        {"role": "user", "content": "Weather in Zürich?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"sky": "grey"}', "tool_call_id": "call12345", "name": "weather"},
        {"role": "user", "content": "Thanks."},
    ],
}

# Written here in the manner of the families' own, with the means those use.
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- if not ns.found and message.role == "user" and message.content is string %}
        {%- set ns.found = true %}{%- set ns.last = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set reasoning = message.reasoning_content if message.reasoning_content is defined else '' %}
        {%- if not reasoning and '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- if loop.index0 > ns.last and reasoning %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.previtem.role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

SMOLLM3 = """{#- A comment, a default that may be overridden, and flags inside the system message. -#}
{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{%- set mode = '/think' if enable_thinking else '/no_think' -%}
{%- if messages[0].role == 'system' -%}
    {%- set text = messages[0].content -%}
    {%- if '/no_think' in text -%}{%- set mode = '/no_think' -%}{%- endif -%}
    {%- set text = text.replace('/no_think', '').replace('/think', '').rstrip() -%}
{%- endif -%}
<|im_start|>system
## Metadata

Today Date: {{ strftime_now('%d %B %Y') }}
Reasoning Mode: {{ mode }}

{% if text %}{{ text }}{% else %}You are helpful.{% endif %}
{% if tools %}

{% for tool in tools %}{{ tool | tojson(indent=2) }}
{% endfor %}{% endif %}<|im_end|>
{% for message in messages if message.role != 'system' %}
{% if message.role == 'assistant' and mode == '/think' %}
<|im_start|>assistant
{% generation %}{{ message.content.lstrip('\\n') }}<|im_end|>{% endgeneration %}

{% else %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if mode == '/no_think' %}<think>

</think>
{% endif %}{% endif %}"""

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") if strftime_now is defined else "26 Jul 2024" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- if tools is not none %}
    {%- set first_user_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
    {{- first_user_message + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("One call at a time!") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}{%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}{%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set first_user_prefix = "" -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- else -%}{{ raise_exception("Invalid content type") }}{%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{'<start_of_turn>model\\n'}}{%- endif -%}"""

MISTRAL = """{%- set yesterday = strftime_now("%Y-%m-%d") %}
{%- if messages[0]["role"] == "system" %}{%- set system = messages[0]["content"] %}{%- set rest = messages[1:] %}
{%- else %}{%- set system = "It is " + yesterday %}{%- set rest = messages %}{%- endif %}
{{- bos_token }}{{- "[SYSTEM_PROMPT]" + system + "[/SYSTEM_PROMPT]" }}
{%- set users = rest | selectattr("role", "equalto", "user") | list %}
{%- for message in rest %}
    {%- if message.role == "user" %}
        {%- if tools is not none and message == users[-1] %}{{- "[AVAILABLE_TOOLS]" + (tools | tojson) + "[/AVAILABLE_TOOLS]" }}{%- endif %}
        {{- "[INST]" + message.content + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS][" }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function | tojson %}{{- out[:-1] }}
            {%- if not call.id is defined or call.id | length != 9 %}{{- raise_exception("Tool call ids are nine characters long!") }}{%- endif %}
            {{- ', "id": "' + call.id + '"}' }}{{- ", " if not loop.last else "]" + eos_token }}
        {%- endfor %}
    {%- elif message.role == "tool" %}
        {{- '[TOOL_RESULTS]{"content": ' + message.content|string + "}[/TOOL_RESULTS]" }}
    {%- else %}{{- message.content + eos_token }}{%- endif %}
{%- endfor %}"""

PHI = (
    "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}"
    "{{ '<|system|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}"
    "{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)

GRANITE = """{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set system_message = "Today's Date: " + strftime_now('%B %d, %Y') + "." %}
    {%- if tools and documents %}{%- set system_message = system_message + " Use both." %}
    {%- elif tools %}{%- set system_message = system_message + " Use tools." %}{%- endif %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\n' }}
{%- if tools %}{{- '<|start_of_role|>tools<|end_of_role|>' }}{{- tools | tojson(indent=4) }}{{- '<|end_of_text|>\n' }}{%- endif %}
{%- for message in loop_messages %}
    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\n' }}
    {%- if loop.last and add_generation_prompt %}
        {{- '<|start_of_role|>assistant' }}{%- if controls %}{{- ' ' + controls | tojson() }}{%- endif %}{{- '<|end_of_role|>' }}
    {%- endif %}
{%- endfor %}"""

OLMO = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ '<|system|>
' + message['content'] + '
' }}{% elif message['role'] == 'assistant' %}{% if not loop.last %}{{ '<|assistant|>
'  + message['content'] + eos_token + '
' }}{% else %}{{ '<|assistant|>
'  + message['content'] + eos_token }}{% endif %}{% else %}{{ '<|' ~ message.role ~ '|>
' + message['content'] + '
' }}{% endif %}{% if loop.last and add_generation_prompt %}{{ '<|assistant|>
' }}{% endif %}{% endfor %}"""

TEMPLATES = {
    "qwen": QWEN,
    "smollm3": SMOLLM3,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "phi": PHI,
    "granite": GRANITE,
    "olmo": OLMO,
}


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
    qwen = by_transformers(QWEN, thinking, False, None)
    assert qwen is not None
    assert "Easy." in qwen
    assert "Simple." not in qwen
    assert "“now” in a <city> &" in (by_transformers(MISTRAL, tools, True, TOOLS) or "")
    assert by_transformers(GEMMA, tools, True, None) is None
    assert "Reasoning Mode: /no_think" in (
        by_transformers(SMOLLM3, CONVERSATIONS["system"], True, None) or ""
    )
