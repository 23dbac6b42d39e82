"""Tests of the official Python package, against a front end over two homes.

Those are left out that want answers in fewer tokens than a tiny model has for them, and the one that asks for
a model by its name: a front end tells of that what one home has, and in the list what all have.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from compat.conftest import client, run_async  # noqa: F401 (fixtures)
from compat.test_openai_python import (  # noqa: F401
    test_a_chat_goes_on_where_it_was,
    test_a_chat_is_answered,
    test_a_json_schema_is_kept_to,
    test_a_stream_says_the_same_and_ends_with_usage,
    test_json_objects_are_objects,
    test_leaving_a_stream_frees_its_place,
    test_pydantic_models_are_parsed,
    test_stop_strings_and_several_choices,
    test_text_is_scored,
)
from compat.test_openai_python_responses import (  # noqa: F401
    test_a_stream_has_typed_events,
    test_an_earlier_response_is_a_branch_point,
    test_conversations,
    test_formats,
    test_responses_are_kept_until_they_are_deleted,
    test_the_asynchronous_client_goes_on_too,
    test_the_stream_helper_parses,
)
from kakeya.config import CacheConfig
from support.clients import KEY, SINK, WINDOW, Served
from support.clustering import front_of, town_of
from support.serving import ENGINE, write_model

pytestmark = pytest.mark.untraced


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = write_model(tmp_path_factory.mktemp("model"))
    engine = replace(ENGINE, cache=CacheConfig(sink=SINK, window=WINDOW))
    with (
        town_of(directory, tmp_path_factory.mktemp("shared"), "a", "b", engine=engine, capacity=16) as town,
        front_of(town, KEY) as front,
    ):
        yield Served(f"{front.url}/v1", "tiny")


@pytest.fixture
def model(served: Served) -> str:
    """Not the directory that other tests of the cluster have."""
    return served.model
