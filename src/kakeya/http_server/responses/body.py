"""Responses and conversations as the API shows them."""

from typing import Any

from kakeya.http_server.generation import Usage
from kakeya.http_server.responses.items import Item
from kakeya.http_server.responses.plan import Plan
from kakeya.http_server.responses.store import Conversation


def new_body(plan: Plan, response_id: str, created_at: int, model: str) -> dict[str, Any]:
    """A response that has just begun: what it was asked, and no answer yet."""
    request = plan.request
    conversation = plan.conversation
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": model,
        "previous_response_id": request.previous_response_id,
        "conversation": None if conversation is None else {"id": conversation.id},
        "instructions": plan.instructions,
        "output": [],
        "usage": None,
        **_settings(plan),
    }


def _settings(plan: Plan) -> dict[str, Any]:
    """How it was to be answered, the defaults filled in."""
    request = plan.request
    sampling = plan.sampling
    return {
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": request.is_kept,
        "temperature": sampling.temperature,
        "text": _text(plan),
        "tool_choice": _tool_choice(plan),
        "tools": list(plan.tools),
        "top_logprobs": sampling.top_logprobs,
        "top_p": sampling.top_p,
        "truncation": request.truncation or "auto",
        "user": request.user,
    }


def _text(plan: Plan) -> dict[str, Any]:
    text = plan.request.text
    wanted = {"type": "text"} if text is None else text.format.model_dump(by_alias=True)
    return {"format": wanted, "verbosity": "medium"}


def _tool_choice(plan: Plan) -> Any:
    wanted = plan.request.tool_choice
    if wanted is None or isinstance(wanted, str):
        return wanted or "auto"
    return wanted.model_dump()


def ended(
    body: dict[str, Any], output: list[Item], usage: Usage, *, is_cut: bool, now: int
) -> dict[str, Any]:
    """The response, answered. `is_cut`: the answer reached its bound."""
    return body | {
        "status": "incomplete" if is_cut else "completed",
        "completed_at": None if is_cut else now,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": output,
        "usage": _usage(usage),
    }


def failed(body: dict[str, Any], output: list[Item], message: str, status: int) -> dict[str, Any]:
    """The response, broken off by an error that HTTP would tell as `status`."""
    code = "rate_limit_exceeded" if status == 429 else "server_error"
    return body | {"status": "failed", "error": {"code": code, "message": message}, "output": output}


def _usage(usage: Usage) -> dict[str, Any]:
    told = usage.to_responses()
    computed = usage.prompt_tokens - usage.cached_tokens
    details = told["input_tokens_details"] | {"cache_write_tokens": computed}
    return told | {"input_tokens_details": details}


def shown_conversation(conversation: Conversation) -> dict[str, Any]:
    """A conversation; what follows its metadata are extensions of ours."""
    head = conversation.head
    thread = None if head is None else head.thread
    return {
        "id": conversation.id,
        "object": "conversation",
        "created_at": conversation.created_at,
        "metadata": conversation.metadata,
        "title": conversation.title,
        "message_count": conversation.item_count,
        "session_id": None if thread is None else thread.session_id,
        "last_response_id": None if head is None else head.id,
        "is_answering": conversation.is_busy,
    }
