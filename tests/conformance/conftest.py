"""One server for all SDKs: a tiny model with the default model's tokenizer. Every SDK plays once."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path

import pytest

from kakeya.models.checkpoint import open_checkpoint
from support.conformance import Between, Case, Played, between, read_cases, read_tokenizers
from support.conformance_python import play
from support.programs import SDK_FOLDER, node_is_missing, prepare_node, start_node
from support.serving import KEY, OTHER_KEY, serve
from support.tiny import write_llama

CASES = {case.title: case for case in read_cases()}
Playing = dict[str, Played]


def write_model_of_cases(directory: Path, default_model: Path) -> Path:
    """A tiny model with the default model's tokenizer."""
    files = open_checkpoint(default_model).tokenizer_files()
    write_llama(directory, vocab_size=49152, bos_token_id=1, eos_token_id=2)
    (directory / "tokenizer.json").write_bytes(files.tokenizer_json)
    settings = {"chat_template": files.chat_template, "eos_token": files.eos_token}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def played_in_python(server: str) -> Playing:
    """What the Python SDK makes of every case, before any server."""

    async def played(case: Case) -> Played:
        async with between(case, server) as way:
            outcomes = await play(case, way.address, server, read_tokenizers())
        return _played(outcomes, way)

    async def all_played() -> Playing:
        return {title: await played(case) for title, case in CASES.items()}

    return asyncio.run(all_played())


@pytest.fixture(scope="session")
def server(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address."""
    directory = write_model_of_cases(tmp_path_factory.mktemp("model"), default_model)
    keys = ["--api-key", KEY, "--api-key", OTHER_KEY]
    shape = ["--capacity", "64", "--sink", "4", "--window", "124", "--recall", "32", "--threads", "1"]
    numbers = ["--dtype", "float32", "--weights", "float32", "--numerics", "exact", "--kernels", "torch"]
    plain = ["--proposer", "none", "--share-beginnings", "off"]
    with serve(directory, *keys, *shape, *numbers, *plain) as address:
        yield address


@pytest.fixture(scope="session")
def sdk() -> Path:
    """The folder of the TypeScript SDK, compiled."""
    if node_is_missing():
        pytest.skip("Node is not installed")
    prepare_node(SDK_FOLDER)
    return SDK_FOLDER


@pytest.fixture(scope="session")
def python(server: str) -> Playing:
    return played_in_python(server)


@pytest.fixture(scope="session")
def typescript(server: str, sdk: Path, tmp_path_factory: pytest.TempPathFactory) -> Playing:
    """What the TypeScript SDK made of every case, in one process."""

    async def all_played() -> Playing:
        async with AsyncExitStack() as stack:
            ways = {
                title: await stack.enter_async_context(between(case, server)) for title, case in CASES.items()
            }
            cases = [asdict(case) | {"address": ways[title].address} for title, case in CASES.items()]
            plan = tmp_path_factory.mktemp("plan") / "plan.json"
            plan.write_text(json.dumps({"server": server, "tokenizers": read_tokenizers(), "cases": cases}))
            outcomes = json.loads(await start_node(sdk, "dist/tests/conformance.js", str(plan)))
        return {title: _played(outcomes[title], way) for title, way in ways.items()}

    return asyncio.run(all_played())


def _played(outcomes: list[dict[str, object]], way: Between) -> Played:
    return Played(outcomes, way.calls(), way.models(), None if way.line is None else way.line.connections)
