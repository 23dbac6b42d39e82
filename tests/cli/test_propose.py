"""`kakeya propose` as a real process, and a `kakeya serve` that has it guess."""

import re
import urllib.request
from pathlib import Path

import pytest

from kakeya.cli.console import Screen
from kakeya.cli.propose import ProposeOptions, _banner, _loader
from kakeya.config import CacheConfig, EngineConfig
from kakeya.metrics import ProposerMetrics
from kakeya.runtime import Runtime
from kakeya.types import DType, SamplingParams, TokenEvent, WeightFormat
from kakeya.wire import runtime_pb2 as pb
from support import serving
from support.network import Papers
from support.programs import Run, process

TINY = ("--window", "60", "--dtype", "float32", "--threads", "1", "--weights", "float32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return serving.write_model(tmp_path_factory.mktemp("model"))


def said_by(address: str, count: int = 60) -> tuple[list[int], pb.Done]:
    """What a server generates, and how it ended."""
    with serving.connected(address) as stub:
        session_id = serving.new_session(stub, [5, 6, 7, 8, 9])
        request = pb.GenerateRequest(session_id=session_id, max_tokens=count, temperature=0.8, seed=4)
        events = list(stub.Generate(request))
    return [event.token.id for event in events[:-1]], events[-1].done


@pytest.mark.slow
def test_a_server_has_another_process_guess(model: Path, tmp_path: Path) -> None:
    """With a key and TLS; its own model guesses right, and the answer is that of a server without."""
    papers = Papers.make(tmp_path)
    listen = ("--bind", "localhost:0", "--api-key", "some-secret-key", "--metrics-port", "0")
    tls = ("--tls-cert", str(papers.server.cert), "--tls-key", str(papers.server.key))
    proposer = ("--proposer", f"ngram+model:{model}", "--capacity", "3")
    with process("propose", *proposer, *TINY, *listen, *tls) as far:
        address = far.wait_for(r"proposes with ngram\+model on (localhost:\d+)")
        metrics = far.wait_for(r"metrics +(http://\S+)")
        assert "3 in memory at once" in far.said
        assert "TLS, one API key" in far.said
        assert "some-secret-key" not in far.said
        calling = ("--proposer-api-key", "some-secret-key", "--proposer-tls-ca", str(papers.authority.cert))
        near = ("--model", str(model), *TINY, "--capacity", "4", "--bind", "127.0.0.1:0", "--http", "off")
        with process("serve", *near, "--proposer", f"remote:{address}", *calling) as server:
            where = server.wait_for(r"serves .* on (127\.0\.0\.1:\d+)")
            tokens, done = said_by(where)
            with urllib.request.urlopen(metrics) as page:
                counted = page.read().decode()
            assert "kakeya_proposer_streams 1.0" in counted
            assert re.search(r'kakeya_proposer_guessed_tokens_total\{proposer="model"\} \d+', counted)
            assert far.end() == 0, far.said
            assert "drained" in far.said
            again, alone = said_by(where)
            assert (again, alone.proposed_draft_tokens) == (tokens, 0), "it goes on without"
            assert "is left: UNAVAILABLE: the proposer is shutting down" in server.said
            assert server.end() == 0
            assert "Traceback" not in server.said + far.said
    cache = CacheConfig(window=60)
    config = EngineConfig(cache=cache, dtype=DType.FLOAT32, weights=WeightFormat.FLOAT32, proposer="none")
    with Runtime.open(str(model), config) as plain:
        session_id = plain.create_session(eos_token_ids=())
        plain.append(session_id, [5, 6, 7, 8, 9])
        events = list(plain.generate(session_id, 60, SamplingParams(temperature=0.8, seed=4)))
    assert [event.token_id for event in events if isinstance(event, TokenEvent)] == tokens
    assert done.generated_token_count == 60


@pytest.mark.usefixtures("usual_logs")
@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--proposer", "none"), "guesses by itself"),
        (("--proposer", "remote:127.0.0.1:1"), "guesses by itself"),
        (("--memory-budget", "much"), "memory-budget must look like 8GB"),
        (("--bind", "0.0.0.0:0"), "0.0.0.0:0 is not a loopback address"),
        (("--proposer", "model:/no/such"), "/no/such"),
        (("--draft-tokens", "0"), "draft_tokens must be"),
    ],
)
def test_a_bad_setting_is_one_line(run: Run, arguments: tuple[str, ...], words: str) -> None:
    outcome = run("propose", "--bind", "127.0.0.1:0", *arguments)
    assert outcome.status in (1, 2)
    said = outcome.err.splitlines()[-1]
    assert said.startswith("kakeya: ")
    assert words in said


def test_every_flag_has_an_environment_twin(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAKEYA_DRAFT_AHEAD", "9")
    monkeypatch.setenv("KAKEYA_API_KEY", "a-secret")
    outcome = run("propose", "--print-config", "--proposer", "ngram")
    settings = outcome.settings()
    assert settings["draft-ahead"] == 9
    assert settings["bind"] == "127.0.0.1:50061"
    assert "a-secret" not in outcome.out
    fields = {name.replace("_", "-") for name in ProposeOptions.__dataclass_fields__}
    assert set(settings) <= fields
    assert "proposer-api-key" not in fields, "who guesses calls nobody"


def test_what_is_loaded(model: Path) -> None:
    """Looking up needs no memory of a model. With --model it knows the only tokenizer that it serves."""
    alone = _loader(Screen(), ProposeOptions())(ProposerMetrics())
    bound = _loader(Screen(), ProposeOptions(model=str(model), threads=1, capacity=3))(ProposerMetrics())
    for maker in (alone, bound):
        maker.close()
    assert (alone.desk.capacity, alone.desk.tokenizer_digest) == (4096, "")
    assert bound.desk.capacity == 3
    assert len(bound.desk.tokenizer_digest) == 64
    lines = list(_banner(alone, "here:1", "nobody", None))
    assert lines[0].endswith("proposes with ngram on here:1")
    assert "any tokenizer" in lines[3]
