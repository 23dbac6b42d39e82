"""The OpenAPI document: FastAPI's, made to say what this server really answers."""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from kakeya.http_server.errors import is_messages
from kakeya.http_server.security import is_owned


class ErrorDetails(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """An error, in OpenAI's shape."""

    error: ErrorDetails


# What any route may answer. FastAPI would describe its own errors otherwise.
ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {"description": "An error, in OpenAI's shape", "model": Error}
}


def document(app: FastAPI, needs_key: bool) -> dict[str, Any]:
    """The document, with the key that routes need."""
    described = app.openapi()
    if needs_key:
        described["components"]["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        for path, operations in described["paths"].items():
            for operation in operations.values() if is_owned(path) else ():
                operation["security"] = [{"key": []}, *([{"x-api-key": []}] if is_messages(path) else [])]
    return described
