"""Bodies of OpenAI's Responses API, and their conversion to a chat request.

What runs on OpenAI's own machines (hosted tools, conversations, files, background work) is refused,
as are parts that are neither text nor images.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ....errors import InvalidRequest
from ...protocol.hint_envelope import HintEnvelope
from ...protocol.known_fields import Entries, FewItems, Items
from ..openai.chat import ChatRequest, chat_request
from ..openai.constraint_fields import SchemaObject
from ..openai.content_parts import ImageField

_LENIENT = ConfigDict(extra="ignore", strict=True)
_SAME = ("model", "stream", "temperature", "top_p", "seed", "ignore_eos", "cache_salt",
         "deadline_s", "kv_hints", "session_id", "prompt_cache_key")  # fmt: skip
_HOSTED = ("conversation", "prompt", "background")

ChatFields = dict[str, Any]  # a message as `ChatRequest.messages` takes it


class ItemPart(BaseModel):
    """A part of a message: what a user, or an earlier answer, said."""

    model_config = _LENIENT
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


class ImagePart(BaseModel):
    """An image that a user shows, or a tool's call has come to."""

    model_config = _LENIENT
    type: Literal["input_image"]
    image_url: str | None = None
    detail: str | None = None
    file_id: str | None = None


Part = Annotated[ItemPart | ImagePart, Field(discriminator="type")]


