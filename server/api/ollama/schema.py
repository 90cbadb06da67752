"""Bodies of Ollama's API, and their conversion to OpenAI's requests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import Field

from ....errors import InvalidRequest
from ....frontend.chat_format.chat_format import ChatFormat
from ....frontend.protocol.numbers import MAX_LOGPROBS
from ...parsers.tools import MAX_TOOLS
from ...protocol.known_fields import FewItems, Items, NullableFields
from ...protocol.task import UNBOUNDED
from ..openai.chat import ChatRequest, chat_request
from ..openai.completions import CompletionRequest, completion_request
from ..openai.content_parts import ImageField
from .keep_alive import KeepAlive
from .options import Options

_NAMES = {"response_format": "format", "lenient": ""}


class GenerationFields(NullableFields):
    """What chats and completions share."""

    model: str | None = None
    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] = ""
    options: Options = Field(default_factory=Options)
    think: bool | str | None = None
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MAX_LOGPROBS)
    keep_alive: KeepAlive = None
    truncate: Any = None
    shift: Any = None

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives told of each token; None: nothing is."""
        return self.top_logprobs if self.logprobs else None

    def require_thinking(self, chat_format: ChatFormat, name: str) -> None:
        """Raises InvalidRequest for a model that is asked to think and cannot."""
        if self.think and chat_format.reasoning is None:
            raise InvalidRequest(f"{name!r} does not support thinking", "think")

    def common_fields(self) -> dict[str, Any]:
        """Those of either request of OpenAI's."""
        return {"stream": self.stream, **self.options.fields(), **self._form()}

    def chat_of(self, messages: list[dict[str, Any]], **others: Any) -> ChatRequest:
        """A chat of these messages. Raises InvalidRequest."""
        fields = {
            "messages": messages,
            "max_completion_tokens": self.options.max_tokens,
            **self.common_fields(),
            **self._thinking(),
            **others,
        }
        if self.logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        given = {name: value for name, value in fields.items() if value is not None}
        return chat_request(given, _NAMES)

    def _form(self) -> dict[str, Any]:
        if not self.format:
            return {}
        if self.format == "json":
            return {"response_format": {"type": "json_object"}}
        schema = {"name": "output", "schema": self.format}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}

    def _thinking(self) -> dict[str, Any]:
        if isinstance(self.think, str):
            return {"reasoning_effort": self.think}
        if self.think is False:
            return {"reasoning_effort": "none"}
        return {"chat_template_kwargs": {"enable_thinking": True}} if self.think else {}


class CalledFunction(NullableFields):
    """`tool_calls[].function`: its arguments are an object."""

    name: str = Field(min_length=1, max_length=256)
    arguments: dict[str, Any] = Field(default_factory=dict)
    index: Any = None


class ToolCall(NullableFields):
    """A call in an earlier turn."""

    id: str | None = Field(default=None, max_length=256)
    type: Any = None
    function: CalledFunction


class InputMessage(NullableFields):
    """A message of a chat."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: FewItems[str] = Field(default_factory=list)  # in base64
    tool_calls: FewItems[ToolCall] = Field(default_factory=list)
    tool_name: str | None = Field(default=None, max_length=256)
    tool_call_id: str | None = Field(default=None, max_length=256)


class ChatBody(GenerationFields):
    """Body of /api/chat; without messages it asks for the model to be loaded."""

    messages: Items[InputMessage] = Field(default_factory=list)
    tools: FewItems[dict[str, Any]] = Field(default_factory=list, max_length=MAX_TOOLS)

    def image_fields(self) -> Iterator[ImageField]:
        """Of all messages."""
        for index, message in enumerate(self.messages):
            yield from _image_fields(message.images, f"messages.{index}.images")

    def chat(self) -> ChatRequest:
        """The same request in OpenAI's format. Raises InvalidRequest."""
        messages = list(_chat_messages(self.messages))
        return self.chat_of(messages, tools=self.tools or None)


