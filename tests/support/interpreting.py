"""Triton's interpreter, which wants a process of its own: Triton reads the switch when it is imported."""

import os


def interpreting() -> dict[str, str]:
    """The environment of such a process. Without coverage, which makes the interpreter three times slower."""
    unwatched = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    return unwatched | {"TRITON_INTERPRET": "1"}
