"""The chats that proposers are tried on."""

import pytest

from kakeya.bench.texts_to_draft import KINDS, tasks


@pytest.mark.parametrize("kind", KINDS)
def test_chats_of_a_kind_differ(kind: str) -> None:
    asked = [task.messages[0]["content"] for task in tasks(kind, range(3, 11))]
    assert len(set(asked)) == 8


def test_who_edits_predicts_the_text_that_was_given() -> None:
    for task in tasks("edit", range(3)):
        predicted = task.fields["prediction"]["content"]
        assert task.messages[0]["content"].endswith(predicted)
        assert len(predicted.split()) == 90


def test_json_has_a_schema() -> None:
    (task,) = tasks("json", [0])
    schema = task.fields["response_format"]["json_schema"]["schema"]
    assert schema["required"] == ["title", "animals", "places"]
