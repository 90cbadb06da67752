"""Where a call begins in reasoning that was not closed: models forget the closing tag before it,
Kimi K2 and Qwen3.5 among them."""

from __future__ import annotations

from collections.abc import Container

from .matching import NEEDS_MORE, overlap
from .tool_format import Head, ToolFormat


class CallBeginnings:
    """Finds the calls of these functions. What only looks like one, or names another function, is
    none: reasoning also speaks of calls."""

    def __init__(self, tool_format: ToolFormat, names: Container[str]) -> None:
        self._format = tool_format
        self._names = names

    def first_in(self, text: str) -> tuple[int, bool]:
        """How far the text surely has no call, and whether one begins there."""
        triggers, at = self._format.triggers, 0
        while begins := [(i, t) for t in triggers if (i := text.find(t, at)) >= 0]:
            begin, trigger = min(begins)
            head = self._format.head(text[begin:], len(trigger))
            if head is NEEDS_MORE:
                return begin, False
            if isinstance(head, Head) and head.name in self._names:
                return begin, True
            at = begin + len(trigger)
        kept = max((overlap(text, trigger) for trigger in triggers), default=0)
        return max(at, len(text) - kept), False
