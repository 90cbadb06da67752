"""The text with which a program begins, as far as its ops say it before its first call.

What a chat template puts around messages is the engine's to know. The router learns it from what
engines tell their clients (`mark` events), by the roles before it; a mark that is not known yet has
a stand-in. Whatever is wrong here costs time, never an answer.
"""

from __future__ import annotations

from collections import OrderedDict
from math import inf
from typing import Any

from ..frontend.protocol.program_log import CALLS

MAX_CONTEXTS = 4096
_MAX_ROLES = 6  # of those before a mark that may decide what it is


class MarkMemory:
    """What roles looked like, by the template's arguments and the last ops about roles."""

    def __init__(self) -> None:
        self._texts: OrderedDict[tuple[object, ...], str] = OrderedDict()

    def note(self, context: tuple[object, ...], text: str) -> None:
        """In this context an op about a role appended so much."""
        self._texts[context] = text
        self._texts.move_to_end(context)
        if len(self._texts) > MAX_CONTEXTS:
            self._texts.popitem(last=False)

    def text(self, context: tuple[object, ...]) -> str:
        """What an op about a role will append, as far as is known."""
        known = self._texts.get(context)
        return f"\0{context[-1]}\0" if known is None else known


class Opening:
    """A program's beginning on its first branch: grows with its ops until the first call."""

    __slots__ = (
        "_chats", "_marks", "_memory", "_parts", "_roles", "_template", "is_over", "max_tokens",
    )  # fmt: skip

    def __init__(self, create: dict[str, Any], memory: MarkMemory) -> None:
        self._memory = memory
        # Tools may be long texts, and contexts are kept.
        self._template = hash((create.get("tools"), create.get("template_kwargs")))
        self._parts: list[str] = []
        self._roles: list[str] = []
        self._marks: dict[int, tuple[object, ...]] = {}  # contexts by seq
        self._chats: dict[int, list[tuple[tuple[object, ...], str]]] = {}  # with what is behind
        self.is_over = False
        self.max_tokens = inf  # that the call behind it may generate

    def take(self, ops: list[Any]) -> None:
        """The next ops, as they are sent; restored texts in their places."""
        for op in ops:
            if self.is_over or not isinstance(op, list) or len(op) < 4 or op[1] != 0:
                continue
            kind = op[0]
            if kind in CALLS or kind == "fork":
                self.is_over = True
                self.max_tokens = max_tokens_of(op)
            elif kind == "text" and len(op) > 4 and isinstance(op[4], str):
                self._parts.append(op[4])
            elif kind in ("role_begin", "role_end"):
                fields = hash(str(op[4:]))
                self._roles.append("/" if kind == "role_end" else f"{fields}")
                context = (self._template, *self._roles[-_MAX_ROLES:])
                if isinstance(op[2], int):
                    self._marks[op[2]] = context
                self._parts.append(self._memory.text(context))
            elif kind == "tools":
                self._template = hash((self._template, str(op[4:])))
            elif kind == "chat" and isinstance(op[2], int):
                self._take_chat(op[2], op[4] if len(op) > 4 and isinstance(op[4], list) else [])
            elif kind == "tokens":
                self._parts.append(f"\0{op[4:]}\0")
            elif kind == "image":  # engines tell of its tokens as no text
                self._parts.append(f"\0{hash(str(op[4:]))}\0")

    def _take_chat(self, seq: int, messages: list[Any]) -> None:
        """A mark before each content, and one behind the last."""
        marks = self._chats[seq] = []
        for message in (*messages, ("assistant", "")):
            if not isinstance(message, list | tuple) or len(message) < 2:
                continue
            self._roles.append(f"{hash((str(message[0]), *map(str, message[2:3])))}")
            context = (self._template, *self._roles[-_MAX_ROLES:])
            content = str(message[1])
            marks.append((context, content))
            images = [f"\0{hash(str(given))}\0" for given in message[4:5]]
            self._parts += [self._memory.text(context), *images, content]

    def _note_chat(self, seq: int, text: str) -> None:
        """A template that changes a content leaves the marks behind it unknown."""
        begin = 0
        for context, content in self._chats.pop(seq):
            place = text.find(content, begin) if content else len(text)
            if place < 0:
                return
            self._memory.note(context, text[begin:place])
            begin = place + len(content)

    def note_mark(self, seq: int, payload: Any) -> None:
        """An engine has said what an op about a role appended."""
        if seq in self._chats and isinstance(payload, dict):
            self._note_chat(seq, str(payload.get("text", "")))
            return
        context = self._marks.pop(seq, None)
        if context is not None and isinstance(payload, dict) and not payload.get("replace"):
            self._memory.note(context, str(payload.get("text", "")))

    @property
    def text(self) -> bytes:
        """All of it so far."""
        return "".join(self._parts).encode("utf-8", "surrogatepass")


def max_tokens_of(op: list[Any]) -> float:
    """What all samples of a call may generate; `inf` where it does not say."""
    params = op[5] if op[0] == "gen" and len(op) > 5 else None
    if not isinstance(params, dict):
        return inf
    limit, num_samples = params.get("max_tokens"), params.get("n") or 1
    return float(limit * num_samples) if type(limit) is type(num_samples) is int else inf
