"""`/v1/chat/completions`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from ....errors import InvalidRequest
from ....frontend.chat_format.chat_format import ChatFormat
from ....frontend.chat_format.reasoning import ReasoningTags
from ....frontend.protocol.chat_message import Message
from ....frontend.protocol.ir import GenParams
from ....frontend.protocol.numbers import MAX_LOGPROBS
from ...generation.answer import answer
from ...generation.service import Served, Service
from ...parsers.output_reader import OutputReader
from ...parsers.tools import MAX_TOOLS, Tool, ToolChoice, ToolUse, behind_reasoning
from ...protocol.json_route import beside_loop, json_routes, validated
from ...protocol.known_fields import Items
from ...protocol.pieces import Outcome, Piece
from ...protocol.task import UNBOUNDED, Task
from .chat_messages import ChatMessage, fitting
from .constraint_fields import NO_NAMES
from .content_parts import ImageField, image_fields, refuse_images
from .message_reader import Delta, MessageReader, PlainReader
from .reasoning_fields import ReasoningFields
from .reply import (
    TEXT,
    CompletionReply,
    Sample,
    Wanted,
    extras_of,
    fingerprint_of,
    prompt_logprobs_of,
)
from .sampling_fields import SamplingFields


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = json_routes()

    @routes.post("/chat/completions", include_in_schema=False)
    @routes.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """OpenAI's chat completions."""
        served = service.served(body.model, body.lora_path)
        task, new_reader = await beside_loop(request, lambda: chat_task(service, body, served))
        fingerprint = fingerprint_of(service.info)
        reply = ChatReply(
            served.name, new_reader, body.wanted, fingerprint=fingerprint, echo=body.echoed
        )
        return await answer(service, request, task, reply)

    return routes


def chat_task(
    service: Service,
    body: ChatRequest,
    served: Served,
    images: Iterable[ImageField] | None = None,
) -> tuple[Task, Callable[[], MessageReader]]:
    """What a chat asks of the engine, and what reads each sample of it. `images`: as the client
    named them, if not in this format. Raises InvalidRequest."""
    chat_format = ChatFormat.of(
        service.info, service.settings.tool_call_parser, service.settings.reasoning_parser
    )
    if not service.info.get("reads_images"):
        named = body.image_fields() if images is None else images
        refuse_images(named, service.info.get("images_refusal"))
    tool_use = body.tool_use(chat_format)
    variables = body.template_variables(chat_format)
    params, starts_inside = body.params(tool_use, chat_format, variables)
    task = body.to_task(
        [fitting(body.plain_messages(), chat_format)],
        params,
        served,
        tools=tool_use.for_template,
        template_kwargs=json.dumps(variables) if variables else None,
    )
    form = params.constraint
    if form is not None and (tool_use.is_forced or body.constraint_field is None):
        task = replace(task, constraint_field="tools", words=tool_use.words(form))
    elif form is not None and task.words is not None and tool_use.may_call:
        task = replace(task, words=task.words.beside(tool_use.words(form)))
    warnings = body.reasoning_warnings(variables, chat_format)
    reasoning = body.reasoning_use(
        chat_format, starts_inside=starts_inside, must_split=tool_use.is_forced
    )
    is_plain = reasoning is None and chat_format.channels is None and not tool_use.may_call
    is_plain = is_plain and not tool_use.has_wrappings
    if is_plain and not tool_use.warnings and not warnings:
        return task, PlainReader
    return task, partial(OutputReader, tool_use, reasoning, warnings)


