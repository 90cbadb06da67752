"""Short descriptions of an op for people: its kind, its contents and its source line."""

from __future__ import annotations

import os
from typing import Any

from ..protocol import ir

MAX_VALUE_CHARS = 40


def label_of(op: ir.Op, max_text_chars: int = 60) -> tuple[str, str]:
    """(kind, details) of an op; long values are cut, with an ellipsis."""
    match op:
        case ir.Text():
            return "text", quoted(op.text, max_text_chars)
        case ir.Tokens():
            return "tokens", f"{len(op.token_ids)} ids"
        case ir.Chat():
            return "chat", plural(len(op.messages), "message")
        case ir.Gen():
            return "gen", _spaced(op.name or "(unnamed)", _given(op.params))
        case ir.Select():
            options = {"choices": list(op.choices), "method": op.method}
            if op.method == ir.CHOICES_METHODS[0]:
                del options["method"]
            return "select", _spaced(op.name or "(unnamed)", _pairs(options))
        case ir.RoleBegin():
            return op.role, ""
        case ir.Tools():
            return "tools", quoted(op.tools, max_text_chars)
        case ir.Fork():
            return "fork", f"{len(op.children)}"
        case ir.Join():
            return "join", _join(op)
        case ir.Pause():
            expected = "" if op.expected_s is None else f"about {op.expected_s:g} s"
            return "pause", _spaced(op.label, expected)
        case ir.Compress():
            return "compress", str(op.policy)
        case ir.Background():
            return "background", "begins" if op.begins else "ends"
        case ir.Hint():
            given = {"ttl_ms": op.ttl_ms, "priority": op.priority, "tier": op.tier}
            return "hint", _spaced(op.action, _pairs(given))
    return op.kind, ""


def short_source(source: str | None) -> str:
    """ "file:line" without the file's folders; "-" where it is unknown."""
    return "-" if source is None else source.replace("\\", os.sep).rpartition(os.sep)[2]


def quoted(text: str, max_chars: int) -> str:
    """The text on one line in quotes, cut with an ellipsis."""
    shown = text if len(text) <= max_chars else text[: max_chars - 1]
    body = "".join(_ESCAPES.get(c) or (c if c.isprintable() else f"\\x{ord(c):02x}") for c in shown)
    return f'"{body}"' if len(text) <= max_chars else f'"{body}…"'


_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", '"': '\\"'}


def _given(params: ir.GenParams) -> str:
    given = params.given()
    constraint = given.pop("constraint", None)
    if constraint is not None:
        given[constraint.kind] = constraint.source
    return _pairs(given)


def _pairs(values: dict[str, Any]) -> str:
    return _spaced(*(f"{k}={_value(v)}" for k, v in values.items() if v is not None))


def _value(value: Any) -> str:
    if isinstance(value, str):
        return quoted(value, MAX_VALUE_CHARS)
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        shown = "[" + ", ".join(map(_value, value[:4])) + (", …]" if len(value) > 4 else "]")
        return shown if len(shown) <= MAX_VALUE_CHARS else shown[: MAX_VALUE_CHARS - 1] + "…"
    return str(value)


def _join(op: ir.Join) -> str:
    needed = "" if op.num_needed is None else f"first {op.num_needed} of {len(op.children)}"
    return _spaced(needed, "appends text" if op.mode == "concate_and_append" else "")


def _spaced(*words: str) -> str:
    return " ".join(word for word in words if word)


ABSENT = "-"


def seconds(value: float | None) -> str:
    """Formatted with a unit that fits its size."""
    if value is None:
        return ABSENT
    if value >= 9.9995:
        return f"{value:.1f} s"
    return f"{value:.2f} s" if value >= 0.9995 else f"{value * 1000:.1f} ms"


def count(value: int | None) -> str:
    """Formatted with separators."""
    return ABSENT if value is None else f"{value:,}"


def percent(share: float | None) -> str:
    """Formats a share in [0, 1]."""
    return ABSENT if share is None else f"{share:.0%}"


def plural(num: int, word: str, words: str = "") -> str:
    """The number with its noun; `words`: a plural that is not just `word` with an s."""
    return f"{num} {word if num == 1 else words or word + 's'}"
