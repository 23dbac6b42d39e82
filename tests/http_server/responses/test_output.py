"""How an answer's text becomes output items and events."""

from typing import Any

from kakeya.http_server.responses.output import OutputWriter
from kakeya.text.answer import Piece, TextToken

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def told(writer: OutputWriter, *pieces: str, is_complete: bool = True) -> list[dict[str, Any]]:
    events = [event for text in pieces for event in writer.feed(piece(text))]
    return events + writer.finish(is_complete=is_complete)


def piece(text: str) -> Piece:
    return Piece(text, (TextToken(1, text, list(text.encode()), -1.0, ((text, list(text.encode()), -1.0),)),))


def writer(*, reads_calls: bool = True, tells_events: bool = True) -> OutputWriter:
    return OutputWriter(reads_calls=reads_calls, tells_events=tells_events)


def test_text_before_a_call_is_a_message_of_its_own() -> None:
    output = writer()
    told(output, "Let me see. ", CALL[:20], CALL[20:], "\n" + CALL)
    assert [item["type"] for item in output.output] == ["message", "function_call", "function_call"]
    assert [item["status"] for item in output.output] == ["completed"] * 3
    message = output.message()
    assert message.content == "Let me see."
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("f", '{"a": 1}')] * 2
    assert len({item["id"] for item in output.output} | {call.id for call in message.tool_calls}) == 5


def test_text_after_a_call_is_another_message() -> None:
    output = writer()
    told(output, CALL, " and so on")
    assert [item["type"] for item in output.output] == ["function_call", "message"]


def test_calls_are_text_where_nobody_looks_for_them() -> None:
    output = writer(reads_calls=False)
    told(output, CALL)
    assert output.message().content == CALL
    assert output.message().tool_calls == ()


def test_half_a_call_is_kept_as_it_was_said() -> None:
    output = writer()
    told(output, CALL[:-15], is_complete=False)
    assert [item["status"] for item in output.output] == ["incomplete"]
    assert output.message().content == CALL[:-15]
    assert output.message().tool_calls == ()


def test_half_a_call_after_a_whole_one_is_left_out() -> None:
    for cut in (12, 30, 50):
        output = writer()
        told(output, "Well. ", CALL, "\n" + CALL[:cut], is_complete=False)
        message = output.message()
        assert message.content == "Well."
        assert [call.name for call in message.tool_calls] == ["f"]


def test_a_call_that_hardly_began_is_kept_as_it_was_said() -> None:
    output = writer()
    told(output, CALL[:15], is_complete=False)
    assert output.message().content == CALL[:15]


def test_nothing_said_is_an_empty_message() -> None:
    for output in (writer(), writer(reads_calls=False)):
        events = told(output)
        assert [item["content"][0]["text"] for item in output.output] == [""]
        assert next(event["type"].split(".")[-2:] for event in events) == ["output_item", "added"]


def test_tokens_come_with_the_text_that_they_end_in() -> None:
    output = writer()
    events = told(output, "a <", "b", " ", "")
    deltas = [event for event in events if event["type"].endswith("text.delta")]
    assert "".join(event["delta"] for event in deltas) == "a <b "
    tokens = [each["token"] for event in deltas for each in event["logprobs"]]
    assert tokens == ["a <", "b", " ", ""]
    assert output.output[0]["content"][0]["logprobs"] == [
        each for event in deltas for each in event["logprobs"]
    ]


def test_tokens_without_text_come_at_the_end() -> None:
    output = writer(reads_calls=False)
    events = told(output, "a", "")
    deltas = [event for event in events if event["type"].endswith("text.delta")]
    assert [(event["delta"], [each["token"] for each in event["logprobs"]]) for event in deltas] == [
        ("a", ["a"]),
        ("", [""]),
    ]


def test_tokens_of_a_call_are_nobodys() -> None:
    output = writer()
    told(output, "x", CALL, "y")
    first, _, last = output.output
    assert [each["token"] for each in first["content"][0]["logprobs"]] == ["x"]
    assert [each["token"] for each in last["content"][0]["logprobs"]] == ["y"]


def test_without_a_reader_there_are_no_events_and_the_same_output() -> None:
    said = ("x", CALL, "y")
    silent, telling = (writer(tells_events=tells) for tells in (False, True))
    assert told(silent, *said) == []
    assert told(telling, *said) != []
    assert silent.message().content == telling.message().content == "x\ny"
    ids = {"id": "", "call_id": ""}
    assert [item | ids for item in silent.output] == [item | ids for item in telling.output]
