"""The OpenAPI document at /openapi.json: FastAPI's description of the routes, with this server's
errors, and with keys where they are required."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from ..protocol import anthropic_errors as anthropic
from ..protocol import ollama_errors as ollama

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
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_OLLAMA_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string"}},
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
    schemas["Error"], schemas["AnthropicError"] = _ERROR, _ANTHROPIC_ERROR
    schemas["OllamaError"] = _OLLAMA_ERROR
    if has_keys:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        document["security"] = [{"bearer": []}, {"header": []}]
    for name, path in document["paths"].items():
        content = {"application/json": {"schema": _error_at(name)}}
        for method in path.keys() & set(_METHODS):
            responses = path[method]["responses"]
            responses.pop("422", None)
            responses["4XX"] = {"description": "refused; the error says why", "content": content}
            responses["5XX"] = {"description": "failed, or not in time", "content": content}


def _error_at(path: str) -> dict[str, Any]:
    """The schema of errors: Anthropic's, Ollama's, OpenAI's, or whichever the client speaks."""
    ours, theirs, ollamas = (
        {"$ref": f"#/components/schemas/{name}"}
        for name in ("Error", "AnthropicError", "OllamaError")
    )
    if path.startswith(ollama.ROOT):
        return ollamas
    if path.startswith(anthropic.PATH):
        return theirs
    return {"anyOf": [ours, theirs]} if path.startswith(anthropic.SHARED_PATH) else ours
