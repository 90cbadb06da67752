"""Texts of a file of JSON lines, which need no model to be written. Torch-free."""

from __future__ import annotations

import json
from pathlib import Path

from ..errors import InvalidRequest

_ALLOWED = 'in each line an object such as {"text": "..."}, or in none'


def read_texts(file: Path) -> list[str] | None:
    """An object a line with a `text` alone, as it stands; None: the first is none, so that they
    are chats or programs. Raises InvalidRequest, which names the line."""
    if file.suffix == ".py":
        return None
    texts: list[str] = []
    for number, line in enumerate(file.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            given = json.loads(line.decode("utf-8-sig"))
        except ValueError:
            given = None
        is_text = isinstance(given, dict) and given.keys() == {"text"}
        if not is_text or not isinstance(given["text"], str):
            if not texts:
                return None
            raise InvalidRequest.of("calibrate", f"{file}:{number}", _ALLOWED)
        texts.append(given["text"])
    return texts
