"""The conformance suite of the SDKs: cases as data, how they are prepared, and how an SDK's play is judged.

`tests/conformance/README.md` describes the cases. An SDK only plays them and tells what came of each step.
The judgement is here, the same for all.
"""

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from support.network import (
    Alter,
    BreakStream,
    CutLine,
    EndStream,
    Fault,
    FaultyProxy,
    Hang,
    LoseReply,
    Refuse,
)

FOLDER = Path(__file__).parents[1] / "conformance"

Step = dict[str, Any]
Outcome = dict[str, Any]

_FAULTS: dict[str, Any] = {
    "refuse": Refuse,
    "lose_reply": LoseReply,
    "alter": lambda **fields: Alter(fields),
    "break_stream": BreakStream,
    "end_stream": EndStream,
    "hang": Hang,
}
# Steps that give the same whenever they are played, and options of streams that are not read to their end.
_PURE = ("encode", "decode", "token_text", "render", "chat_ids", "list_sessions")
_LEAVING = {"cancel_after", "leave_after", "hold_after", "timeout_s"}
_METHODS_WITH_IDS = ("CreateSession", "AppendTokens", "Generate", "ForkSession", "RecallTokens")


@dataclass(frozen=True)
class Case:
    """What happens between a client and a server, and what must come of it."""

    title: str
    steps: list[Step]
    clients: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    faults: Mapping[str, list[Any]] = field(default_factory=dict)
    cut_after_bytes: int | None = None
    calls: list[str] | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    models: list[str | None] | None = None


@dataclass(frozen=True)
class Played:
    """What an SDK told of a case, and what the server's side saw of it."""

    outcomes: list[Outcome]
    calls: list[str]
    models: list[str | None]
    connections: int | None = None


def read_cases() -> list[Case]:
    """Every case, with what is repeated written out."""
    found = []
    for path in sorted((FOLDER / "cases").glob("*.json")):
        for case in json.loads(path.read_text()):
            title = f"{path.stem}: {case.pop('title')}"
            found.append(Case(title, list(_written_out(case.pop("steps"))), **case))
    return [*found, *_template_cases()]


def read_templates() -> dict[str, str]:
    """Chat templates in the manner of the families."""
    paths = sorted((FOLDER / "templates").glob("*.jinja"))
    return {path.stem: path.read_text().removesuffix("\n") for path in paths}


def read_conversations() -> dict[str, Any]:
    """What is written with them: `conversations` by name, and `tools`."""
    read: dict[str, Any] = json.loads((FOLDER / "templates/conversations.json").read_text())
    return read


def read_tokenizers() -> dict[str, Any]:
    """Tokenizers that are not the server's, as `GetTokenizer` would give them."""
    return {path.stem: json.loads(path.read_text()) for path in (FOLDER / "tokenizers").glob("*.json")}


def _template_cases() -> Iterator[Case]:
    """Every template over every conversation. What they must give is what `transformers` gives, which
    tests/text/test_chat_template_families.py holds the Python SDK to; so the SDKs must only agree."""
    read = read_conversations()
    for family, template in read_templates().items():
        steps = [
            {"do": "render", "template": template, "messages": messages, "tools": tools}
            | {"add_generation_prompt": prompt}
            for messages in read["conversations"].values()
            for tools in (read["tools"], [])
            for prompt in (True, False)
        ]
        yield Case(f"templates: as {family} writes them", steps)


def _written_out(steps: list[Step]) -> Iterator[Step]:
    """The steps, with what is short for many of them written out."""
    for step in steps:
        if "repeat" in step:
            for number in _numbers(step["repeat"]):
                yield from (_with_number(each, number) for each in step["steps"])
        elif step["do"] == "at_once":
            numbers = _numbers(step["branches"])
            branches = [[_with_number(each, number) for each in step["steps"]] for number in numbers]
            yield {"do": "at_once", "branches": branches}
        else:
            yield _with_number(step, 0)


def _numbers(given: int | list[int]) -> list[int]:
    return list(range(given)) if isinstance(given, int) else given


def _with_number(value: Any, number: int) -> Any:
    """`{i}` is the number, and `{"range": [a, b]}` the numbers from a to b - 1."""
    if isinstance(value, dict):
        if value.keys() == {"range"}:
            return list(range(*value["range"]))
        return {key: _with_number(each, number) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_number(each, number) for each in value]
    if value == "{i}":
        return number
    return value.replace("{i}", str(number)) if isinstance(value, str) else value


# Between the client and the server.


@dataclass
class Between:
    """What stands between: nothing, a proxy that loses things, or a line that is cut."""

    address: str
    proxy: FaultyProxy | None = None
    line: CutLine | None = None

    def calls(self) -> list[str]:
        """The calls that came through, in order; those with equal request ids have equal numbers."""
        numbers: dict[str, int] = {}
        names = []
        for name, request in self.proxy.calls if self.proxy is not None else ():
            if name in _METHODS_WITH_IDS:
                name = f"{name}#{numbers.setdefault(request.request_id, len(numbers) + 1)}"
            names.append(name)
        return names

    def models(self) -> list[str | None]:
        """What those calls named as the model, each once and in order."""
        return [] if self.proxy is None else list(dict.fromkeys(self.proxy.models))


