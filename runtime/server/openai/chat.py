"""`/v1/chat/completions`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from ....errors import InvalidRequest
from ....frontend.ir import GenParams
from ..access.json_route import json_routes
from ..generation.answer import answer
from ..generation.pieces import Outcome, Piece
from ..generation.task import UNBOUNDED, Task
from ..service import Service
from ..tool_calls.chat_format import ChatFormat
from ..tool_calls.output_reader import OutputReader
from ..tool_calls.tools import MAX_TOOLS, Tool, ToolChoice, ToolUse, behind_reasoning
from .chat_messages import ChatMessage, fitting
from .message_reader import Delta, MessageReader, PlainReader
from .reasoning_fields import ReasoningFields
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
    chat_format = ChatFormat.of(service.info, service.settings)
    messages = [message.plain(index) for index, message in enumerate(body.messages)]
    tool_use = body.tool_use(chat_format)
    variables = body.template_variables(chat_format)
    params, starts_inside = body.params(tool_use, chat_format, variables)
    of_tools = None if params.constraint is None else "tools"
    task = Task(
        [fitting(messages, chat_format)],
        params,
        n=body.n,
        stream=body.stream,
        has_token_ids=body.wanted.needs_token_ids,
        tools=tool_use.for_template,
        template_kwargs=json.dumps(variables) if variables else None,
        hints=body.kv_hints,
        cache_salt=body.cache_salt,
        constraint_field=body.constraint_field or of_tools,
    )
    warnings = body.reasoning_warnings(variables, chat_format)
    reasoning = body.reasoning_use(
        chat_format, starts_inside=starts_inside, must_split=tool_use.is_forced
    )
    if reasoning is None and not tool_use.may_call and not tool_use.warnings and not warnings:
        return task, PlainReader
    return task, partial(OutputReader, tool_use, reasoning, warnings)


class ChatRequest(SamplingFields, ReasoningFields):
    """Body of /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    functions: Any = None
    function_call: Any = None

    @property
    def has_logprobs(self) -> bool:
        return self.logprobs

    def tool_use(self, chat_format: ChatFormat) -> ToolUse:
        """Raises InvalidRequest."""
        for name, newer in (("functions", "tools"), ("function_call", "tool_choice")):
            if getattr(self, name) is not None:
                raise InvalidRequest.of(name, "...", f"left out; see {newer}")
        return ToolUse(
            self.tools or (),
            self.tool_choice or ("auto" if self.tools else "none"),
            chat_format,
            is_parallel=self.parallel_tool_calls,
            has_own_constraint=self.constraint_field is not None,
        )

    def params(
        self, tool_use: ToolUse, chat_format: ChatFormat, variables: Mapping[str, Any]
    ) -> tuple[GenParams, bool]:
        """Sampling as the program's gen takes it, and whether the output begins within reasoning.

        A constraint holds behind the reasoning if there is some and what follows is JSON; any
        other one holds for the whole output, which then is no reasoning.
        """
        given = (self.max_completion_tokens, self.max_tokens, UNBOUNDED)
        wanted = next(value for value in given if value is not None)
        params = self.gen_params(wanted, (self.top_logprobs or 0) if self.logprobs else None)
        will_reason = self._continued_text is None and chat_format.will_reason(variables)
        tags = chat_format.reasoning if will_reason else None
        starts_inside = tags is not None and chat_format.opens_reasoning(variables)
        if self._continued_text is not None and chat_format.reasoning is not None:
            starts_inside = chat_format.reasoning.is_open_after(self._continued_text)
        if params.constraint is None:
            return replace(params, constraint=tool_use.constraint(tags)), starts_inside
        if tool_use.is_forced:
            raise InvalidRequest.of(
                self.constraint_field or "tools",
                "...",
                "left out where tool_choice asks for a call",
            )
        behind = None if tags is None else behind_reasoning(tags, params.constraint)
        if behind is None:
            return params, False
        return replace(params, constraint=behind), starts_inside

    @property
    def _continued_text(self) -> str | None:
        """The text of an assistant's last message, which the output goes on with."""
        last = self.messages[-1]
        return last.plain().content if last.role == "assistant" else None


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
        content = [{**_shown(e), "top_logprobs": [_shown(t) for t in e["top"]]} for e in entries]
        return {"content": content, "refusal": None}


class ChatSample(Sample):
    """A sample with its reader, and a chunk of nothing but content, before and behind that."""

    __slots__ = ("head", "reader", "tail")

    def __init__(self, index: int, reader: MessageReader, head: bytes, tail: bytes) -> None:
        super().__init__(index)
        self.reader = reader
        self.head = head
        self.tail = tail


def _shown(entry: dict[str, Any]) -> dict[str, Any]:
    token: str = entry["token"]
    is_text = "\ufffd" not in token  # else its bytes are no characters, and not known here
    data = list(token.encode()) if is_text else None
    return {"token": token, "logprob": entry["logprob"], "bytes": data}
