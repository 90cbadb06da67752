"""JSON text of values that somebody else gave, which may be large.

Python's encoder in C takes a list of a million numbers in one go (0.1 s on a Xeon), and no other
thread runs meanwhile. The one in Python yields piece by piece: other threads run in between, and a
text that is too long is given up on the way. It takes three times as long.
"""

from __future__ import annotations

import json

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def json_text(value: object, max_chars: int) -> str | None:
    """Compact JSON; None for more than `max_chars`. Raises TypeError and ValueError for what is no
    JSON, RecursionError for what is too deep."""
    pieces: list[str] = []
    num_left = max_chars
    for piece in _ENCODER.iterencode(value):
        num_left -= len(piece)
        if num_left < 0:
            return None
        pieces.append(piece)
    return "".join(pieces)
