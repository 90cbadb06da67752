"""Bodies of Anthropic's Messages API, and their conversion to OpenAI's chat format.

`openai/chat.py` handles what the two APIs share; this file only renames fields. What Anthropic runs
on its own machines (server tools, containers, files) is refused, as are parts that are neither text
nor images.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ....errors import InvalidRequest
from ....frontend.protocol.schema_words import require_schema
from ...parsers.tools import FUNCTION_NAME
from ...protocol.hint_envelope import HintEnvelope
from ...protocol.known_fields import FewItems, Items
from ..openai.chat import ChatRequest, chat_request
from ..openai.content_parts import ImageField

_LENIENT = ConfigDict(extra="ignore", strict=True)
_SAME = ("stream", "temperature", "top_k", "top_p", "min_p", "seed", "ignore_eos", "priority",
         "cache_salt", "deadline_s", "kv_hints")  # fmt: skip
_NAMES = {"response_format": "output_config.format", "lenient": ""}
_OPENAI_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class TextBlock(BaseModel):
    """A block of text."""

    model_config = _LENIENT
    type: Literal["text"]
    text: str


class ThinkingBlock(BaseModel):
    """What the model thought in an earlier turn."""

    model_config = _LENIENT
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(BaseModel):
    """A call in an earlier turn."""

    model_config = _LENIENT
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ImageSource(BaseModel):
    """Where an image is: its bytes in base64, or a URL."""

    model_config = _LENIENT
    type: Literal["base64", "url"]
    media_type: str = "image/png"
    data: str | None = None
    url: str | None = None


class ImageBlock(BaseModel):
    """An image in a user's turn."""

    model_config = _LENIENT
    type: Literal["image"]
    source: ImageSource


ResultBlock = Annotated[TextBlock | ImageBlock, Field(discriminator="type")]


class ToolResultBlock(BaseModel):
    """What a call came to."""

    model_config = _LENIENT
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | FewItems[ResultBlock] = ""
    is_error: bool = False


Block = Annotated[
    TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class InputMessage(BaseModel):
    """A turn: results of tools may lead a user's, calls of them may end the assistant's."""

    model_config = _LENIENT
    role: Literal["user", "assistant"]
    content: str | FewItems[Block]


def _schema(given: dict[str, Any]) -> dict[str, Any]:
    require_schema(given, "input_schema")
    return given


class CustomTool(BaseModel):
    """A tool that the client runs."""

    model_config = _LENIENT
    type: Literal["custom"] | None = None
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    input_schema: Annotated[dict[str, Any], AfterValidator(_schema)]
    strict: bool | None = None


class ToolChoice(BaseModel):
    """`tool_choice`."""

    model_config = _LENIENT
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(BaseModel):
    """`thinking`; the template is told only whether there is to be any."""

    model_config = _LENIENT
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None


class JsonFormat(BaseModel):
    """`output_config.format`."""

    model_config = _LENIENT
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    """`output_config`."""

    model_config = _LENIENT
    format: JsonFormat | None = None
    effort: str | None = None


class PromptFields(BaseModel):
    """What decides the prompt: all that counting its tokens needs."""

    model_config = _LENIENT

    model: str | None = None
    messages: Items[InputMessage] = Field(min_length=1)
    system: str | FewItems[TextBlock] | None = None
    tools: FewItems[CustomTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def image_fields(self) -> Iterator[ImageField]:
        """Of all messages, and of results of tools."""
        for index, message in enumerate(self.messages):
            yield from _image_fields(message.content, f"messages.{index}.content")

    def prompt_chat(self) -> ChatRequest:
        """A chat with this prompt. Raises InvalidRequest."""
        return chat_request({k: v for k, v in chat_fields(self).items() if v is not None}, _NAMES)


class MessagesRequest(PromptFields):
    """Body of /v1/messages; `seed`, `min_p`, `kv_hints` and the like are extras of this server."""

    max_tokens: int = Field(ge=1)
    stop_sequences: FewItems[Annotated[str, Field(min_length=1)]] | None = None
    stream: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    deadline_s: float | None = None
    kv_hints: HintEnvelope | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    container: Any = None
    mcp_servers: Any = None

    def chat(self) -> ChatRequest:
        """The same request in OpenAI's format. Raises InvalidRequest that names a field of ours."""
        for name in ("container", "mcp_servers"):
            if getattr(self, name):
                raise InvalidRequest.of(name, "...", "left out: nothing runs on this server")
        given = {
            **chat_fields(self),
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            **{name: getattr(self, name) for name in _SAME},
        }
        given = {name: value for name, value in given.items() if value is not None}
        return chat_request(given, _NAMES)


def chat_fields(body: PromptFields) -> dict[str, Any]:
    """The fields of an OpenAI chat that decide its prompt and the form of its output."""
    fields: dict[str, Any] = {"model": body.model, "messages": _messages(body)}
    if body.tools:
        fields["tools"] = [_tool(tool) for tool in body.tools]
    if body.tool_choice is not None:
        fields["tool_choice"] = _choice(body.tool_choice)
        if body.tool_choice.disable_parallel_tool_use:
            fields["parallel_tool_calls"] = False
    if body.thinking is not None:
        is_on = body.thinking.type != "disabled"
        fields["chat_template_kwargs"] = {"enable_thinking": is_on}
    if body.output_config is not None and body.output_config.format is not None:
        schema = {"name": "output", "schema": body.output_config.format.schema_, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def _image_fields(content: str | Sequence[Any], field: str) -> Iterator[ImageField]:
    for index, block in enumerate(() if isinstance(content, str) else content):
        if isinstance(block, ImageBlock):
            yield f"{field}.{index}.type", block.type
        elif isinstance(block, ToolResultBlock):
            yield from _image_fields(block.content, f"{field}.{index}.content")


def _messages(body: PromptFields) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system)})
    for message in body.messages:
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "user":
            messages += _user_messages(message.content)
        else:
            messages.append(_assistant_message(message.content))
    return messages


