"""Errors as HTTP answers: OpenAI's error objects with the status that says whose fault it is."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ...errors import EngineError, InvalidRequest
from .generation.pieces import GRAMMAR_KINDS, GenerationFailed

RETRY_AFTER_S = 2  # about what an engine takes to be there again
_INVALID_KINDS = ("InvalidRequest", "InvalidProgram", "PromptTooLong", *GRAMMAR_KINDS)


def add_error_handlers(app: FastAPI) -> None:
    """Every error of a route becomes an answer of this file."""
    app.exception_handler(RequestValidationError)(_on_invalid_body)
    app.exception_handler(InvalidRequest)(_on_invalid_request)
    app.exception_handler(GenerationFailed)(_on_generation_failed)
    app.exception_handler(EngineError)(_on_engine_error)
    app.exception_handler(HTTPException)(_on_http_exception)


def error_body(message: str, kind: str, field: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": field, "code": None}}


def error_response(status: int, message: str, kind: str, field: str | None = None) -> JSONResponse:
    """An error as the whole answer; a 503 says when to ask again."""
    headers = {"retry-after": str(RETRY_AFTER_S)} if status == 503 else None
    return JSONResponse(error_body(message, kind, field), status, headers)


def failed_response(error: GenerationFailed) -> JSONResponse:
    """400 where the request is at fault, 503 where the engine is gone, else 500."""
    if error.kind in _INVALID_KINDS:
        has_name = error.field is None or str(error).startswith(f"{error.field}:")
        named = str(error) if has_name else f"{error.field}: {error}"
        return error_response(400, named, "invalid_request_error", error.field)
    status = 503 if error.kind == EngineError.__name__ else 500
    return error_response(status, str(error), "server_error")


async def _on_invalid_body(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"] if part != "body")
    message = f"{field}: {first['msg']}"
    return error_response(400, message, "invalid_request_error", field or None)


async def _on_invalid_request(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, InvalidRequest)
    return error_response(400, str(error), "invalid_request_error", error.field)


async def _on_generation_failed(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, GenerationFailed)
    return failed_response(error)


async def _on_engine_error(request: Request, error: Exception) -> JSONResponse:
    return error_response(503, str(error), "server_error")


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    return error_response(error.status_code, str(error.detail), kind)
