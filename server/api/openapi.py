"""The OpenAPI document at /openapi.json: FastAPI's description of the routes, with this server's
errors, and with keys where they are required."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_OF_FASTAPI = ("HTTPValidationError", "ValidationError")  # here those are 400, with an Error
_METHODS = ("get", "post", "put", "patch", "delete", "head")


def document_errors(app: FastAPI, *, has_keys: bool) -> None:
    """Make `app` describe itself; built on first use."""
    made_by_fastapi = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _complete(made_by_fastapi(), has_keys)
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way


def _complete(document: dict[str, Any], has_keys: bool) -> None:
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in _OF_FASTAPI:
        schemas.pop(name, None)
    schemas["Error"] = _ERROR
    if has_keys:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        document["security"] = [{"bearer": []}, {"header": []}]
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    for path in document["paths"].values():
        for method in path.keys() & set(_METHODS):
            responses = path[method]["responses"]
            responses.pop("422", None)
            responses["4XX"] = {"description": "refused; the error says why", "content": content}
            responses["5XX"] = {"description": "failed, or not in time", "content": content}
