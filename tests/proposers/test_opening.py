"""Which proposers a configuration opens, with what they say of themselves."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kakeya import kernels as native
from kakeya.cli.serve import planned_capacity
from kakeya.cli.serve_options import ServeOptions
from kakeya.config import EngineConfig, ProposerChoice, parse_proposers
from kakeya.engine import backends
from kakeya.engine.cuda.memory import device_memory
from kakeya.engine.slab import prefix_cache_bytes, slab_geometry
from kakeya.errors import ConfigError, CorruptCheckpoint, ModelNotFound
from kakeya.loading import load_model
from kakeya.models.checkpoint import open_checkpoint
from kakeya.models.drafter import read_drafter
from kakeya.models.float_types import FLOAT_TYPES
from kakeya.proposers import opening, shipped
from kakeya.proposers.desk import open_desk
from kakeya.proposers.drafter import TrainedDrafter
from kakeya.proposers.model import SmallModel
from kakeya.proposers.ngram import LookUp
from kakeya.proposers.opening import (
    device_drafter,
    load_small_model,
    open_proposers,
    proposer_memory,
    small_config,
)
from kakeya.proposers.remote import RemoteProposer
from kakeya.runtime import Runtime
from kakeya.text import Tokenizer
from kakeya.types import BackendChoice, DType, KernelChoice, WeightFormat
from support import serving, tiny
from support.engines import RunsAhead
from support.proposing import proposing
from support.tiny import sentencepiece_files


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
    assert parse_proposers("drafter") == (ProposerChoice("drafter"),)
    assert parse_proposers("ngram+drafter:a.safetensors")[1] == ProposerChoice("drafter", "a.safetensors")


@pytest.mark.parametrize("path", ["/c++/a.gguf", "a+b", "a+", "+ngram.gguf", "x+models/a"])
@pytest.mark.parametrize("joined", ["model:{}", "ngram+model:{}", "model:{}+ngram"])
def test_a_path_may_have_plus_signs(joined: str, path: str) -> None:
    written = joined.format(path)
    choices = parse_proposers(written)
    assert ProposerChoice("model", path) in choices
    assert len(choices) == joined.count("+") + 1
    assert "+".join(map(str, choices)) == written


@pytest.mark.parametrize(
    "written",
    [
        "nonsense",
        "ngram+nonsense",
        "ngram++ngram",
        "model",
        "model:",
        "ngram:x",
        "ngram+",
        "none+ngram",
        "remote",
        "remote:",
    ],
)
def test_what_is_no_proposer_is_refused(written: str) -> None:
    with pytest.raises(ConfigError, match="must be auto, none, ngram, drafter, drafter:PATH, model:PATH or"):
        EngineConfig(proposer=written)


@pytest.mark.parametrize("written", ["ngram+ngram", "auto+ngram", "model:a+model:b", "drafter+drafter:a"])
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
    checkpoint = open_checkpoint(model)
    assert proposer_memory(config("ngram"), checkpoint, "tiny") == (0, 0)
    asked = config(f"model:{model}")
    weights, slab = proposer_memory(asked, checkpoint, "tiny")
    assert slab == slab_geometry(checkpoint.config, asked).slab_bytes
    assert weights > 0


def test_a_small_model_guesses_common_tokens_and_is_told_all(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "COMMON_TOKENS", 32)
    asked = replace(config(f"model:{model}"), kernels=KernelChoice.NATIVE, weights=WeightFormat.INT8)
    (choice,) = asked.proposers
    small = load_small_model(choice, asked)
    assert small.backend.vocab_size == 32 < small.model_config.vocab_size
    assert open_desk(asked).vocab_size == small.model_config.vocab_size


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


@pytest.mark.parametrize("written", ["remote:host", "remote:host:0", "remote:a:1,b", "remote:a:99999"])
def test_a_remote_one_needs_an_address(written: str) -> None:
    with pytest.raises(ConfigError, match="remote: "):
        EngineConfig(proposer=written)


def test_addresses_stand_with_commas() -> None:
    (choice,) = parse_proposers("remote:a:1,[::1]:2,a:1")
    assert choice.addresses() == ("a:1", "[::1]:2")


def test_a_remote_one_is_opened_and_says_so(model: Path) -> None:
    desk = open_desk(config(f"ngram+model:{model}"))
    assert desk.tokenizer_digest
    assert desk.held_bytes > 0
    assert desk.name == "ngram+model"
    with proposing(desk) as address:
        written = f"remote:{address}"
        loaded, (proposer,) = open_proposers(load_model(str(model), config(written)))
        assert isinstance(proposer, RemoteProposer)
        assert (loaded.facts.proposer, proposer.max_draft) == (written, 5)
        proposer.close()
        other = replace(load_model(str(model), config(written)), tokenizer=Tokenizer(sentencepiece_files()))
        with pytest.raises(ConfigError, match="its tokenizer differs"):
            open_proposers(other)


def test_what_is_served_to_others_guesses_by_itself(model: Path) -> None:
    for written in ("none", "remote:127.0.0.1:1"):
        with pytest.raises(ConfigError, match="guesses by itself"):
            open_desk(config(written))


def test_looking_up_serves_any_tokenizer(model: Path) -> None:
    desk = open_desk(config("ngram"))
    assert (desk.tokenizer_digest, desk.model_fingerprint, desk.held_bytes) == ("", "", 0)
    verifier = load_model(str(model), config("none"))
    bound = open_desk(config("ngram"), verifier)
    assert bound.tokenizer_digest == verifier.tokenizer.ids_digest
    assert bound.verifier_fingerprint == "", "it shares no weights"


@pytest.fixture(scope="module")
def drafter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained for the model, as it says."""
    checkpoint = open_checkpoint(model)
    path = tmp_path_factory.mktemp("drafter") / "drafter.safetensors"
    return tiny.write_random_drafter(path, checkpoint.config, verifier=checkpoint.fingerprint, block=7)


