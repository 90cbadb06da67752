"""Chats and prompts of a file of JSON lines, as programs: what users ask of a model."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InvalidRequest
from ..frontend.chat_format.call_grammar import tools_text
from ..frontend.client.backend import Backend
from ..frontend.dsl.expr import ToolsExpr, assistant, role
from ..frontend.dsl.function import function
from ..frontend.dsl.generation import gen
from ..frontend.dsl.state import ProgramState

_DEFAULTS: dict[str, Any] = {"max_tokens": 256}
_AT_ONCE = 32  # programs


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages in OpenAI's format, with tools, or a plain prompt; `options`: of `gen`."""

    prompt: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)


def read_chats(file: Path) -> list[Chat]:
    """An object a line: `messages` and perhaps `tools`, or `prompt`; what else it has are options
    of `gen`. Raises InvalidRequest, which names the line."""
    chats = []
    lines = file.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                chats.append(_chat(json.loads(line)))
            except ValueError as error:
                allowed = f'lines such as {{"messages": [...]}} or {{"prompt": "..."}} ({error})'
                raise InvalidRequest.of("programs", f"{file}:{number}", allowed) from error
    return chats


def run_chats(chats: list[Chat], backend: Backend) -> None:
    """All of them, so many at once. Raises ProgramError or InvalidProgram."""
    for first in range(0, len(chats), _AT_ONCE):
        batch = [{"chat": chat} for chat in chats[first : first + _AT_ONCE]]
        for state in _reply.run_batch(batch, backend=backend):
            state.text()


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


def _chat(given: Any) -> Chat:
    """Raises ValueError."""
    if not isinstance(given, dict) or ("messages" in given) == ("prompt" in given):
        raise ValueError("an object has either messages or a prompt")
    for name, kind in (("messages", list), ("tools", list), ("prompt", str)):
        if name in given and not isinstance(given[name], kind):
            raise ValueError(f"{name} is no {kind.__name__}")
    messages = given.get("messages", [])
    if not all(isinstance(each, dict) and "role" in each for each in messages):
        raise ValueError("each message is an object with a role")
    own = ("messages", "prompt", "tools")
    options = {key: value for key, value in given.items() if key not in own}
    return Chat(given.get("prompt"), messages, given.get("tools", []), options)
