"""Chats and prompts of a file of JSON lines, as programs: what users ask of a model."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import BatchError, InvalidRequest
from ..frontend.chat_format.call_grammar import tools_text
from ..frontend.client.backend import Backend
from ..frontend.dsl.expr import ToolsExpr, assistant, role
from ..frontend.dsl.function import function
from ..frontend.dsl.generation import gen
from ..frontend.dsl.state import ProgramState

_DEFAULTS: dict[str, Any] = {"max_tokens": 256}
_AT_ONCE = 32  # programs
_OPTIONS = frozenset(inspect.signature(gen).parameters) - {"name"}


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages in OpenAI's format, with tools, or a plain prompt; `options`: of `gen`."""

    place: str  # "FILE:LINE"
    prompt: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)


def read_chats(file: Path, field: str) -> list[Chat]:
    """An object a line: `messages` and perhaps `tools`, or `prompt`; what else it has are options
    of `gen`. Raises InvalidRequest, of this field, which names the line."""
    chats = []
    for number, line in enumerate(file.read_bytes().split(b"\n"), 1):
        if line.strip():
            place = f"{file}:{number}"
            try:
                chats.append(_chat(place, json.loads(line.decode("utf-8-sig"))))
            except ValueError as error:
                allowed = f'lines such as {{"messages": [...]}} or {{"prompt": "..."}} ({error})'
                raise InvalidRequest.of(field, place, allowed) from error
    return chats


def run_chats(chats: list[Chat], backend: Backend, field: str) -> None:
    """All of them, so many at once. Raises InvalidRequest, of this field, which names the first
    line that fails, and ProgramError."""
    for first in range(0, len(chats), _AT_ONCE):
        batch = chats[first : first + _AT_ONCE]
        try:
            _reply.run_batch([{"chat": chat} for chat in batch], backend=backend)
        except BatchError as failed:
            index, error = min(failed.errors.items())
            allowed = f"lines that the model can answer: {error}"
            raise InvalidRequest.of(field, batch[index].place, allowed) from error


@function
def _reply(s: ProgramState, chat: Chat) -> None:
    options = {**_DEFAULTS, **chat.options}
    if chat.prompt is not None:
        s += chat.prompt + gen("reply", **options)
        return
    if chat.tools:
        s += ToolsExpr(tools_text(chat.tools))
    for message in chat.messages:
        others = {key: message[key] for key in message if key not in ("role", "content")}
        s += role(message["role"], message.get("content"), **others)
    s += assistant(gen("reply", **options))


def _chat(place: str, given: Any) -> Chat:
    """Raises ValueError."""
    if not isinstance(given, dict) or ("messages" in given) == ("prompt" in given):
        raise ValueError("an object has either messages or a prompt")
    for name, kind in (("messages", list), ("tools", list), ("prompt", str)):
        if name in given and not isinstance(given[name], kind):
            raise ValueError(f"{name} is no {kind.__name__}")
    own = ("messages", "prompt", "tools")
    options = {key: value for key, value in given.items() if key not in own}
    if unknown := sorted(options.keys() - _OPTIONS):
        raise ValueError(f"{', '.join(unknown)}: beside these it has options of st.gen alone")
    messages = [*map(_message, given.get("messages", []))]
    return Chat(place, given.get("prompt"), messages, given.get("tools", []), options)


def _message(given: Any) -> dict[str, Any]:
    """With its content as text. Raises ValueError."""
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise ValueError("each message is an object with a role")
    content = given.get("content")
    if isinstance(content, list):
        content = "".join(map(_part_text, content))
    if not isinstance(content, str | None):
        raise ValueError("a message's content is text, or parts with a text each")
    return {**given, "content": content}


def _part_text(part: Any) -> str:
    """Raises ValueError."""
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise ValueError("a message's content is text, or parts with a text each")
    return text
