"""A branch's text or chat, as sent to an endpoint; it only grows by appending.

The server applies its chat template. The text that a program sees has a label for each role, as in
SGLang's default template: "USER:...\\n".
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ...errors import InvalidProgram

Kind = Literal["begin", "text", "image", "end"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A message's begin (`text` is its role) or end, text, or an image (`text` is its URL).
    `fields`: of a begin or an end, see `ir.RoleBegin` and `ir.RoleEnd`."""

    kind: Kind
    text: str = ""
    fields: str | None = None

    def shown(self) -> str:
        """Its form in the program's text."""
        if self.kind == "begin":
            return f"{self.text.upper()}:"
        return {"text": self.text, "image": "", "end": "\n"}[self.kind]


@dataclass(slots=True)
class ChatMessage:
    """A message: its pieces of content, and JSON text of its other fields or of what it was read
    as."""

    role: str
    content: list[Piece] = field(default_factory=list)
    fields: str | None = None

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.content if piece.kind == "text")

    def body(self) -> dict[str, Any]:
        """As in OpenAI's API."""
        content: object = self.text
        if any(piece.kind == "image" for piece in self.content):
            content = [_part(piece) for piece in self.content]
        fields = {} if self.fields is None else json.loads(self.fields)
        return {"role": self.role, "content": content, **fields}


def _part(piece: Piece) -> dict[str, Any]:
    if piece.kind == "image":
        return {"type": "image_url", "image_url": {"url": piece.text}}
    return {"type": "text", "text": piece.text}


@dataclass(frozen=True, slots=True)
class Prompt:
    """The context of a call: a text, or messages with a partial assistant message. `tools`: a list
    as JSON text."""

    text: str = ""
    messages: tuple[ChatMessage, ...] = ()
    answer: str = ""  # the assistant's open message so far
    is_chat: bool = False
    tools: str | None = None


class ClientTranscript:
    """Pieces of one branch.

    Invariant: either only text, or whole messages with at most the last one open.
    """

    def __init__(self, *, has_text: bool, has_chat: bool) -> None:
        """Which of the two endpoints serve the model."""
        self._has_text = has_text
        self._has_chat = has_chat
        self.pieces: list[Piece] = []
        self.open_role: str | None = None
        self.is_chat = False
        self.tools: str | None = None  # a list as JSON text

    def copy(self) -> ClientTranscript:
        """An independent transcript with the same content."""
        twin = ClientTranscript(has_text=self._has_text, has_chat=self._has_chat)
        twin.pieces = self.pieces[:]
        twin.open_role, twin.is_chat, twin.tools = self.open_role, self.is_chat, self.tools
        return twin

    def append_text(self, text: str) -> None:
        """Raises InvalidProgram where the endpoint cannot take text here."""
        if not text:
            return
        if self.open_role is None and (self.is_chat or not self._has_text):
            raise InvalidProgram(
                f"text outside of a message ({text[:40]!r}) cannot be sent to a chat endpoint; "
                "put it into user(...), or use a completions endpoint (is_chat_model=False)"
            )
        self.pieces.append(Piece("text", text))

    def append_image(self, url: str) -> None:
        """Raises InvalidProgram outside of a message."""
        if self.open_role is None:
            raise InvalidProgram("image: only within a message, as in user(image(...))", "image")
        self.pieces.append(Piece("image", url))

    def use_tools(self, tools: str) -> None:
        """The calls from here on tell of these tools. Raises InvalidProgram."""
        if not self._has_chat:
            raise InvalidProgram("tools: a completions endpoint knows none", "tools")
        self.tools = tools

    def begin_role(self, role: str, fields: str | None = None) -> str:
        """Open a message; returns its visible text. Raises InvalidProgram."""
        if not self._has_chat:
            raise InvalidProgram(
                f"{role}: a completions endpoint knows no messages; write the model's own marks as "
                "text, or use a chat endpoint (is_chat_model=True)"
            )
        if self.open_role is not None:
            raise InvalidProgram(f"{role} message begun inside a {self.open_role} message")
        if self.pieces and not self.is_chat:
            raise InvalidProgram("text before the first message cannot be sent to a chat endpoint")
        self.is_chat, self.open_role = True, role
        return self._append(Piece("begin", role, fields))

    def end_role(self, fields: str | None = None) -> str:
        """Close the open message. Raises InvalidProgram if none is."""
        if self.open_role is None:
            raise InvalidProgram("no message is open")
        self.open_role = None
        return self._append(Piece("end", "", fields))

    def drop_message(self) -> None:
        """Undo the open message. Raises InvalidProgram if none is."""
        if self.open_role is None:
            raise InvalidProgram("no message is open")
        while self.pieces.pop().kind != "begin":
            pass
        self.open_role = None

    def append(self, pieces: Sequence[Piece]) -> str:
        """Append another branch's pieces; returns their visible text. Raises InvalidProgram."""
        for piece in pieces:
            if piece.kind == "begin":
                self.begin_role(piece.text, piece.fields)
            elif piece.kind == "end":
                self.end_role(piece.fields)
            elif piece.kind == "image":
                self.append_image(piece.text)
            else:
                self.append_text(piece.text)
        return "".join(piece.shown() for piece in pieces)

    def prompt(self) -> Prompt:
        """The context of a call. Raises InvalidProgram where no call is possible."""
        if not self.is_chat:
            if not self.pieces:
                raise InvalidProgram(self._nothing_to_go_on_from())
            return Prompt(text="".join(piece.text for piece in self.pieces))
        if self.open_role != "assistant":
            raise InvalidProgram(
                "a chat endpoint generates only inside an assistant message: "
                "s += assistant(gen(...))"
            )
        *messages, last = self._messages()
        if not messages and not last.text:
            raise InvalidProgram("nothing to generate from: there is no message yet")
        return Prompt(messages=tuple(messages), answer=last.text, is_chat=True, tools=self.tools)

    def _nothing_to_go_on_from(self) -> str:
        if self._has_text:
            return "nothing to generate from: the prompt is empty"
        return "a chat endpoint needs messages: s += user(...) + assistant(gen(...))"

    def _messages(self) -> list[ChatMessage]:
        found: list[ChatMessage] = []
        for piece in self.pieces:
            if piece.kind == "begin":
                found.append(ChatMessage(piece.text, fields=piece.fields))
            elif piece.kind == "end":
                found[-1].fields = piece.fields or found[-1].fields
            else:
                found[-1].content.append(piece)
        return found

    def _append(self, piece: Piece) -> str:
        self.pieces.append(piece)
        return piece.shown()
