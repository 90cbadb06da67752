"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field, ValidationError

from ....errors import InvalidRequest
from ....frontend.ir import GenParams
from ..access.json_route import json_routes
from ..generation.answer import answer
from ..generation.pieces import Outcome, Piece
from ..generation.task import UNBOUNDED, Message, Task
from ..service import Service
from ..tool_calls.tool_reader import ToolReader
from ..tool_calls.tools import Tool, ToolChoice, ToolUse
from .message_reader import Delta, MessageReader, PlainReader
from .reply import TEXT, CompletionReply, Sample, Wanted, event, extras_of, fingerprint_of
from .sampling_fields import SamplingFields


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = json_routes()

    @routes.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """OpenAI's chat completions."""
        service.require_model(body.model)
        task, new_reader = chat_task(service, body)
        fingerprint = fingerprint_of(service.info)
        reply = ChatReply(service.model, new_reader, body.wanted, fingerprint=fingerprint)
        return await answer(service, request, task, reply)

    return routes


def chat_task(service: Service, body: ChatRequest) -> tuple[Task, Callable[[], MessageReader]]:
    """What a chat asks of the engine, and what reads each sample of it. Raises InvalidRequest."""
    tool_use = body.tool_use(bool(service.info["template_knows_tools"]))
    params = body.params(tool_use)
    of_tools = None if params.constraint is None else "tools"
    task = Task(
        [[message.plain() for message in body.messages]],
        params,
        n=body.n,
        stream=body.stream,
        has_token_ids=body.wanted.needs_token_ids,
        tools=tool_use.for_template,
        hints=body.kv_hints,
        cache_salt=body.cache_salt,
        constraint_field=body.constraint_field or of_tools,
    )
    return task, partial(ToolReader, tool_use) if tool_use.may_call else PlainReader


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

    @property
    def has_logprobs(self) -> bool:
        return self.logprobs

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


def chat_request(fields: dict[str, Any]) -> ChatRequest:
    """A chat that another API's request amounts to. Raises InvalidRequest."""
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(f"{field}: {first['msg']}", field) from error


class ChatReply(CompletionReply):
    """Answers of /v1/chat/completions; each sample's message is read by a `MessageReader`."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        model: str,
        new_reader: Callable[[], MessageReader] = PlainReader,
        wanted: Wanted | None = None,
        *,
        fingerprint: str | None = None,
    ) -> None:
        """`new_reader`: one for each sample."""
        super().__init__(model, wanted, fingerprint=fingerprint)
        self._new_reader = new_reader
        self._samples: dict[int, ChatSample] = {}
        self._num_reasoning_tokens = 0

    def choice(self, outcome: Outcome) -> dict[str, Any]:
        reader = self._new_reader()
        outcome = self._with_stop_text(outcome)
        message, reason = reader.message(outcome)
        self._num_reasoning_tokens += reader.num_reasoning_tokens(outcome)
        ids = {"token_ids": outcome.meta["output_ids"]} if self.wanted.has_token_ids else {}
        return {
            "index": outcome.index,
            "message": {"role": "assistant", "refusal": None, **message},
            "finish_reason": reason,
            "logprobs": self._logprobs(outcome.meta.get("logprobs")),
            **ids,
            **extras_of(outcome),
        }

    def piece(self, piece: Piece) -> bytes:
        sample, begin = self._sample(piece.index)
        sample.hold(piece)
        deltas = sample.reader.feed(piece.text)
        return begin + b"".join([self._said(sample, delta) for delta in deltas])

    def end(self, outcome: Outcome) -> bytes:
        sample, said = self._sample(outcome.index)
        for delta in sample.reader.feed(self._stop_text(outcome)):
            said += self._said(sample, delta)
        outcome = self._with_stop_text(outcome)
        deltas, reason = sample.reader.finish(outcome)
        self._num_reasoning_tokens += sample.reader.num_reasoning_tokens(outcome)
        for delta in deltas:
            said += self._said(sample, delta)
        return said + self._said(sample, {}, reason, extras_of(outcome))

    def num_reasoning_tokens(self, outcomes: Sequence[Outcome]) -> int:
        return self._num_reasoning_tokens

    def _sample(self, index: int) -> tuple[ChatSample, bytes]:
        """A sample, and what a stream says when it begins, where it does now."""
        sample = self._samples.get(index)
        if sample is not None:
            return sample, b""
        choice = {"index": index, "delta": {"content": TEXT}}
        choice |= {"logprobs": None, "finish_reason": None}
        sample = ChatSample(index, self._new_reader(), *self._around_text(choice))
        self._samples[index] = sample
        role = {"role": "assistant", "content": "", "refusal": None}
        return sample, event(self._chunk({**choice, "delta": role}))

    def _said(
        self,
        sample: ChatSample,
        delta: Delta,
        reason: str | None = None,
        extras: dict[str, Any] | None = None,
    ) -> bytes:
        """A chunk, with the tokens that waited for it."""
        if self._is_plain and len(delta) == 1 and (text := delta.get("content")) is not None:
            return sample.head + orjson.dumps(text) + sample.tail
        logprobs = self._logprobs(sample.take_logprobs() or None)
        choice = {"index": sample.index, "delta": delta, "logprobs": logprobs}
        choice |= {"finish_reason": reason, **(extras or {})}
        return self._chunk_of_tokens(choice, sample, self._samples.values())

    def _logprobs(self, entries: Sequence[dict[str, Any]] | None) -> dict[str, Any] | None:
        if entries is None or not self.wanted.has_logprobs:
            return None
        return {"content": chat_logprobs(entries), "refusal": None}


class ChatSample(Sample):
    """A sample with its reader, and a chunk of nothing but content, before and behind that."""

    __slots__ = ("head", "reader", "tail")

    def __init__(self, index: int, reader: MessageReader, head: bytes, tail: bytes) -> None:
        super().__init__(index)
        self.reader = reader
        self.head = head
        self.tail = tail


def chat_logprobs(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each token, in the words of chats."""
    return [{**_shown(e), "top_logprobs": [_shown(t) for t in e["top"]]} for e in entries]


def _shown(entry: dict[str, Any]) -> dict[str, Any]:
    token: str = entry["token"]
    is_text = "\ufffd" not in token  # else its bytes are no characters, and not known here
    data = list(token.encode()) if is_text else None
    return {"token": token, "logprob": entry["logprob"], "bytes": data}