class GenerateBody(GenerationFields):
    """Body of /api/generate; without a prompt it asks for the model to be loaded."""

    prompt: str = ""
    suffix: str = ""
    system: str = ""
    template: str = ""
    context: Any = None
    raw: bool = False
    images: FewItems[str] = Field(default_factory=list)  # in base64
    width: Any = None
    height: Any = None
    steps: Any = None

    @property
    def is_of_model(self) -> bool:
        """Whether nothing is to be generated."""
        return not self.prompt and not self.suffix

    def image_fields(self) -> Iterator[ImageField]:
        """Of the prompt."""
        return _image_fields(self.images, "images")

    def chat(self) -> ChatRequest:
        """The prompt as a user's message. Raises InvalidRequest."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        content = _with_images(self.prompt, self.images)
        return self.chat_of([*system, {"role": "user", "content": content}])

    def completion(self, stop_token_ids: tuple[int, ...] = ()) -> CompletionRequest:
        """The sampling as OpenAI's completions have it, of no prompt. Raises InvalidRequest."""
        fields = {
            "prompt": "",
            "max_tokens": self.options.max_tokens or UNBOUNDED,
            "logprobs": self.num_logprobs,
            "stop_token_ids": list(stop_token_ids) or None,
            **self.common_fields(),
        }
        given = {name: value for name, value in fields.items() if value is not None}
        return completion_request(given, _NAMES)

    def refuse_what_is_not_there(self) -> None:
        """Raises InvalidRequest."""
        if self.images and (self.raw or self.suffix):
            raise InvalidRequest.of("images", "...", "left out with raw or suffix")
        if self.template:
            raise InvalidRequest.of("template", "...", "left out: the model's own is used; see raw")
        if self.context:
            allowed = "left out: /api/chat takes the messages of a conversation"
            raise InvalidRequest.of("context", "...", allowed)


def _chat_messages(messages: list[InputMessage]) -> Iterator[dict[str, Any]]:
    """As chats have them. A result belongs to the open call that it names, else to the first."""
    open_calls: list[tuple[str, str]] = []  # id and name
    num_calls = 0
    for message in messages:
        if message.role == "tool":
            call_id = message.tool_call_id or _id_of(open_calls, message.tool_name)
            open_calls = [call for call in open_calls if call[0] != call_id]
            yield _result(message, call_id)
            continue
        content = _with_images(message.content, message.images)
        said: dict[str, Any] = {"role": message.role, "content": content}
        if message.thinking is not None:
            said["reasoning_content"] = message.thinking
        if message.tool_calls:
            open_calls = []
            for call in message.tool_calls:
                open_calls.append((call.id or f"call_{num_calls}", call.function.name))
                num_calls += 1
            said["content"] = content or None
            said["tool_calls"] = [
                _call(call, call_id) for call, (call_id, _) in zip(message.tool_calls, open_calls)
            ]
        yield said


def _image_fields(images: Sequence[str], field: str) -> Iterator[ImageField]:
    if images:
        yield field, f"{len(images)} of them"


def _with_images(text: str, images: Sequence[str]) -> str | list[dict[str, Any]]:
    """A chat's content: the images, then the text."""
    if not images:
        return text
    urls = ({"url": f"data:image/*;base64,{data}"} for data in images)
    parts = [{"type": "image_url", "image_url": url} for url in urls]
    return [*parts, {"type": "text", "text": text}]


def _id_of(open_calls: list[tuple[str, str]], name: str | None) -> str:
    """Of the call that a result without an id belongs to."""
    named = [call_id for call_id, called in open_calls if called == name]
    return next(iter([*named, *(call_id for call_id, _ in open_calls)]), "call")


def _result(message: InputMessage, call_id: str) -> dict[str, Any]:
    content = _with_images(message.content, message.images)
    result = {"role": "tool", "tool_call_id": call_id, "content": content}
    return result if message.tool_name is None else {**result, "name": message.tool_name}


def _call(call: ToolCall, call_id: str) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": json.dumps(call.function.arguments)}
    return {"id": call_id, "type": "function", "function": function}
