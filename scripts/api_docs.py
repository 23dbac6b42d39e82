"""Writes docs/api.md from the comments of the proto files and the docstrings of the Python client.

    python scripts/api_docs.py            write it
    python scripts/api_docs.py --check    exit with 1 if it is not what would be written

Both are read as text: nothing is imported, so nothing needs to be installed.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = {
    "Wire contract": ROOT / "proto/kakeya/v1/runtime.proto",
    "Proposers elsewhere": ROOT / "proto/kakeya/v1/distributed.proto",
    "Benchmarks elsewhere": ROOT / "proto/kakeya/v1/bridge.proto",
    "Members of a cluster": ROOT / "proto/kakeya/v1/cluster.proto",
}
SOURCE = ROOT / "src"
PAGE = ROOT / "docs/api.md"

_OPENING = """\
# API reference

Made by `make docs` from the comments of [runtime.proto](../proto/kakeya/v1/runtime.proto),
[distributed.proto](../proto/kakeya/v1/distributed.proto), [bridge.proto](../proto/kakeya/v1/bridge.proto) and
[cluster.proto](../proto/kakeya/v1/cluster.proto), and the docstrings of `kakeya.client`; edit those.

- [Wire contract](#wire-contract): any language that speaks gRPC
- [Proposers elsewhere](#proposers-elsewhere): what a server and a `kakeya propose` say to each other
- [Benchmarks elsewhere](#benchmarks-elsewhere): what the two sides of `kakeya bridge` say
- [Members of a cluster](#members-of-a-cluster): what homes and front ends say to each other
- [Python client](#python-client): `kakeya.Client` and `kakeya.AsyncClient`
- [Errors](#errors)
"""

_RPC = re.compile(r"rpc (\w+)\((stream )?(\w+)\) returns \((stream )?(\w+)\);")
_FIELD = re.compile(r"((?:optional |repeated )?(?:map<[^>]+>|\w+)) (\w+) = (\d+);")
_VALUE = re.compile(r"(\w+) = (\d+);")
_BLOCK = re.compile(r"(service|message|enum) (\w+) \{(\})?")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Entry:
    """A field, an enum value or a call, and what its comment says."""

    name: str
    kind: str
    number: str
    comment: str


@dataclass
class Block:
    """A service, a message or an enum."""

    kind: str
    name: str
    comment: str
    entries: list[Entry] = field(default_factory=list)


# The proto file.


def proto_blocks(text: str) -> tuple[str, list[Block]]:
    """The comment at the top, and the blocks in order. A oneof's fields count as the message's own."""
    heading, comment = "", []
    blocks: list[Block] = []
    for line in map(str.strip, text.splitlines()):
        if line.startswith("//"):
            comment.append(line[2:].removeprefix(" "))
            continue
        if line.startswith("syntax"):
            heading = "\n".join(comment)
        elif opened := _BLOCK.match(line):
            blocks.append(Block(opened[1], opened[2], " ".join(comment)))
        elif entry := _entry(line, " ".join(comment)):
            blocks[-1].entries.append(entry)
        comment = []
    return heading, blocks


def _entry(line: str, comment: str) -> Entry | None:
    if call := _RPC.match(line):
        return Entry(call[1], f"{call[2] or ''}{call[3]} → {call[4] or ''}{call[5]}", "", comment)
    if found := _FIELD.match(line):
        return Entry(found[2], found[1], found[3], comment)
    if value := _VALUE.match(line):
        return Entry(value[1], "", value[2], comment)
    return None


def proto_page(title: str, text: str) -> Iterator[str]:
    heading, blocks = proto_blocks(text)
    yield f"\n## {title}\n"
    yield _paragraphs(heading)
    for block in blocks:
        yield f"\n### {block.kind} `{block.name}`\n"
        if block.comment:
            yield f"{block.comment}\n"
        if block.entries:
            yield from _table(block)
        else:
            yield "No fields."


def _table(block: Block) -> Iterator[str]:
    if block.kind == "service":
        yield "| call | request → response | |\n|---|---|---|"
        yield from (f"| `{call.name}` | `{call.kind}` | {call.comment} |" for call in block.entries)
    elif block.kind == "enum":
        yield "| value | number | |\n|---|---|---|"
        yield from (f"| `{value.name}` | {value.number} | {value.comment} |" for value in block.entries)
    else:
        yield "| field | type | number | |\n|---|---|---|---|"
        yield from (f"| `{at.name}` | `{at.kind}` | {at.number} | {at.comment} |" for at in block.entries)


def _paragraphs(comment: str) -> str:
    """Indented lines of a comment are a table in plain text, and stay as they are."""
    lines: list[str] = []
    inside = False
    for line in comment.splitlines():
        if line.startswith("  ") != inside:
            lines.append("```" if not inside else "```\n")
            inside = not inside
        lines.append(line)
    return "\n".join([*lines, "```"] if inside else lines)


# The Python client.


def python_page(package: str) -> Iterator[str]:
    """Every name that the package exports, in its own order."""
    init = ast.parse(_path(package).read_text())
    yield "\n## Python client\n"
    yield _docstring(init)
    modules = {
        alias.name: node.module
        for node in init.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    for name in _exported(init):
        tree = ast.parse(_path(modules[name]).read_text())
        found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
        yield from _class(found)


def _path(module: str) -> Path:
    path = SOURCE / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _exported(init: ast.Module) -> list[str]:
    for node in init.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise SystemExit("kakeya.client has no __all__")


def _class(node: ast.ClassDef) -> Iterator[str]:
    yield f"\n### `{node.name}`\n"
    yield _docstring(node)
    constructor = next((one for one in _functions(node) if one.name == "__init__"), None)
    # A class without a docstring on its constructor is not made by its users.
    if constructor is not None and ast.get_docstring(constructor):
        yield f"\n```python\n{node.name}({_arguments(constructor)})\n```\n"
        yield _docstring(constructor)
    yield from _fields(node)
    for function in _functions(node):
        if not function.name.startswith("_"):
            yield f"\n#### `{node.name}.{function.name}`\n"
            yield f"```python\n{_signature(function)}\n```\n"
            yield _docstring(function)


def _functions(node: ast.ClassDef) -> list[Function]:
    return [one for one in node.body if isinstance(one, Function)]


def _fields(node: ast.ClassDef) -> Iterator[str]:
    rows = []
    for one, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(one, ast.AnnAssign):
            default = f" = {ast.unparse(one.value)}" if one.value is not None else ""
            text = f"`{ast.unparse(one.target)}: {_annotation(one.annotation)}{default}`"
            rows.append(f"- {text}{_said(following)}")
        elif isinstance(one, ast.Assign):
            rows.append(f"- `{ast.unparse(one)}`")
    if rows:
        yield "\n" + "\n".join(rows)


def _said(node: ast.stmt | None) -> str:
    """The string that follows a field and explains it."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return f" {node.value.value}"
    return ""


def _signature(function: Function) -> str:
    if any(ast.unparse(decorator) == "property" for decorator in function.decorator_list):
        return f"{function.name}: {_annotation(function.returns)}"
    word = "async def" if isinstance(function, ast.AsyncFunctionDef) else "def"
    return f"{word} {function.name}({_arguments(function)}) -> {_annotation(function.returns)}"


def _arguments(function: Function) -> str:
    arguments = function.args
    for one in [*arguments.args, *arguments.kwonlyargs]:
        if isinstance(one.annotation, ast.Constant):
            one.annotation = ast.Name(str(one.annotation.value))
    return ast.unparse(arguments).removeprefix("self").removeprefix(", ")


def _annotation(node: ast.expr | None) -> str:
    if node is None:
        return "None"
    return str(node.value) if isinstance(node, ast.Constant) else ast.unparse(node)


def _docstring(node: ast.Module | ast.ClassDef | Function) -> str:
    return ast.get_docstring(node) or ""


def errors_page() -> Iterator[str]:
    yield "\n## Errors\n"
    opening, tree, ending = _docstring(ast.parse(_path("kakeya.errors").read_text())).split("\n\n")
    yield f"`kakeya.errors`: {opening[0].lower()}{opening[1:]}\n\n```\n{tree}\n```\n\n{ending}"


def page() -> str:
    contracts = [line for title, path in PROTOS.items() for line in proto_page(title, path.read_text())]
    lines = [_OPENING, *contracts, *python_page("kakeya.client"), *errors_page()]
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def main(arguments: list[str]) -> int:
    made = page()
    if "--check" not in arguments:
        PAGE.write_text(made)
        return 0
    if PAGE.exists() and PAGE.read_text() == made:
        return 0
    sys.stderr.write("docs/api.md is out of date: run `make docs`\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