def test_a_drafter_is_opened_by_its_path(
    model: Path, drafter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = config(f"ngram+drafter:{drafter}")
    loaded, (first, second) = open_proposers(load_model(str(model), asked))
    assert isinstance(first, LookUp)
    assert isinstance(second, TrainedDrafter)
    assert (second.hidden_layers, second.max_draft) == ((0, 1), 5)
    weights, each = proposer_memory(asked, open_checkpoint(model), "tiny")
    assert loaded.facts.proposer == asked.proposer
    assert loaded.facts.proposer_bytes == each * asked.capacity > 0
    each_number = 1 if native.load(asked.kernels) is not None else FLOAT_TYPES[asked.dtype].itemsize
    assert weights / each_number == pytest.approx(drafter.stat().st_size, rel=0.25)
    assert not caplog.records


def test_the_rows_of_a_head_are_counted(model: Path, tmp_path: Path) -> None:
    """Those of a drafter that knows a part of the vocabulary: it has them beside the verifier's own."""
    checkpoint = open_checkpoint(model)
    taken = []
    for size in (checkpoint.config.vocab_size, 100, 50):
        path = tmp_path / str(size)
        tiny.write_random_drafter(path, checkpoint.config, draft_vocab_size=size)
        taken.append(proposer_memory(config(f"drafter:{path}"), checkpoint, "tiny")[0])
    whole, many, few = taken
    assert many - few == few - whole > 0


def test_a_drafter_and_a_small_model_take_memory_together(model: Path, drafter: Path) -> None:
    asked = config(f"drafter:{drafter}+model:{model}")
    facts = open_proposers(load_model(str(model), asked))[0].facts
    _, each = proposer_memory(asked, open_checkpoint(model), "tiny")
    assert facts.proposer_bytes == each * asked.capacity > facts.pool_bytes


def test_a_drafter_for_other_weights_is_used_with_a_warning(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny.write_random_drafter(tmp_path / "it", open_checkpoint(model).config, verifier="others")
    _, proposers = open_proposers(load_model(str(model), config(f"drafter:{tmp_path / 'it'}"), name="tiny"))
    assert isinstance(proposers[0], TrainedDrafter)
    (record,) = caplog.records
    assert "was trained for other weights than those of tiny" in record.getMessage()


def test_a_drafter_for_another_shape_is_refused(model: Path, tmp_path: Path) -> None:
    tiny.write_random_drafter(tmp_path / "it", open_checkpoint(model).config, num_heads=8)
    with pytest.raises(CorruptCheckpoint, match="num_heads 8, this one has 4"):
        open_proposers(load_model(str(model), config(f"drafter:{tmp_path / 'it'}")))


def test_the_package_has_drafters_by_fingerprint(
    model: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipped, "FOLDER", drafter.parent)
    entry = shipped.ShippedDrafter(drafter.name, read_drafter(drafter).digest)
    monkeypatch.setattr(shipped, "DRAFTERS", {open_checkpoint(model).fingerprint: entry})
    loaded, proposers = open_proposers(load_model(str(model), config("drafter")))
    assert isinstance(proposers[0], TrainedDrafter)
    assert loaded.facts.proposer == "drafter"


def test_a_model_without_a_drafter_is_named(model: Path) -> None:
    complaint = "no drafter for tiny comes with the package: train one with `kakeya train drafter`"
    with pytest.raises(ConfigError, match=complaint):
        open_proposers(load_model(str(model), config("drafter"), name="tiny"))
    with pytest.raises(ConfigError, match=complaint):
        proposer_memory(config("drafter"), open_checkpoint(model), "tiny")


def test_every_drafter_of_the_package_is_there() -> None:
    assert shipped.DRAFTERS
    for fingerprint, entry in shipped.DRAFTERS.items():
        stored = read_drafter(entry.path)
        assert stored.config.verifier == fingerprint
        assert stored.digest == entry.digest
        assert set(stored.notes) >= {"command", "licence", "acceptance"}
        assert entry.path.stat().st_size <= 16e6


def test_a_device_runs_its_drafter_by_itself(model: Path, drafter: Path) -> None:
    on_device = replace(config(f"drafter:{drafter}"), backend=BackendChoice.CUDA)
    stored = device_drafter(open_checkpoint(model), on_device, "tiny")
    assert stored is not None
    assert stored.digest == read_drafter(drafter).digest
    assert device_drafter(open_checkpoint(model), config(f"drafter:{drafter}"), "tiny") is None
    assert device_drafter(open_checkpoint(model), replace(on_device, proposer="ngram"), "tiny") is None
    loaded = load_model(str(model), config(f"drafter:{drafter}"))
    elsewhere, proposers = open_proposers(replace(loaded, backend=RunsAhead(loaded.backend)))
    assert not proposers
    assert elsewhere.facts.proposer == f"drafter:{drafter}"


def test_a_device_fills_no_blocks(model: Path, tmp_path: Path) -> None:
    tiny.write_random_drafter(tmp_path / "it", open_checkpoint(model).config, kind="block")
    on_device = replace(config(f"drafter:{tmp_path / 'it'}"), backend=BackendChoice.CUDA)
    with pytest.raises(ConfigError, match="fills blocks, which cuda does not run"):
        device_drafter(open_checkpoint(model), on_device, "tiny")


@pytest.mark.parametrize("kinds", ["drafter", "model", "model+drafter"])
@pytest.mark.parametrize("sessions", [None, 300])
def test_what_the_plan_for_a_device_allows_can_be_opened(
    model: Path, drafter: Path, kinds: str, sessions: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all of its memory: the verifier is opened first, and each asks whether there is room."""
    free = 3 * 10**9
    monkeypatch.setattr(backends, "free_memory", lambda _: free)
    named = {"drafter": f"drafter:{drafter}", "model": f"model:{model}"}
    proposer = "+".join(named[kind] for kind in kinds.split("+"))
    options = ServeOptions(model=str(model), proposer=proposer, memory_budget="100%", capacity=sessions)
    checkpoint = open_checkpoint(model)
    engine = replace(options.engine_config(), backend=BackendChoice.CUDA)
    engine = replace(engine, capacity=planned_capacity(options, checkpoint, engine))
    assert sessions is None or engine.capacity == sessions
    stored = device_drafter(checkpoint, engine, "tiny")
    shape = stored.config if stored is not None else None
    geometry = slab_geometry(checkpoint.config, engine, shape.layers if shape is not None else 0)
    prefix, own = (
        prefix_cache_bytes(engine, geometry),
        device_memory(checkpoint.config, engine, drafter=shape),
    )
    own.check(engine.capacity, geometry.slab_bytes, prefix, free)
    left = free - own.total - prefix - engine.capacity * geometry.slab_bytes
    if "model" in kinds:
        small = small_config(engine)
        slab = slab_geometry(checkpoint.config, small).slab_bytes
        device_memory(checkpoint.config, small).check(engine.capacity, slab, 0, left)


def test_a_small_model_on_a_device_has_wide_weights_buffers_and_graphs(default_model: Path) -> None:
    """A quantized file says little of them."""
    proposer = f"model:{default_model}"
    asked = EngineConfig(backend=BackendChoice.CUDA, dtype=DType.BFLOAT16, proposer=proposer)
    checkpoint = open_checkpoint(default_model)
    held, _ = proposer_memory(asked, checkpoint, "any")
    assert held == device_memory(checkpoint.config, small_config(asked)).total
    assert held > 2 * 134_515_008
    on_cpu, _ = proposer_memory(replace(asked, backend=BackendChoice.CPU), checkpoint, "any")
    assert on_cpu < 1.2 * default_model.stat().st_size


def test_a_runtime_drafts_with_what_its_configuration_names(model: Path, drafter: Path) -> None:
    said = {}
    for proposer in ("none", f"drafter:{drafter}"):
        with Runtime.open(str(model), config(proposer)) as runtime:
            session = runtime.create_session(eos_token_ids=())
            runtime.append(session, [5, 9, 22, 13])
            *tokens, done = runtime.generate(session, 30)
            said[proposer] = [event.token_id for event in tokens]
            assert (done.proposed_draft_tokens > 0) == (proposer != "none")
    assert said["none"] == said[f"drafter:{drafter}"]


def test_a_drafter_guesses_elsewhere_for_its_own_verifier(model: Path, drafter: Path) -> None:
    verifier = load_model(str(model), config("none"))
    desk = open_desk(config(f"drafter:{drafter}"), verifier)
    assert desk.verifier_fingerprint == verifier.fingerprint
    assert desk.hidden_layers
    assert desk.held_bytes > 0
    with pytest.raises(ConfigError, match="shares weights with the model that it guesses for"):
        proposer_memory(config(f"drafter:{drafter}"), None, "")
    with pytest.raises(ConfigError, match="shares weights with the model that it guesses for"):
        open_desk(config(f"drafter:{drafter}"))
    inside = replace(verifier, backend=RunsAhead(verifier.backend))
    with pytest.raises(ConfigError, match="guesses elsewhere on a CPU only"):
        open_desk(config(f"drafter:{drafter}"), inside)