class InputItem(BaseModel):
    """A message, a call and its output, or what was thought: each is an item by itself."""

    model_config = _LENIENT
    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | FewItems[Part] | None = None
    summary: FewItems[ItemPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | FewItems[Part] | None = None


class FunctionTool(BaseModel):
    """A tool that the client runs; unlike a chat's it is flat."""

    model_config = _LENIENT
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenFunction(BaseModel):
    """`tool_choice` as an object."""

    model_config = _LENIENT
    type: Literal["function"]
    name: str


_NAMES = {"response_format": "text.format", "lenient": '`"strict": false`'}


class TextFormat(BaseModel):
    """`text.format`."""

    model_config = _LENIENT
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema_: SchemaObject = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(BaseModel):
    """`text`."""

    model_config = _LENIENT
    format: TextFormat = Field(default_factory=TextFormat)


class Reasoning(BaseModel):
    """`reasoning`."""

    model_config = _LENIENT
    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(BaseModel):
    """Body of /v1/responses."""

    model_config = _LENIENT

    model: str | None = None
    input: str | Items[InputItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    stream: bool = False
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: FewItems[str] | None = None
    tools: FewItems[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool = True
    text: TextConfig = Field(default_factory=TextConfig)
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Entries[str, str] | None = None
    user: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    deadline_s: float | None = None
    kv_hints: HintEnvelope | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None

    @property
    def has_logprobs(self) -> bool:
        """Whether its text comes with log probabilities."""
        return "message.output_text.logprobs" in (self.include or ())

    def messages(self) -> list[ChatFields]:
        """Its input as chat messages. Raises InvalidRequest."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        messages: list[ChatFields] = []
        for index, item in enumerate(self.input):
            _append(messages, item, f"input.{index}")
        return messages

    def image_fields(self) -> Iterator[ImageField]:
        """Of its input."""
        for index, item in enumerate(() if isinstance(self.input, str) else self.input):
            for name, parts in (("content", item.content), ("output", item.output)):
                for number, part in enumerate(parts if isinstance(parts, list) else ()):
                    if isinstance(part, ImagePart):
                        yield f"input.{index}.{name}.{number}.type", part.type

    def chat(self, messages: list[ChatFields]) -> ChatRequest:
        """A chat request of these messages, preceded by the instructions. Raises InvalidRequest."""
        self._refuse_hosted()
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        fields: dict[str, Any] = {
            "messages": [*system, *messages],
            "max_completion_tokens": self.max_output_tokens,
            "response_format": self._response_format(),
            **{name: getattr(self, name) for name in _SAME},
        }
        if self.has_logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if self.reasoning is not None and self.reasoning.effort is not None:
            fields["reasoning_effort"] = self.reasoning.effort
        if self.tools:
            fields["tools"] = [_tool(tool) for tool in self.tools]
            fields["parallel_tool_calls"] = self.parallel_tool_calls
        if isinstance(self.tool_choice, ChosenFunction):
            function = {"name": self.tool_choice.name}
            fields["tool_choice"] = {"type": "function", "function": function}
        elif self.tool_choice is not None:
            fields["tool_choice"] = self.tool_choice
        given = {name: value for name, value in fields.items() if value is not None}
        return chat_request(given, _NAMES)

    def echo(self) -> dict[str, Any]:
        """The request fields that a response repeats."""
        choice = self.tool_choice or "auto"
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls,
            "previous_response_id": self.previous_response_id,
            "reasoning": (self.reasoning or Reasoning()).model_dump(),
            "store": self.store,
            "temperature": self.temperature,
            "text": {"format": self.text.format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in self.tools or ()],
            "top_p": self.top_p,
            "truncation": "disabled",
            "user": self.user,
        }

    def _refuse_hosted(self) -> None:
        for name in _HOSTED:
            if getattr(self, name):
                raise InvalidRequest.of(name, "...", "left out: it is no part of this server")
        if self.truncation == "auto":
            raise InvalidRequest.of("truncation", "auto", '"disabled"')

    def _response_format(self) -> dict[str, Any]:
        wanted = self.text.format
        if wanted.type != "json_schema":
            return {"type": wanted.type, "schema": wanted.schema_}
        if wanted.schema_ is None:
            raise InvalidRequest("text.format.schema is missing", "text.format.schema")
        schema = {"name": wanted.name, "schema": wanted.schema_, "strict": wanted.strict}
        return {"type": "json_schema", "json_schema": schema}


def _append(messages: list[ChatFields], item: InputItem, field: str) -> None:
    """Append an item as a message, or as a part of the assistant's current turn."""
    if item.type == "message":
        if item.role is None or item.content is None:
            raise InvalidRequest(f"{field}: a message has role and content", field)
        if item.role != "assistant":
            messages.append({"role": item.role, "content": _content(item.content, field)})
            return
        turn = _turn(messages)
        turn["content"] = (turn["content"] or "") + _text(item.content, field)
    elif item.type == "function_call_output":
        if item.call_id is None or item.output is None:
            raise InvalidRequest(f"{field}: an output has call_id and output", field)
        content = _content(item.output, field)
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
    elif item.type == "reasoning":
        thought = _text(item.content or item.summary or [], field)
        if thought:
            turn = _turn(messages)
            turn["reasoning_content"] = turn.get("reasoning_content", "") + thought
            turn["content"] = turn["content"] or ""  # a response may have been cut before it
    else:
        if item.call_id is None or item.name is None or item.arguments is None:
            raise InvalidRequest(f"{field}: a call has call_id, name and arguments", field)
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        _turn(messages).setdefault("tool_calls", []).append(call)


def _turn(messages: list[ChatFields]) -> ChatFields:
    """The assistant's turn at the end; begun here if there is none."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _text(content: str | Sequence[ItemPart | ImagePart], field: str) -> str:
    """Of the assistant, which shows no images."""
    if isinstance(content, str):
        return content
    if any(isinstance(part, ImagePart) for part in content):
        raise InvalidRequest.of(f"{field}.content", "input_image", "text, of the assistant")
    return "".join(part.text for part in content if isinstance(part, ItemPart))


def _content(
    content: str | Sequence[ItemPart | ImagePart], field: str
) -> str | list[dict[str, Any]]:
    """One text, or a chat's parts if there are images among them."""
    if isinstance(content, str) or not any(isinstance(part, ImagePart) for part in content):
        return _text(content, field)
    return [_part(part, field) for part in content]


def _part(part: ItemPart | ImagePart, field: str) -> dict[str, Any]:
    if isinstance(part, ItemPart):
        return {"type": "text", "text": part.text}
    if part.file_id is not None:
        raise InvalidRequest.of(f"{field}.file_id", part.file_id[:100], "left out: see image_url")
    if not part.image_url:
        raise InvalidRequest(f"{field}: an input_image has an image_url", field)
    return {"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail}}


def _tool(tool: FunctionTool) -> dict[str, Any]:
    fields = tool.model_dump(exclude={"type"}, exclude_none=True)
    return {"type": "function", "function": fields}
