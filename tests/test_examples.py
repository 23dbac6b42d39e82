"""Every program in examples/ runs as its reader would run it, against the default model."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import kakeya
from kakeya.config import DEFAULT_MODEL
from support.programs import run_python
from support.serving import free_port, serve

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
TESTED = {"chat.py", "responses_chain.py", "many_agents.py", "structured_output.py", "embedded.py"}


@dataclass(frozen=True)
class Addresses:
    grpc: str
    http: str


@pytest.fixture(scope="module")
def addresses(default_model: Path) -> Iterator[Addresses]:
    http = f"127.0.0.1:{free_port()}"
    with serve(Path(DEFAULT_MODEL), "--http", http, "--window", "508", "--capacity", "12") as grpc:
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
    # Both went on from the same place: neither computed the beginning again.
    assert happy[0] == sad[0] > 0
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


@pytest.mark.usefixtures("default_model")
def test_embedded() -> None:
    printed = run("embedded.py")
    assert printed[0].strip()
    length, size = re.fullmatch(r"(\d+) tokens, ([\d,]+) bytes of keys and values", printed[-1]).groups()
    # The newest token is computed with the next turn; a token of the default model takes 23,040 bytes.
    assert int(size.replace(",", "")) == (int(length) - 1) * 23_040


@pytest.mark.parametrize("page", ["README.md", "docs/guides/quickstart.md"])
def test_the_code_of_the_docs(addresses: Addresses, page: str) -> None:
    """The blocks that talk to the server on its default address, as one program."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    program = "\n".join(code for code in blocks if "Client()" in code)
    assert program
    assert run_python("-c", program.replace("Client()", f'Client("{addresses.grpc}")')).strip()
