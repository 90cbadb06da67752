"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from ....errors import InvalidRequest
from ....frontend.ir import GenParams
from ..access.json_route import json_routes
from ..generation.answer import answer
from ..generation.pieces import Outcome, Piece
from ..generation.task import UNBOUNDED, Message, Task
from ..service import Service
from ..tool_calls.tools import BEGIN, Tool, ToolChoice, ToolUse
from .reply import CompletionReply, event, warnings_of
from .sampling_fields import SamplingFields

_Delta = tuple[dict[str, Any], str | None]  # and the finish reason


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = json_routes()

    @routes.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """OpenAI's chat completions."""
        service.require_model(body.model)
        tool_use = body.tool_use(bool(service.info["template_knows_tools"]))
        params = body.params(tool_use)
        of_tools = None if params.constraint is None else "tools"
        task = Task(
            [[message.plain() for message in body.messages]],
            params,
            n=body.n,
            stream=body.stream,
            tools=tool_use.for_template,
            hints=body.kv_hints,
            cache_salt=body.cache_salt,
            constraint_field=body.constraint_field or of_tools,
        )
        reply = ChatReply(service.model, tool_use, n=body.n, includes_usage=body.includes_usage)
        return await answer(service, request, task, reply)

    return routes


class TextPart(BaseModel):
    """A part of a message's content; only text is known here."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def plain(self) -> Message:
        """Role and text, "developer" being today's name of "system"."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return Message("system" if self.role == "developer" else self.role, text)


class ChatRequest(SamplingFields):
    """Body of /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None

    def tool_use(self, template_knows_tools: bool) -> ToolUse:
        """Raises InvalidRequest."""
        choice = self.tool_choice or ("auto" if self.tools else "none")
        return ToolUse(self.tools or (), choice, template_knows_tools)

    def params(self, tool_use: ToolUse | None = None) -> GenParams:
        """Sampling as the program's gen takes it."""
        given = (self.max_completion_tokens, self.max_tokens, UNBOUNDED)
        wanted = next(value for value in given if value is not None)
        params = self.gen_params(wanted, (self.top_logprobs or 0) if self.logprobs else None)
        of_tools = None if tool_use is None else tool_use.constraint()
        if of_tools is None:
            return params
        if params.constraint is None:
            return replace(params, constraint=of_tools)
        if tool_use is not None and tool_use.is_forced:
            raise InvalidRequest.of(
                self.constraint_field or "tools",
                "...",
                "left out where tool_choice asks for a call",
            )
        return params


class ChatReply(CompletionReply):
    """Answers of /v1/chat/completions. Where tools may be called, a stream holds back what may be a
    call, and sends calls whole."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        model: str,
        tool_use: ToolUse | None = None,
        *,
        n: int = 1,
        includes_usage: bool = False,
    ) -> None:
        super().__init__(model, n=n, includes_usage=includes_usage)
        self._tool_use = tool_use if tool_use is not None and tool_use.may_call else None
        self._begun: set[int] = set()
        self._held: dict[int, str] = {}  # text that may be the beginning of a call

    def choice(self, outcome: Outcome) -> dict[str, Any]:
        message, reason = self._message(outcome)
        return {
            "index": outcome.index,
            "message": {"role": "assistant", **message},
            "finish_reason": reason,
            "logprobs": _chat_logprobs(outcome.meta.get("logprobs")),
            **warnings_of(outcome),
        }

    def _message(self, outcome: Outcome) -> tuple[dict[str, Any], str]:
        """Content and tool calls, and the finish reason."""
        reason: str = outcome.meta["finish_reason"]
        if self._tool_use is None:
            return {"content": outcome.text}, reason
        content, calls = self._tool_use.read(outcome.text)
        if not calls:
            return {"content": content}, reason
        items = [call.as_openai() for call in calls]
        message = {"content": content.strip() or None, "tool_calls": items}
        return message, "tool_calls" if reason == "stop" else reason

    def piece(self, piece: Piece) -> bytes:
        text = piece.text if self._tool_use is None else self._sendable(piece.index, piece.text)
        deltas = self._first_deltas(piece.index)
        if text:
            deltas.append(({"content": text}, None))
        return b"".join(event(chunk) for chunk in self._chunks(piece.index, deltas))

    def end(self, outcome: Outcome) -> bytes:
        deltas = [*self._first_deltas(outcome.index), *self._last_deltas(outcome.index, outcome)]
        chunks = self._chunks(outcome.index, deltas)
        chunks[-1]["choices"][0].update(warnings_of(outcome))
        return b"".join(event(chunk) for chunk in chunks)

    def _chunks(self, index: int, deltas: Sequence[_Delta]) -> list[dict[str, Any]]:
        return [
            self._chunk({"index": index, "delta": delta, "finish_reason": reason})
            for delta, reason in deltas
        ]

    def _first_deltas(self, index: int) -> list[_Delta]:
        if index in self._begun:
            return []
        self._begun.add(index)
        return [({"role": "assistant", "content": ""}, None)]

    def _sendable(self, index: int, fresh: str) -> str:
        """What of a stream's text is surely no part of a call."""
        assert self._tool_use is not None
        held = self._held.get(index, "") + fresh
        sizes = range(min(len(BEGIN), len(held)), 0, -1)
        keep = next((n for n in sizes if BEGIN.startswith(held[-n:])), 0)
        end = held.find(BEGIN) if BEGIN in held else len(held) - keep
        end = 0 if self._tool_use.is_forced else end
        self._held[index] = held[end:]
        return held[:end]

    def _last_deltas(self, index: int, outcome: Outcome) -> list[_Delta]:
        """What was held back, as calls or as text, and the end."""
        message, reason = self._message(outcome)
        held = self._held.pop(index, "")
        last: list[_Delta] = []
        if calls := message.get("tool_calls"):
            assert self._tool_use is not None
            held = self._tool_use.read(held)[0]
            numbered = [{"index": i, **call} for i, call in enumerate(calls)]
            last.append(({"tool_calls": numbered}, None))
        if held.strip() or (held and not calls):
            last.insert(0, ({"content": held}, None))
        return [*last, ({}, reason)]


def _chat_logprobs(entries: list[dict[str, Any]] | None) -> dict[str, Any] | None:
    if entries is None:
        return None

    def shown(entry: dict[str, Any]) -> dict[str, Any]:
        token: str = entry["token"]
        return {"token": token, "logprob": entry["logprob"], "bytes": list(token.encode())}

    content = [{**shown(e), "top_logprobs": [shown(top) for top in e["top"]]} for e in entries]
    return {"content": content, "refusal": None}