class ChatRequest(ReasoningFields, SamplingFields):
    """Body of /v1/chat/completions."""

    messages: Items[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: Items[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool = False
    echo: bool = False

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def image_fields(self) -> Iterator[ImageField]:
        """Of all messages."""
        for index, message in enumerate(self.messages):
            yield from image_fields(message.content, f"messages.{index}.content")

    def tool_use(self, chat_format: ChatFormat) -> ToolUse:
        """Raises InvalidRequest."""
        return ToolUse(
            self.tools or (),
            self.tool_choice or ("auto" if self.tools else "none"),
            chat_format,
            is_parallel=self.parallel_tool_calls,
            own=self.constraint() if self.tools else None,
        )

    @property
    def is_continued(self) -> bool:
        """Whether the output goes on with the last message: so it does where that is the
        assistant's, unless the client says otherwise."""
        asked = self.continue_final_message
        continues = not self.add_generation_prompt if asked is None else asked
        return self.messages[-1].role == "assistant" and continues

    @property
    def echoed(self) -> str:
        """The beginning of the message, where it is to be repeated."""
        return self.plain_messages()[-1].content if self.echo and self.is_continued else ""

    def plain_messages(self) -> list[Message]:
        """The last one is the assistant's where it is continued; another one of the assistant's is
        begun behind. Raises InvalidRequest."""
        messages = [message.plain(index) for index, message in enumerate(self.messages)]
        continues, prompts = self.continue_final_message, self.add_generation_prompt
        if continues and messages[-1].role != "assistant":
            allowed = "false where the last message is not the assistant's"
            raise InvalidRequest.of("continue_final_message", True, allowed)
        if prompts is not None and prompts == self.is_continued:
            allowed = "true, or false together with continue_final_message"
            raise InvalidRequest.of("add_generation_prompt", prompts, allowed)
        if messages[-1].role == "assistant" and not self.is_continued:
            messages.append(Message("assistant", ""))
        return messages

    def params(
        self, tool_use: ToolUse, chat_format: ChatFormat, variables: Mapping[str, Any]
    ) -> tuple[GenParams, bool]:
        """Sampling as the program's gen takes it, and whether the output begins within reasoning.

        A response format is of what a message says, and so of no call that comes instead; other
        constraints are of all that is generated, but in place of a JSON document a call may come by
        choice. What is JSON holds behind the reasoning, if there is some; any other constraint
        holds for the whole output, which then is no reasoning. Raises InvalidRequest.
        """
        self._refuse_what_chats_lack()
        given = (self.max_completion_tokens, self.max_tokens, UNBOUNDED)
        params = self.gen_params(next(value for value in given if value is not None))
        tags, starts_inside = self._reasoning(chat_format, variables)
        field = self.constraint_field
        is_other = field is not None and field != self.client_name("response_format")
        if tool_use.is_forced and field is not None and is_other:
            allowed = "left out where tool_choice asks for a call"
            raise InvalidRequest.of(field, "...", allowed)
        if params.constraint is None or tool_use.is_forced:
            return replace(params, constraint=tool_use.constraint(tags)), starts_inside
        either = None if self.is_continued else tool_use.document_or_call(tags)
        if either is not None:
            return replace(params, constraint=either), starts_inside
        behind = None if tags is None else behind_reasoning(tags, params.constraint)
        if chat_format.channels is not None and not self.is_continued:
            behind = chat_format.channels.in_final(params.constraint)
        if behind is None:
            return params, False
        return replace(params, constraint=behind), starts_inside

    def _reasoning(
        self, chat_format: ChatFormat, variables: Mapping[str, Any]
    ) -> tuple[ReasoningTags | None, bool]:
        """The tags of the reasoning that surely comes, and whether the output begins within it."""
        tags = chat_format.reasoning
        if tags is None:
            return None, False
        if self.is_continued:
            text = self.messages[-1].plain(len(self.messages) - 1).content
            is_open = tags.is_open_after(text)
            return (tags if is_open else None), is_open
        after_tool = self.messages[-1].role == "tool" and chat_format.knows_calls
        will_reason = chat_format.will_reason(variables, after_tool=after_tool)
        opens = chat_format.opens_reasoning(variables, after_tool=after_tool)
        return (tags if will_reason else None), opens

    def _refuse_what_chats_lack(self) -> None:
        if self.best_of not in (None, self.n):
            raise InvalidRequest.of("best_of", self.best_of, "left out, or the same as n")
        if self.top_logprobs is not None and not self.logprobs:
            allowed = "only together with logprobs: true"
            raise InvalidRequest.of("top_logprobs", self.top_logprobs, allowed)
        if self.add_special_tokens:
            allowed = "false: the chat template writes them"
            raise InvalidRequest.of("add_special_tokens", True, allowed)


def chat_request(fields: dict[str, Any], names: Mapping[str, str] = NO_NAMES) -> ChatRequest:
    """A chat that another API's request amounts to; `names`: that API's, of fields that constrain
    the output. Raises InvalidRequest."""
    return validated(ChatRequest, fields).named(names)


class ChatReply(CompletionReply["ChatSample"]):
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
        echo: str = "",
    ) -> None:
        """`new_reader`: one for each sample; `echo`: how its content begins."""
        super().__init__(model, wanted, fingerprint=fingerprint)
        self._head["service_tier"] = "default"
        self._echo = echo
        self._new_reader = new_reader
        self._num_reasoning_tokens = 0

    def choice(self, outcome: Outcome) -> dict[str, Any]:
        reader = self._new_reader()
        outcome = self._with_stop_text(outcome)
        message, reason = reader.message(outcome)
        self._num_reasoning_tokens += reader.num_reasoning_tokens(outcome)
        if self._echo:
            message["content"] = self._echo + (message.get("content") or "")
        ids = {"token_ids": outcome.meta["output_ids"]} if self.wanted.has_token_ids else {}
        return {
            "index": outcome.index,
            "message": {"role": "assistant", "refusal": None, **message},
            "finish_reason": reason,
            "logprobs": self._logprobs(outcome.meta.get("logprobs")),
            **ids,
            **extras_of(outcome),
        }

    def whole(self, outcomes: Sequence[Outcome], hints: dict[str, Any] | None) -> dict[str, Any]:
        body = super().whole(outcomes, hints)
        num = self.wanted.num_prompt_logprobs
        return (
            body
            if num is None
            else {**body, "prompt_logprobs": prompt_logprobs_of(outcomes[0], num)}
        )

    def piece(self, piece: Piece) -> bytes:
        sample = self._samples.get(piece.index)
        is_new = sample is None
        if sample is None:
            sample = self._new_sample(piece.index)
        sample.hold(piece)
        said = self._begin(sample) if is_new else b""
        for delta in sample.reader.feed(piece.text):
            said += self._said(sample, delta)
        return said

    def end(self, outcome: Outcome) -> bytes:
        sample = self._samples.get(outcome.index)
        said = b""
        if sample is None:
            sample = self._new_sample(outcome.index)
            said = self._begin(sample)
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

    def _new_sample(self, index: int) -> ChatSample:
        choice = {"index": index, "delta": {"content": TEXT}}
        choice |= {"logprobs": None, "finish_reason": None}
        sample = ChatSample(index, self._around_text(choice), self._new_reader())
        self._samples[index] = sample
        return sample

    def _begin(self, sample: ChatSample) -> bytes:
        """What a stream says before anything else of a sample."""
        role = {"role": "assistant", "content": self._echo, "refusal": None}
        choice = {"index": sample.index, "delta": role, "logprobs": None, "finish_reason": None}
        return self._event(choice)

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
        return self._chunk_of_tokens(sample, choice, reason, extras)

    def _logprobs(self, entries: Sequence[dict[str, Any]] | None) -> dict[str, Any] | None:
        num = self.wanted.num_logprobs
        if entries is None or num is None:
            return None
        return {"content": chat_logprobs(entries, num), "refusal": None}


class ChatSample(Sample):
    """A sample with its reader."""

    __slots__ = ("reader",)

    def __init__(self, index: int, around_text: tuple[bytes, bytes], reader: MessageReader) -> None:
        super().__init__(index, around_text)
        self.reader = reader


def chat_logprobs(entries: Sequence[dict[str, Any]], num_top: int) -> list[dict[str, Any]]:
    """Of each token and the `num_top` likeliest in its place, in the words of chats; under a
    grammar with what it took there."""
    return [
        {
            **_shown(entry),
            "top_logprobs": [_shown(top) for top in entry["top"][:num_top]],
            **{name: entry[name] for name in _OF_GRAMMARS if name in entry},
        }
        for entry in entries
    ]


_OF_GRAMMARS = ("allowed_logprob", "is_redirected")


def _shown(entry: dict[str, Any]) -> dict[str, Any]:
    token: str = entry["token"]
    is_text = "\ufffd" not in token  # else its bytes are no characters, and not known here
    data = list(token.encode()) if is_text else None
    return {"token": token, "logprob": entry["logprob"], "bytes": data}
