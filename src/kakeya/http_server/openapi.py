"""The OpenAPI document: FastAPI's, made to say what this server really answers."""

from typing import Any

from fastapi import FastAPI

_ERROR_REF = {"$ref": "#/components/schemas/Error"}
_NULLABLE_TEXT = {"anyOf": [{"type": "string"}, {"type": "null"}]}
_ERROR_SCHEMA = {
    "title": "Error",
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _NULLABLE_TEXT,
                "code": _NULLABLE_TEXT,
            },
        }
    },
}
# What FastAPI would answer to a body that does not fit. We answer 400, in OpenAI's shape.
_FOREIGN_SCHEMAS = ("HTTPValidationError", "ValidationError")


def document(app: FastAPI, needs_key: bool) -> dict[str, Any]:
    """The document, every operation with the errors that it may answer."""
    described = dict(app.openapi())
    components = dict(described.get("components", {}))
    schemas = {
        name: schema for name, schema in components.get("schemas", {}).items() if name not in _FOREIGN_SCHEMAS
    }
    components["schemas"] = schemas | {"Error": _ERROR_SCHEMA}
    if needs_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    described["components"] = components
    described["paths"] = {
        path: {method: _operation(path, operation, needs_key) for method, operation in operations.items()}
        for path, operations in described.get("paths", {}).items()
    }
    return described


def _operation(path: str, operation: dict[str, Any], needs_key: bool) -> dict[str, Any]:
    responses = {status: each for status, each in operation.get("responses", {}).items() if status != "422"}
    responses["default"] = {
        "description": "An error, in OpenAI's shape",
        "content": {"application/json": {"schema": _ERROR_REF}},
    }
    changed = operation | {"responses": responses}
    if needs_key and path.startswith("/v1/"):
        changed["security"] = [{"key": []}]
    return changed
