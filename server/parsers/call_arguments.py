"""A call's arguments as an object, for APIs that do not give them as JSON text."""

from __future__ import annotations

from typing import Any

import orjson


def object_of(arguments: str) -> dict[str, Any]:
    """Arguments that were cut off are given as text."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}
