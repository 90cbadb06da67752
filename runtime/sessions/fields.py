"""Fields of messages that clients fill in."""

from __future__ import annotations

from typing import Any

import orjson

from ...errors import InvalidProgram, ProtocolError

MAX_OPS_A_MESSAGE = 65_536  # a client's own limit of bytes keeps it below that


def integer(values: dict[str, Any], name: str, default: int | None = None) -> int:
    """Raises ProtocolError."""
    value = values.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise ProtocolError(f"{name}={value!r} is not allowed; allowed: an integer in [0, 2**63)")
    return value


def optional_text(values: dict[str, Any], name: str) -> str | None:
    """At most 256 characters; None if it is absent. Raises ProtocolError."""
    value = values.get(name)
    if value is not None and not (isinstance(value, str) and len(value) <= 256):
        raise ProtocolError(
            f"{name}={value!r} is not allowed; allowed: a string of at most 256 characters"
        )
    return value


def json_field(values: dict[str, Any], name: str, kind: type) -> Any:
    """A field's value from its JSON text; None if it is absent. Raises InvalidProgram."""
    text = values.get(name)
    if text is None:
        return None
    try:
        value = orjson.loads(text if isinstance(text, str) else b"")
    except orjson.JSONDecodeError as error:
        raise InvalidProgram(f"{name}: not JSON: {error}", name) from error
    if not isinstance(value, kind):
        raise InvalidProgram(f"{name}: no {kind.__name__}", name)
    return value


def program_items(header: dict[str, Any]) -> list[dict[str, Any]]:
    """The programs of an `ops` message. Raises ProtocolError."""
    items = header.get("programs")
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ProtocolError("ops: programs must be a list of objects")
    num_ops = sum(len(ops) for item in items if isinstance(ops := item.get("ops"), list))
    if num_ops > MAX_OPS_A_MESSAGE:
        raise ProtocolError(f"a message with {num_ops} ops; at most {MAX_OPS_A_MESSAGE}")
    return items
