"""Random JSON Schemas whose instances are small, so that even a random model comes to an end."""

from typing import Any

from hypothesis import strategies as st

_names = st.sampled_from(["a", "b", "name", "größe", "x y", 'q"', "\\", "</s>", "<|end|>"])
_constants = st.sampled_from(
    [None, True, 0, -1.5, 1e3, "", "hello", 'a "b" \\ \n', "日本語", [1, "x"], {"a": {}}]
)


def _bounds(low: str, high: str, least: int, span: int) -> st.SearchStrategy[dict[str, int]]:
    return st.builds(
        lambda start, width: {low: start, high: start + width}, st.integers(least, 5), st.integers(0, span)
    )


_leaves = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    _bounds("minimum", "maximum", -20, 40).map(lambda bounds: {"type": "integer", **bounds}),
    _bounds("minLength", "maxLength", 0, 5).map(lambda bounds: {"type": "string", **bounds}),
    st.sampled_from(["^[a-c]{2,4}$", "^(ja|nein)$", "^\\d{3}-\\w$"]).map(
        lambda pattern: {"type": "string", "pattern": pattern}
    ),
    st.sampled_from(["date", "uuid", "ipv4"]).map(lambda kind: {"type": "string", "format": kind}),
    st.lists(_constants, min_size=1, max_size=3).map(lambda values: {"enum": values}),
    _constants.map(lambda value: {"const": value}),
)


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    properties = draw(st.dictionaries(_names, inner, max_size=3))
    required = [name for name in properties if draw(st.booleans())]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


@st.composite
def _arrays(draw: st.DrawFn, inner: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    first = draw(st.lists(inner, max_size=2))
    least = draw(st.integers(0, 2))
    most = least + draw(st.integers(0, 2))
    return {"type": "array", "prefixItems": first, "items": draw(inner), "minItems": least, "maxItems": most}


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """Schemas of every kind, three or four deep."""
    return st.recursive(
        _leaves,
        lambda inner: st.one_of(
            _objects(inner),
            _arrays(inner),
            st.lists(inner, min_size=1, max_size=2).map(lambda choices: {"anyOf": choices}),
        ),
        max_leaves=6,
    )