def _user_messages(blocks: list[Any]) -> list[dict[str, Any]]:
    """Each tool result becomes a message of its own, before the user's text."""
    results = [block for block in blocks if isinstance(block, ToolResultBlock)]
    said = [block for block in blocks if isinstance(block, TextBlock | ImageBlock)]
    if len(results) + len(said) < len(blocks):
        allowed = "text, image and tool_result"
        raise InvalidRequest(f"messages: a user's blocks are {allowed}", "messages")
    messages = [
        {"role": "tool", "tool_call_id": result.tool_use_id, "content": _result_content(result)}
        for result in results
    ]
    if said:
        messages.append({"role": "user", "content": _content(said)})
    return messages


def _assistant_message(blocks: list[Any]) -> dict[str, Any]:
    texts = [block for block in blocks if isinstance(block, TextBlock)]
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    if len(texts) + len(calls) + len(thoughts) < len(blocks):
        refused = "messages: image and tool_result belong to the user's turns"
        raise InvalidRequest(refused, "messages")
    message: dict[str, Any] = {"role": "assistant", "content": _text(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.input)},
            }
            for call in calls
        ]
    return message


def _result_content(result: ToolResultBlock) -> str | list[dict[str, Any]]:
    content = _content(result.content)
    if not result.is_error:
        return content
    if isinstance(content, str):
        return f"Error: {content}"
    return [{"type": "text", "text": "Error: "}, *content]


def _content(said: str | list[Any]) -> str | list[dict[str, Any]]:
    """One text, or a list of parts if there are images among the blocks."""
    if isinstance(said, str) or not any(isinstance(block, ImageBlock) for block in said):
        return _text(said)
    return [_part(block) for block in said]


def _part(block: TextBlock | ImageBlock) -> dict[str, Any]:
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    source = block.source
    url = source.url if source.type == "url" else f"data:{source.media_type};base64,{source.data}"
    if (source.url if source.type == "url" else source.data) is None:
        raise InvalidRequest(f"messages: an image's source without {source.type}", "messages")
    return {"type": "image_url", "image_url": {"url": url}}


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _tool(tool: CustomTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice) -> Any:
    if choice.type != "tool":
        return _OPENAI_CHOICES[choice.type]
    if choice.name is None:
        raise InvalidRequest("tool_choice.name: needed where a tool is chosen", "tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}
