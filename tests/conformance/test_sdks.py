"""Every SDK does the same: the cases of `cases/` against a real server, judged by the same rules.

All that needs the server and the compiled SDK is in this file, so that each is there once.
"""

import asyncio
import json
import re
import shutil
import subprocess
from pathlib import Path

import grpc
import pytest

import kakeya
from conformance.conftest import CASES, Playing
from support.conformance import judge, judge_agreement
from support.network import FaultyProxy, Papers
from support.programs import SDK_FOLDER, run_node, run_npm, start_node
from support.serving import KEY, MortalServer, write_model

FIVE_LINES = """
import { Client } from "kakeya";
const client = new Client({ address: process.argv[2], apiKey: process.argv[3] });
const session = await client.createSession({ system: "You are brief.", ignoreEos: true });
let text = "";
for await (const piece of session.chat("Hello", { maxTokens: 8 })) text += piece;
console.log(`${session.lastResult.generatedTokenCount} tokens: ${text}`);
await session.close();
"""

WITHOUT_NODE = {
    "module": "nodenext",
    "lib": ["es2023", "esnext.disposable", "dom"],
    "types": [],
    "strict": True,
    "noEmit": True,
}


@pytest.mark.parametrize("title", CASES)
def test_python(title: str, python: Playing) -> None:
    judge(CASES[title], python[title])


@pytest.mark.parametrize("title", CASES)
def test_typescript(title: str, typescript: Playing) -> None:
    judge(CASES[title], typescript[title])


@pytest.mark.parametrize("title", CASES)
def test_both_say_the_same(title: str, python: Playing, typescript: Playing) -> None:
    judge_agreement(CASES[title], python[title], typescript[title])


def test_typescript_by_its_own_tests(server: str, sdk: Path, tmp_path: Path) -> None:
    """Signals, `await using`, settings and encryption: the tests in `sdks/typescript/tests`, run by Node."""
    papers = Papers.make(tmp_path)
    own = [(papers.server.key.read_bytes(), papers.server.cert.read_bytes())]
    authority = papers.authority.cert.read_bytes()
    plain = grpc.ssl_server_credentials(own)
    mutual = grpc.ssl_server_credentials(own, authority, require_client_auth=True)

    async def run() -> str:
        async with FaultyProxy(server, plain) as encrypted, FaultyProxy(server, mutual) as proved:
            environment = {
                "KAKEYA_ADDRESS": server,
                "KAKEYA_KEY": KEY,
                "KAKEYA_PAPERS": str(tmp_path),
                "KAKEYA_TLS": encrypted.address,
                "KAKEYA_MUTUAL_TLS": proved.address,
            }
            return await start_node(sdk, "--expose-gc", "dist/tests/all.js", **environment)

    told = asyncio.run(run())
    assert re.search(r"^# pass [1-9]\d", told, re.MULTILINE), told
    assert re.search(r"^# skipped 0$", told, re.MULTILINE), told


def test_typescript_installs_into_an_empty_folder(server: str, sdk: Path, tmp_path: Path) -> None:
    """As a user gets it: `npm pack`, `npm install`, and five lines."""
    packed = json.loads(
        run_npm("pack", "--json", "--ignore-scripts", "--pack-destination", str(tmp_path), folder=sdk)
    )
    names = {file["path"] for file in packed[0]["files"]}
    assert {
        "LICENSE",
        "README.md",
        "package.json",
        "dist/src/index.js",
        "dist/src/index.d.ts",
        "src/index.ts",
    } <= names
    assert not [name for name in names if "test" in name or name.startswith(("dist/examples", "examples"))]
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "package.json").write_text('{"private": true, "type": "module"}')
    archive = str(tmp_path / packed[0]["filename"])
    run_npm(
        "install", "--prefer-offline", "--no-audit", "--no-fund", "--ignore-scripts", archive, folder=folder
    )
    (folder / "five.js").write_text(FIVE_LINES)
    assert run_node("five.js", server, KEY, folder=folder).startswith("8 tokens: ")
    # Its types are whole, also for a project that has none of Node's.
    (folder / "types.ts").write_text('export * from "kakeya";\n')
    (folder / "tsconfig.json").write_text(json.dumps({"compilerOptions": WITHOUT_NODE}))
    run_node(str(sdk / "node_modules/typescript/bin/tsc"), folder=folder)


def test_typescript_goes_on_after_its_server_was_killed(sdk: Path, tmp_path: Path) -> None:
    """A stream only pauses, and the session is found by its id."""
    flags = ("--window", "60", "--threads", "1", "--numerics", "exact", "--proposer", "none")
    with MortalServer(write_model(tmp_path / "model"), tmp_path / "state", *flags) as server:
        program = subprocess.Popen(
            [shutil.which("node") or "node", "dist/tests/restart.js", server.address],
            cwd=sdk,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert program.stdout is not None
        assert program.stdout.readline() == "streaming\n"
        server.kill()
        server.start()
        told = json.loads(program.communicate(timeout=60)[0])
    assert told["stopReason"] == "MAX_TOKENS"
    assert told["said"] == told["uninterrupted"]
    assert told["historyLength"] == told["promptLength"] + len(told["said"])


def test_typescript_has_the_version_of_the_package() -> None:
    described = json.loads((SDK_FOLDER / "package.json").read_text())
    assert described["version"] == kakeya.__version__
    locked = (SDK_FOLDER / "package-lock.json").read_text()
    assert "resolved" not in locked, "a lock file names versions, and no registry"
    assert json.loads(locked)["version"] == kakeya.__version__
