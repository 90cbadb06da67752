"""Which requests are of Ollama's API, and errors in its format."""

from __future__ import annotations

from typing import Any

from starlette.types import Scope

ROOT = "/api/"  # all its paths begin so, and none of another API


def is_spoken(scope: Scope) -> bool:
    """Whether a request is of Ollama's API."""
    path: str = scope["path"]
    return path.startswith(ROOT)


def error_body(message: str) -> dict[str, Any]:
    """Ollama's error object: a text alone."""
    return {"error": message}
