"""Schemas that cannot be honoured are refused, with the place of the fault."""

from typing import Any

import pytest

from kakeya.errors import InvalidArgument
from kakeya.text.grammar import GrammarCompiler


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (False, r"json_schema cannot be compiled at #: .*schema is false"),
        ({"type": "strin"}, "at #: Invalid type: strin"),
        ({"not": {}}, r'at #: Unimplemented keys: \["not"\]'),
        (
            {"properties": {"a/b": {"items": {"anyOf": [{"type": "null"}, {"pattern": "(?=x)"}]}}}},
            r"at #/properties/a~1b/items/anyOf/1: regex parse error",
        ),
        ({"$defs": {"n": {"type": "strin"}}, "items": {"$ref": "#/$defs/n"}}, r"at #/\$defs/n: Invalid"),
        ({"items": {"type": "integer", "multipleOf": -1}}, "at #/items: multipleOf must be above 0"),
        ({"$ref": "#"}, "json_schema allows no answer at all"),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "at #/properties/a: .*/none"),
        ({"items": {"$ref": "https://example.org/s.json"}}, "at #/items: "),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "at #: Unsatisfiable"),
        ({"prefixItems": [{}, {"format": "zip-code"}]}, "at #/prefixItems/1: Unknown format"),
        ({"properties": 5}, "at #: properties must be an object"),
        ({"properties": {"a": {"minProperties": 2}}}, "guaranteed at #/properties/a: minProperties"),
        ({"minProperties": 3, "required": ["a", "a", "b"]}, "guaranteed at #: minProperties"),
        ({"x-guidance": {"lenient": True}}, "x-guidance is not a keyword"),
        ({"minimum": float("nan")}, "is not JSON"),
        ({"default": object()}, "is not JSON"),
        ({"description": "x" * 300_000}, "300019 characters long, 262144 are allowed"),
    ],
)
def test_a_schema_that_cannot_be_honoured_is_refused_with_its_place(
    plain: GrammarCompiler, schema: Any, problem: str
) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        plain.json_schema(schema)


@pytest.mark.parametrize("depth", [200, 100_000])
def test_a_bottomless_schema_is_refused(plain: GrammarCompiler, depth: int) -> None:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    with pytest.raises(InvalidArgument, match="is not JSON|cannot be compiled"):
        plain.json_schema(schema)