@asynccontextmanager
async def between(case: Case, server: str) -> AsyncIterator[Between]:
    """What the case wants between its client and the server."""
    async with AsyncExitStack() as stack:
        if case.cut_after_bytes is not None:
            line = await stack.enter_async_context(CutLine(server, case.cut_after_bytes))
            yield Between(line.address, line=line)
        elif case.faults or case.counts or case.calls is not None or case.models is not None:
            proxy = await stack.enter_async_context(FaultyProxy(server))
            for method, faults in case.faults.items():
                proxy.plan(method, *map(_fault, faults))
            yield Between(proxy.address, proxy)
        else:
            yield Between(server)


def _fault(given: dict[str, Any] | None) -> Fault | None:
    if given is None:
        return None
    ((name, settings),) = given.items()
    if "code" in settings:
        settings = settings | {"code": grpc.StatusCode[settings["code"]]}
    fault: Fault = _FAULTS[name](**settings)
    return fault


# Judgement.


def judge(case: Case, played: Played) -> None:
    """Raises AssertionError for the first step that did not go as the case says."""
    assert len(played.outcomes) == len(case.steps), "not every step was played"
    said: dict[str, Any] = {}
    for step, outcome in _flat(case.steps, played.outcomes):
        where = json.dumps(step, ensure_ascii=False)[:300]
        try:
            _judge_step(step, outcome, said)
        except AssertionError as error:
            raise AssertionError(f"{where}\n{json.dumps(outcome)[:600]}\n{error}") from None
    if case.calls is not None:
        assert played.calls == case.calls
    if case.models is not None:
        assert played.models == case.models
    for method, count in case.counts.items():
        assert played.calls.count(method) == count, method
    if case.cut_after_bytes is not None:
        assert played.connections is not None
        assert played.connections > 1, "the line was never cut"


def judge_agreement(case: Case, one: Played, other: Played) -> None:
    """Raises AssertionError where two SDKs say different things, be it text, ids or an error's class."""
    others = _flat(case.steps, other.outcomes)
    same_histories = True
    for (step, outcome), (_, its_outcome) in zip(_flat(case.steps, one.outcomes), others, strict=True):
        same_histories &= not step.keys() & _LEAVING
        if same_histories or step["do"] in _PURE:
            assert _said(step, outcome) == _said(step, its_outcome), step


def _said(step: Step, outcome: Outcome) -> Any:
    """What does not depend on time, as a session's id does."""
    if "fails" in outcome:
        return outcome["fails"]["error"], outcome["fails"]["status"]
    if step["do"] in ("generate", "chat"):
        return [outcome["gives"].get(key) for key in ("token_ids", "text", "logprobs")]
    return outcome["gives"] if step["do"] in _PURE else None


def _flat(steps: list[Step], outcomes: list[Outcome]) -> Iterator[tuple[Step, Outcome]]:
    for step, outcome in zip(steps, outcomes, strict=True):
        if step["do"] == "at_once":
            for branch, told in zip(step["branches"], outcome["gives"], strict=True):
                yield from _flat(branch, told)
        else:
            yield step, outcome


def _judge_step(step: Step, outcome: Outcome, said: dict[str, Any]) -> None:
    if "fails" in step:
        assert "fails" in outcome, "it went well"
        expected, failure = {"status": None} | step["fails"], outcome["fails"]
        assert (failure["error"], failure["status"]) == (expected["error"], expected["status"])
        assert expected.get("says", "") in failure["message"]
        return
    if step["do"] == "render" and "gives" not in step:
        return  # what a template refuses is compared between the SDKs
    assert "gives" in outcome, "it failed"
    given = outcome["gives"]
    if "gives" in step:
        assert (difference := _difference(step["gives"], given)) is None, difference
    if step["do"] in ("generate", "chat"):
        _judge_stream(step, given, said)
    if "history_is" in step:
        length, stream = step["history_is"]
        assert given["history_length"] == length + len(said[stream]["token_ids"])


def _judge_stream(step: Step, given: dict[str, Any], said: dict[str, Any]) -> None:
    if step["do"] == "generate" and given["result"] is not None:
        assert given["result"]["generated_token_count"] == len(given["token_ids"])
    said[step.get("as", "")] = given
    if "same_as" in step:
        earlier = said[step["same_as"]]
        assert all(given.get(key) == earlier.get(key) for key in ("token_ids", "text")), earlier


def _difference(expected: Any, given: Any) -> str | None:
    """What differs; None when all that is expected is there. Keys that are not expected do not matter."""
    if isinstance(expected, dict) and expected.keys() == {"between"}:
        low, high = expected["between"]
        return None if low <= given <= high else f"{given} is not between {low} and {high}"
    if isinstance(expected, dict) and isinstance(given, dict):
        parts = (_difference(expected[key], given.get(key)) for key in expected)
        return next((f"{key}: {part}" for key, part in zip(expected, parts, strict=True) if part), None)
    return None if expected == given else f"expected {expected}, got {given}"
