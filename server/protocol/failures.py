"""Errors as HTTP responses: OpenAI's error objects, Anthropic's and Ollama's for their APIs, with
the status that says whose fault it is.

Every error becomes a `Failure` here, and every error response is made from one; an unforeseen error
shows only the id by which the log names it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Scope

from ...errors import EngineError, InvalidRequest, ModelLoadError
from . import anthropic_errors as anthropic
from . import ollama_errors as ollama
from .pieces import GRAMMAR_KINDS, GenerationFailed

RETRY_AFTER_S = 2  # about the time an engine takes to restart

INVALID = "invalid_request_error"
SERVER = "server_error"
RATE_LIMIT = "rate_limit_error"
PERMISSION = "permission_error"

_TOO_LONG = "context_length_exceeded"
_DEADLINE = "deadline_exceeded"

# By the class of the runtime's error: status, type, code.
_BY_KIND: dict[str, tuple[int, str, str | None]] = {
    **dict.fromkeys(("InvalidRequest", "InvalidProgram", *GRAMMAR_KINDS), (400, INVALID, None)),
    "PromptTooLong": (400, INVALID, _TOO_LONG),
    "ModelNotFound": (404, INVALID, "model_not_found"),
    "ModelLoadError": (503, SERVER, None),
    "DeadlineExceeded": (503, _DEADLINE, _DEADLINE),
    "EngineError": (503, SERVER, "engine_unavailable"),
}
_UNKNOWN_KIND = (500, SERVER, None)

# By status, where only that is known: type, code.
_BY_STATUS: dict[int, tuple[str, str | None]] = {
    401: (INVALID, "invalid_api_key"),
    403: (PERMISSION, None),
    404: ("not_found_error", None),
    405: (INVALID, "method_not_allowed"),
    408: (INVALID, "request_timeout"),
    413: (INVALID, "request_too_large"),
    415: (INVALID, "unsupported_media_type"),
    429: (RATE_LIMIT, "rate_limit_exceeded"),
    431: (INVALID, "headers_too_large"),
    499: (INVALID, "client_closed_request"),
}
_METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
_NAMED = re.compile(r"([a-z_]+)=")  # as InvalidRequest.of formats it
_FIELD = re.compile(r"[a-z_][a-z0-9_-]*")
_PLAIN_TYPES = frozenset({"bool", "dict", "float", "int", "none", "str"})
_BY_VALIDATION = {"missing": "missing_required_parameter", "extra_forbidden": "unknown_parameter"}


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as the client sees it: OpenAI's error object, its status, further headers."""

    status: int
    message: str
    kind: str = INVALID  # OpenAI's `type`
    field: str | None = None  # of the client's request: OpenAI's `param`
    code: str | None = None
    headers: Mapping[str, str] | None = None

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        error = {"message": self.message, "type": self.kind, "param": self.field, "code": self.code}
        return {"error": error}

    def response(self, scope: Scope) -> JSONResponse:
        """The whole response, in the format of the API that the request is of."""
        if anthropic.is_spoken(scope):
            body = anthropic.error_body(self.status, self.message)
        elif ollama.is_spoken(scope):
            body = ollama.error_body(self.message)
        else:
            body = self.body
        later = {"retry-after": str(RETRY_AFTER_S)} if self.status == 503 else {}
        return JSONResponse(body, self.status, {**later, **(self.headers or {})})


class Refusal(HTTPException):
    """A request that this server refuses before the engine sees it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        code: str | None = None,
        field: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`kind`, `code`: default to those of the status."""
        super().__init__(status, message, dict(headers or {}))
        default = _of_status(status)
        self.kind = kind or default[0]
        self.code = code or default[1]
        self.field = field


def add_error_handlers(app: FastAPI) -> None:
    """Turns errors that a route raises on purpose into responses; the middleware handles others."""
    foreseen = (RequestValidationError, InvalidRequest, EngineError, GenerationFailed)
    for kind in (*foreseen, HTTPException):
        app.exception_handler(kind)(_on_error)


def failure_of(error: Exception) -> Failure:
    """`error` as the client sees it: 400 where its request is at fault, 503 where the engine, or
    something else the request needs, is unavailable; an unforeseen error is a 500 without
    details."""
    match error:
        case RequestValidationError():
            return _of_validation(error)
        case GenerationFailed():
            return _of_generation(error)
        case Refusal():
            message, kind, code = str(error.detail), error.kind, error.code
            return Failure(error.status_code, message, kind, error.field, code, error.headers)
        case HTTPException():
            kind, code = _of_status(error.status_code)
            return Failure(
                error.status_code, str(error.detail), kind, code=code, headers=error.headers
            )
        case InvalidRequest():
            status, _, code = _BY_KIND.get(type(error).__name__, (400, INVALID, None))
            return Failure(status, str(error), INVALID, error.field, code)
        case EngineError():
            name = "ModelLoadError" if isinstance(error, ModelLoadError) else "EngineError"
            status, kind, code = _BY_KIND[name]
            return Failure(status, str(error), kind, code=code)
    return Failure(500, "an internal error; the server's log names this request", SERVER)


def _of_status(status: int) -> tuple[str, str | None]:
    return _BY_STATUS.get(status, (INVALID if status < 500 else SERVER, None))


def _of_generation(error: GenerationFailed) -> Failure:
    status, kind, code = _BY_KIND.get(error.kind, _UNKNOWN_KIND)
    message, field = str(error), error.field
    if status == 400 and field is None and (named := _NAMED.match(message)):
        field = named[1]
    elif status == 404 and field is None:
        field = "model"
    elif code is None and status == 400 and field is not None and not _names(message, field):
        message = f"{field}: {message}"
    return Failure(status, message, kind, field, code)


def _names(message: str, field: str) -> bool:
    """Whether a message begins with the field, as those of the error tree do."""
    return message.startswith((f"{field}:", f"{field}=", f"{field}["))


def _of_validation(error: RequestValidationError) -> Failure:
    first = max(error.errors(), key=_fit)
    field = ".".join(str(part) for part in first["loc"] if part != "body" and not _is_type(part))
    reason = str(first["msg"]).removeprefix("Value error, ")  # pydantic's before our own words
    message = f"{field}: {reason}" if field else reason
    return Failure(400, message, INVALID, field or None, _BY_VALIDATION.get(first["type"]))


def _fit(error: Mapping[str, Any]) -> tuple[int, bool]:
    """The largest one is the best match of a union: of the right type where another one is not."""
    return len(error["loc"]), not error["type"].endswith("_type")


def _is_type(part: str | int) -> bool:
    """Whether a part of an error's location names a member of a union, not a field."""
    return isinstance(part, str) and (part in _PLAIN_TYPES or not _FIELD.fullmatch(part))


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    failure = failure_of(error)
    if failure.status == 405:  # Starlette names the methods of the first route of this path alone
        failure = replace(failure, headers={"allow": ", ".join(_methods_of(request))})
    return failure.response(request.scope)


def _methods_of(request: Request) -> list[str]:
    """What may be done at the request's path."""

    def is_taken(method: str) -> bool:
        scope = {**request.scope, "method": method}
        return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)

    return [method for method in _METHODS if is_taken(method)]
