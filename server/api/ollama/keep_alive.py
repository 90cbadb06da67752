"""`keep_alive`: how long a model stays loaded once it has nothing to do, in Ollama's words.

Seconds, or a duration as Go writes it ("5m", "1h30m"); below 0 for ever, 0 not at all. A server of
one model heeds none.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import AfterValidator

from .names import untagged
from .reply import timestamp

FOREVER = math.inf
MAX_S = 1e10  # 300 years; more is for ever
MAX_CHARS = 64
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}
_PART = re.compile(rf"([0-9]+\.?[0-9]*|\.[0-9]+)({'|'.join(_UNITS_S)})")
_WHOLE = re.compile(rf"[+-]?(?:0|(?:{_PART.pattern})+)")
_ALLOWED = "seconds, or a duration as '5m' or '1h30m'; below 0 for ever"
_GENERATING = {"/api/generate": ("prompt", "suffix"), "/api/chat": ("messages",)}
_PATHS = frozenset({*_GENERATING, "/api/embed", "/api/embeddings"})


def seconds_of(value: object) -> float | None:
    """From 0 to FOREVER; None where it is not told. Raises ValueError."""
    if value is None:
        return None
    if isinstance(value, str):
        if len(value) > MAX_CHARS or not _WHOLE.fullmatch(value):
            raise _refusal(value)
        parts = _PART.findall(value)
        seconds = math.fsum(float(number) * _UNITS_S[unit] for number, unit in parts)
        return _bounded(-seconds if value[0] == "-" else seconds)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refusal(value)
    return _bounded(value)


def _refusal(value: object) -> ValueError:
    shown = repr(value)[:MAX_CHARS]
    return ValueError(f"{shown} is not allowed; allowed: {_ALLOWED}")


def _bounded(seconds: float) -> float:
    return float(seconds) if 0 <= seconds <= MAX_S else FOREVER


def _checked(value: Any) -> Any:
    seconds_of(value)
    return value


KeepAlive = Annotated[Any, AfterValidator(_checked)]  # the type of a field


def told_in(path: str, body: object) -> float | None:
    """What a request tells; None where it tells nothing that can be heeded."""
    if path not in _PATHS or not isinstance(body, dict):
        return None
    try:
        return seconds_of(body.get("keep_alive"))
    except ValueError:
        return None  # its route refuses it


def asks_to_unload(path: str, body: object, model: str) -> bool:
    """Whether a request is for nothing but the model, by its own name, to be unloaded."""
    if path not in _GENERATING or not isinstance(body, dict) or told_in(path, body) != 0:
        return False
    name = body.get("model")
    return untagged(name) == model and not any(body.get(field) for field in _GENERATING[path])


def unloaded_answer(path: str, model: str) -> dict[str, Any]:
    """The answer to it; `model`: as the client named it."""
    said = (
        {"response": ""}
        if path == "/api/generate"
        else {"message": {"role": "assistant", "content": ""}}
    )
    head = {"model": model, "created_at": timestamp()}
    return {**head, **said, "done": True, "done_reason": "unload"}
