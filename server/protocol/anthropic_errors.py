"""Which requests are of Anthropic's API, and errors in its format."""

from __future__ import annotations

from typing import Any

from starlette.types import Scope

PATH = "/v1/messages"  # and below: paths of this API alone
SHARED_PATH = "/v1/models"  # and below: of OpenAI's, too
VERSION_HEADER = "anthropic-version"  # which Anthropic's clients send with each request

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_spoken(scope: Scope) -> bool:
    """Whether a request's client speaks Anthropic's API."""
    path: str = scope["path"]
    if _is_at(path, PATH):
        return True
    names = {name for name, _ in scope["headers"]}
    return _is_at(path, SHARED_PATH) and VERSION_HEADER.encode() in names


def error_body(status: int, message: str) -> dict[str, Any]:
    """Anthropic's error object."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def _is_at(path: str, root: str) -> bool:
    return path == root or path.startswith(f"{root}/")
