"""Server-sent events as bytes (WHATWG's HTML, section 9.2); every stream consists of them."""

from __future__ import annotations

import orjson

DONE = b"data: [DONE]\n\n"  # OpenAI's end of a stream
PING = b": ping\n\n"  # a comment, which every reader skips


def event(data: object, name: str | None = None) -> bytes:
    """One event with `data` as JSON, under a name if given."""
    body = b"data: " + orjson.dumps(data) + b"\n\n"
    return body if name is None else b"event: " + name.encode() + b"\n" + body
