"""A whole output as the message that it is: reasoning, content and calls."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from .call_beginnings import CallBeginnings
from .call_reader import Arguments, CallBegun, CallReader, Content, Event, Reasoning
from .chat_format import ChatFormat
from .harmony import Harmony
from .reasoning import ReasoningSplitter


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model asks for. `arguments`: JSON text as it was written, which may be cut
    off."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ReadMessage:
    """What an output was read as. `content`: the text besides reasoning and calls."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""


def read_message(
    text: str,
    chat_format: ChatFormat,
    schemas: Mapping[str, object] | None = None,
    *,
    after_tool: bool = False,
) -> ReadMessage:
    """Read an output of a model with this format. `schemas`: of functions' arguments;
    `after_tool`: it follows a tool's result."""
    if chat_format.channels is not None:
        return _read_channels(text, chat_format.channels, schemas or ())
    reasoning, tags, taught = "", chat_format.reasoning, chat_format.tool_format
    beginnings = None if taught is None else CallBeginnings(taught, schemas or ())
    is_interrupted = False
    if tags is not None:
        starts_inside = chat_format.opens_reasoning({}, after_tool=after_tool)
        splitter = ReasoningSplitter(tags, starts_inside=starts_inside, calls=beginnings)
        fed, last = splitter.feed(text), splitter.finish()
        reasoning, text = fed.reasoning + last.reasoning, fed.content + last.content
        is_interrupted = splitter.is_interrupted
    if taught is None:
        return ReadMessage(text, reasoning=reasoning)
    reader = CallReader(taught, schemas, wrapping=taught)
    if tags is not None and is_interrupted:
        reader.leave_out(tags.end)
    events = (*reader.feed(text), *reader.finish())
    content, calls = gathered(events)
    ids = [event.id or taught.new_id() for event in events if isinstance(event, CallBegun)]
    named = tuple(ToolCall(id_, *call) for id_, call in zip(ids, calls, strict=True))
    return ReadMessage(content, named, reasoning)


def _read_channels(text: str, channels: Harmony, functions: Container[str]) -> ReadMessage:
    reader = channels.reader(functions, may_call=True)
    events = (*reader.feed(text), *reader.finish())
    content, calls = gathered(events)
    named = tuple(ToolCall(channels.new_id(), name, arguments) for name, arguments in calls)
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    return ReadMessage(content, named, reasoning)


def gathered(events: Iterable[Event]) -> tuple[str, list[tuple[str, str]]]:
    """The content of a reader's events, and calls as pairs of name and arguments."""
    content, calls = "", list[tuple[str, str]]()
    for event in events:
        match event:
            case Content():
                content += event.text
            case CallBegun():
                calls.append((event.name, ""))
            case Arguments():
                name, arguments = calls[-1]
                calls[-1] = name, arguments + event.text
    return content, calls
