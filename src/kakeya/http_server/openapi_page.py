"""The API's description at /docs: one page made here, without scripts and without a visit elsewhere."""

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, JSONResponse

from kakeya.http_server.openapi import document
from kakeya.http_server.state import state_of

router = APIRouter(include_in_schema=False)

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1f; --soft: #5c5c66; --line: #d9d9e0; --page: #fcfcfd;
  --shade: #f1f1f5; --accent: #2f5fd0; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececf1; --soft: #a3a3ad; --line: #34343c;
  --page: #141417; --shade: #1e1e23; --accent: #8fb0ff; } }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 56rem; margin: 0 auto; padding: 2rem 1rem 4rem; }
h1 { margin: 0; font-size: 1.7rem; } h2 { margin: 2.5rem 0 0.5rem; font-size: 1.2rem; }
p { margin: 0.4rem 0; } .soft, small { color: var(--soft); }
a { color: var(--accent); }
code { font: 0.9em ui-monospace, monospace; overflow-wrap: anywhere; }
details { border: 1px solid var(--line); border-radius: 8px; margin: 0.5rem 0; background: var(--page); }
summary { cursor: pointer; padding: 0.6rem 0.8rem; } details > div { padding: 0 0.8rem 0.8rem; }
details[open] > summary { border-bottom: 1px solid var(--line); background: var(--shade); }
.method { display: inline-block; min-width: 5em; font-weight: 600; color: var(--accent); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; margin: 0.4rem 0; }
th, td { text-align: left; vertical-align: top; padding: 0.3rem 0.6rem 0.3rem 0;
  border-bottom: 1px solid var(--line); }
td:first-child code { white-space: nowrap; }
.gone { text-decoration: line-through; }
"""
_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@router.get("/openapi.json")
async def openapi_json(request: Request) -> JSONResponse:
    return JSONResponse(_document(request))


@router.get("/docs")
async def docs(request: Request) -> HTMLResponse:
    return HTMLResponse(page(_document(request)), headers=_HEADERS)


def _document(request: Request) -> dict[str, Any]:
    return document(request.app, needs_key=bool(state_of(request).config.key_hashes))


def page(described: Mapping[str, Any]) -> str:
    """The whole page for an OpenAPI document."""
    return "".join(_page(described))


def _page(described: Mapping[str, Any]) -> Iterator[str]:
    info = described["info"]
    title = escape(f"{info['title']} {info['version']}")
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{title}: API</title><style>{_STYLE}</style></head><body><main>"
    yield f"<h1>{title}</h1><p>{escape(info.get('summary', ''))}</p>"
    yield '<p class="soft">Machine-readable: <a href="/openapi.json">/openapi.json</a></p>'
    for tag, operations in _by_tag(described).items():
        yield f"<h2>{escape(tag)}</h2>"
        for path, method, operation in operations:
            yield from _operation(path, method, operation)
    yield "<h2>Schemas</h2>"
    for name, schema in sorted(described["components"]["schemas"].items()):
        yield f'<details id="{escape(name)}" open><summary><code>{escape(name)}</code></summary><div>'
        yield from _schema(schema)
        yield "</div></details>"
    yield "</main></body></html>"


Operation = tuple[str, str, Mapping[str, Any]]


def _by_tag(described: Mapping[str, Any]) -> dict[str, list[Operation]]:
    tags: dict[str, list[Operation]] = {}
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            tag = next(iter(operation.get("tags", ())), "other")
            tags.setdefault(tag, []).append((path, method.upper(), operation))
    return tags


def _operation(path: str, method: str, operation: Mapping[str, Any]) -> Iterator[str]:
    gone = ' class="gone"' if operation.get("deprecated") else ""
    yield f'<details><summary><span class="method">{method}</span><code{gone}>{escape(path)}</code> '
    yield f'<span class="soft">{escape(operation.get("summary", ""))}</span></summary><div>'
    for paragraph in filter(None, operation.get("description", "").split("\n\n")):
        yield f"<p>{escape(paragraph)}</p>"
    if operation.get("parameters"):
        yield from _table(
            ("parameter", "in", "type", ""),
            (
                (
                    f"<code>{escape(each['name'])}</code>",
                    escape(each["in"]),
                    _type(each.get("schema", {})),
                    _notes(each.get("schema", {}), each.get("required", False)),
                )
                for each in operation["parameters"]
            ),
        )
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        yield f"<p>Body <small>{escape(kind)}</small>: {_type(content.get('schema', {}))}</p>"
    yield from _table(("status", "answer"), map(_response, operation.get("responses", {}).items()))
    yield "</div></details>"


def _response(item: tuple[str, Mapping[str, Any]]) -> tuple[str, str]:
    status, response = item
    kinds = (
        f" <small>{escape(kind)}</small> {_type(content.get('schema', {}))}"
        for kind, content in response.get("content", {}).items()
    )
    return f"<code>{escape(status)}</code>", escape(response.get("description", "")) + "".join(kinds)


def _schema(schema: Mapping[str, Any]) -> Iterator[str]:
    if schema.get("description"):
        yield f"<p>{escape(schema['description'])}</p>"
    if not schema.get("properties"):
        yield f"<p>{_type(schema)}</p>"
        return
    required = schema.get("required", ())
    yield from _table(
        ("field", "type", ""),
        (
            (f"<code>{escape(name)}</code>", _type(field), _notes(field, name in required))
            for name, field in schema["properties"].items()
        ),
    )


def _table(heads: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    """A table of cells that are HTML already."""
    yield '<div class="scroll"><table><tr>' + "".join(f"<th>{head}</th>" for head in heads) + "</tr>"
    for row in rows:
        yield "<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>"
    yield "</table></div>"


def _type(schema: Any) -> str:
    """A schema in few words, as HTML; named ones are links."""
    if not isinstance(schema, Mapping) or not schema:
        return "anything"
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}"><code>{name}</code></a>'
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return " or ".join(_type(each) for each in schema[several])
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", (schema.get("const"),))
        return " or ".join(f"<code>{escape(json.dumps(value))}</code>" for value in values)
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return escape(str(schema.get("type", "anything")))


def _notes(schema: Mapping[str, Any], required: bool) -> str:
    notes = ["required"] if required else []
    if schema.get("default") is not None:
        notes.append(f"default <code>{escape(json.dumps(schema['default']))}</code>")
    if schema.get("description"):
        notes.append(escape(schema["description"]))
    return "; ".join(notes)
