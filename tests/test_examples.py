"""Every program in examples/ runs as its reader would run it, against the default model."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import kakeya
from kakeya.config import DEFAULT_MODEL
from support.programs import SDK_FOLDER, node_is_missing, prepare_node, run_node, run_python
from support.serving import free_port, serve

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
TESTED = {
    "chat.py",
    "responses_chain.py",
    "many_agents.py",
    "structured_output.py",
    "embedded.py",
    "long_conversation.py",
}


# Node 20 knows no `await using`.
TRANSPILE = """
const ts = require("typescript"), fs = require("fs");
const how = { compilerOptions: { target: "ES2022", module: "ESNext" } };
fs.writeFileSync(process.argv[1], ts.transpileModule(fs.readFileSync(0, "utf8"), how).outputText);
"""


@dataclass(frozen=True)
class Addresses:
    grpc: str
    http: str


@pytest.fixture(scope="module")
def addresses(default_model: Path) -> Iterator[Addresses]:
    http = f"127.0.0.1:{free_port()}"
    with serve(
        Path(DEFAULT_MODEL), "--http", http, "--window", "252", "--recall", "256", "--capacity", "24"
    ) as grpc:
        yield Addresses(grpc, f"http://{http}/v1")


def run(name: str, *arguments: str) -> list[str]:
    """The lines that an example prints."""
    return run_python(str(EXAMPLES / name), *arguments).splitlines()


def test_every_example_is_tested_and_named() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == TESTED
    assert all(f"[{name}]({name})" in (EXAMPLES / "README.md").read_text() for name in TESTED)


def test_chat(addresses: Addresses) -> None:
    printed = run("chat.py", addresses.grpc)
    asked = [line for line in printed if line.startswith("> ")]
    cached = [int(line.split()[0][1:]) for line in map(str.strip, printed) if "not computed again" in line]
    assert len(asked) == len(cached) == 2
    assert cached[0] == 0 < cached[1]
    assert re.fullmatch(r"The session holds \d+ tokens in [\d,]+ bytes, for ever\.", printed[-1])


def test_responses_chain(addresses: Addresses) -> None:
    printed = run("responses_chain.py", addresses.http)
    shares = re.findall(r"\((\d+) of (\d+) tokens were not computed again\)", "\n".join(printed))
    first, happy, sad = ((int(cached), int(whole)) for cached, whole in shares)
    assert first[0] == 0
    # Both went on behind the first answer. Their messages begin alike: the second may copy that as well.
    assert min(happy[0], sad[0]) > first[1]
    assert happy[0] < happy[1]


def test_many_agents(addresses: Addresses) -> None:
    printed = run("many_agents.py", addresses.grpc)
    said = dict(line.split(": ", 1) for line in printed[:-1])
    assert len(said) == 8
    assert all(len(answer) > 2 for answer in said.values())
    assert re.fullmatch(r"8 agents, \d+ tokens in [\d.]+ s, \d+ tokens/s together", printed[-1])
    with kakeya.Client(addresses.grpc) as client:
        left = [session.client_label for session in client.list_sessions()]
    assert not set(said) & set(left), "an agent left its session behind"


def test_structured_output(addresses: Addresses) -> None:
    (line,) = run("structured_output.py", addresses.http)
    assert re.fullmatch(r".{0,30}, .{0,30}: (small|large)", line)


def test_long_conversation(addresses: Addresses, tmp_path: Path) -> None:
    """So few turns, and yet what was told has left the window. The answers may still be wrong."""
    printed = run("long_conversation.py", addresses.http, "24", str(tmp_path / "said.json"))
    assert re.fullmatch(r"3 found, \d right of 3 asked in 24 turns", printed[-1])
    said = json.loads((tmp_path / "said.json").read_text())
    assert len(said["transcript"]) == 24
    assert all(line["recalled_tokens"] for line in said["transcript"] if "right" in line)


@pytest.mark.usefixtures("default_model")
def test_embedded() -> None:
    printed = run("embedded.py")
    assert printed[0].strip()
    length, size = re.fullmatch(r"(\d+) tokens, ([\d,]+) bytes of keys and values", printed[-1]).groups()
    # The newest token is computed with the next turn; a token of the default model takes 23,040 bytes.
    assert int(size.replace(",", "")) == (int(length) - 1) * 23_040


@pytest.fixture(scope="module")
def sdk() -> Path:
    """The folder of the TypeScript SDK, with its examples compiled."""
    if node_is_missing():
        pytest.skip("Node is not installed")
    prepare_node(SDK_FOLDER)
    return SDK_FOLDER


def test_typescript_chat(addresses: Addresses, sdk: Path) -> None:
    questions = "Name a river in France.\nWhich sea does it flow into?\n"
    printed = run_node("dist/examples/chat.js", addresses.grpc, folder=sdk, stdin=questions)
    cached = [int(count) for count in re.findall(r"\((\d+) tokens were not computed again\)", printed)]
    assert len(cached) == 2
    assert cached[0] < cached[1]
    assert re.search(r"The session holds \d+ tokens in \d+ bytes\.$", printed.strip())


def test_typescript_agents(addresses: Addresses, sdk: Path) -> None:
    printed = run_node("dist/examples/many-agents.js", addresses.grpc, folder=sdk).splitlines()
    said = dict(line.split(", ", 1) for line in printed[:-1])
    assert len(said) == 20
    assert all(len(answer) > 20 for answer in said.values())
    assert re.fullmatch(r"20 agents, \d+ tokens in [\d.]+ s", printed[-1])
    with kakeya.Client(addresses.grpc) as client:
        left = [session.client_label for session in client.list_sessions()]
    assert not set(said) & set(left), "an agent left its session behind"


@pytest.mark.parametrize("page", ["sdks/typescript/README.md", "docs/guides/typescript.md"])
def test_the_typescript_of_the_docs(addresses: Addresses, sdk: Path, page: str) -> None:
    """The blocks that talk to the server on its default address, as one program."""
    blocks = re.findall(r"^```ts\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    program = "\n".join(code for code in blocks if "await" in code).replace("127.0.0.1:50051", addresses.grpc)
    compiled = sdk / f"dist/{Path(page).parent.name}.js"
    run_node("-e", TRANSPILE, str(compiled), folder=sdk, stdin=program)
    assert run_node(str(compiled), folder=sdk).strip()


def test_every_typescript_example_is_tested() -> None:
    assert {path.name for path in (SDK_FOLDER / "examples").iterdir()} == {"chat.ts", "many-agents.ts"}


@pytest.mark.parametrize("page", ["README.md", "docs/guides/quickstart.md"])
def test_the_code_of_the_docs(addresses: Addresses, page: str) -> None:
    """The blocks that talk to the server on its default address, as one program."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    program = "\n".join(code for code in blocks if "Client()" in code)
    assert program
    assert run_python("-c", program.replace("Client()", f'Client("{addresses.grpc}")')).strip()
