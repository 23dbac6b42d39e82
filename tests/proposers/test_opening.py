"""Which proposers a configuration opens, with what they say of themselves."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kakeya.config import EngineConfig, ProposerChoice, parse_proposers
from kakeya.engine.slab import slab_geometry
from kakeya.errors import ConfigError, ModelNotFound
from kakeya.loading import load_model
from kakeya.models.checkpoint import open_checkpoint
from kakeya.proposers.model import SmallModel
from kakeya.proposers.ngram import LookUp
from kakeya.proposers.opening import open_proposers, proposer_memory
from kakeya.types import BackendChoice
from support import serving


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return serving.write_model(tmp_path_factory.mktemp("model"))


def config(proposer: str) -> EngineConfig:
    return replace(serving.ENGINE, proposer=proposer, draft_tokens=5)


def test_a_proposer_is_named_by_its_kind_and_path() -> None:
    assert parse_proposers("none") == parse_proposers("") == ()
    assert parse_proposers("ngram") == (ProposerChoice("ngram"),)
    assert parse_proposers("ngram+model:a:b.gguf") == (
        ProposerChoice("ngram"),
        ProposerChoice("model", "a:b.gguf"),
    )
    assert [str(each) for each in parse_proposers("ngram+model:x")] == ["ngram", "model:x"]


@pytest.mark.parametrize("written", ["nonsense", "model", "model:", "ngram:x", "ngram+", "none+ngram"])
def test_what_is_no_proposer_is_refused(written: str) -> None:
    with pytest.raises(ConfigError, match=r"proposer must be auto, none, ngram or model:PATH"):
        EngineConfig(proposer=written)


@pytest.mark.parametrize("written", ["ngram+ngram", "auto+ngram", "model:a+model:b"])
def test_each_kind_stands_once(written: str) -> None:
    with pytest.raises(ConfigError, match="each kind once"):
        EngineConfig(proposer=written)


@pytest.mark.parametrize("count", [0, 65])
def test_a_draft_has_a_length(count: int) -> None:
    with pytest.raises(ConfigError, match="draft_tokens must be a whole number from 1 to 64"):
        EngineConfig(draft_tokens=count)


def test_auto_looks_up_on_a_cpu_and_does_nothing_on_a_device() -> None:
    assert EngineConfig().proposers == (ProposerChoice("ngram"),)
    assert EngineConfig(backend=BackendChoice.CUDA).proposers == ()
    assert EngineConfig(backend=BackendChoice.CUDA, proposer="ngram").proposers == (ProposerChoice("ngram"),)


def test_none_says_so(model: Path) -> None:
    loaded, proposers = open_proposers(load_model(str(model), config("none")))
    assert not proposers
    assert (loaded.facts.proposer, loaded.facts.draft_tokens) == ("none", 0)


def test_several_stand_in_the_order_given(model: Path) -> None:
    written = f"ngram+model:{model}"
    loaded, proposers = open_proposers(load_model(str(model), config(written)))
    first, second = proposers
    assert isinstance(first, LookUp)
    assert isinstance(second, SmallModel)
    assert first.max_draft == second.max_draft == 5
    facts = loaded.facts
    assert (facts.proposer, facts.draft_tokens, facts.proposer_bytes) == (written, 5, facts.pool_bytes)


def test_a_small_model_is_in_the_memory_plan(model: Path) -> None:
    assert proposer_memory(config("ngram")) == (0, 0)
    asked = config(f"model:{model}")
    weights, slab = proposer_memory(asked)
    assert slab == slab_geometry(open_checkpoint(model).config, asked).slab_bytes
    assert weights > 0


def test_a_small_model_with_another_tokenizer_is_refused(model: Path, tmp_path: Path) -> None:
    other = serving.write_model(tmp_path / "other")
    written = json.loads((other / "tokenizer.json").read_bytes())
    vocabulary = written["model"]["vocab"]
    vocabulary["!"], vocabulary["#"] = vocabulary["#"], vocabulary["!"]
    (other / "tokenizer.json").write_text(json.dumps(written))
    with pytest.raises(ConfigError, match="their tokenizers differ"):
        open_proposers(load_model(str(model), config(f"model:{other}")))


def test_a_small_model_that_is_not_there_is_named(model: Path) -> None:
    with pytest.raises(ModelNotFound, match="/no/such"):
        open_proposers(load_model(str(model), config("model:/no/such")))
