"""A branch's text or chat, as sent to an endpoint; it only grows by appending.

The server applies its chat template. The text that a program sees has a label for each role, as in
SGLang's default template: "USER:...\\n".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...errors import InvalidProgram

Kind = Literal["begin", "text", "end"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """The context of a call: a text, or messages with a partial assistant message."""

    text: str = ""
    messages: tuple[tuple[str, str], ...] = ()  # (role, content)
    answer: str = ""  # the assistant's open message so far
    is_chat: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """A message's begin (`text` is its role) or end, or text."""

    kind: Kind
    text: str = ""

    def shown(self) -> str:
        """Its form in the program's text."""
        if self.kind == "begin":
            return f"{self.text.upper()}:"
        return self.text if self.kind == "text" else "\n"


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

    def copy(self) -> ClientTranscript:
        """An independent transcript with the same content."""
        twin = ClientTranscript(has_text=self._has_text, has_chat=self._has_chat)
        twin.pieces = self.pieces[:]
        twin.open_role, twin.is_chat = self.open_role, self.is_chat
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

    def begin_role(self, role: str) -> str:
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
        return self._append(Piece("begin", role))

    def end_role(self) -> str:
        """Close the open message. Raises InvalidProgram if none is."""
        if self.open_role is None:
            raise InvalidProgram("no message is open")
        self.open_role = None
        return self._append(Piece("end"))

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
                self.begin_role(piece.text)
            elif piece.kind == "end":
                self.end_role()
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
        *messages, (_, answer) = self._messages()
        if not messages and not answer:
            raise InvalidProgram("nothing to generate from: there is no message yet")
        return Prompt(messages=tuple(messages), answer=answer, is_chat=True)

    def _nothing_to_go_on_from(self) -> str:
        if self._has_text:
            return "nothing to generate from: the prompt is empty"
        return "a chat endpoint needs messages: s += user(...) + assistant(gen(...))"

    def _messages(self) -> list[tuple[str, str]]:
        found: list[tuple[str, list[str]]] = []
        for piece in self.pieces:
            if piece.kind == "begin":
                found.append((piece.text, []))
            elif piece.kind == "text":
                found[-1][1].append(piece.text)
        return [(role, "".join(texts)) for role, texts in found]

    def _append(self, piece: Piece) -> str:
        self.pieces.append(piece)
        return piece.shown()
