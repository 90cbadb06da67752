"""Function calling over HTTP: what `tools` and `tool_choice` ask of an output, and how it is read.

"required" and a named function constrain the whole output to a call as JSON; "auto" leaves text
free until `<tool_call>` begins one (the format of Hermes models), if the model's chat template
knows tools at all. Schemas are enforced strictly where a function that may be called is `strict`,
else leniently: what cannot be enforced is a warning of the answer.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field

from ....errors import InvalidProgram, InvalidRequest
from ....frontend.constraint import Constraint, constraint_of

BEGIN, END = "<tool_call>", "</tool_call>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([a-zA-Z0-9_-]{1,64})"\s*,\s*"arguments"\s*:\s*')
_TAIL = re.compile(r"\s*\}\s*")


class ToolFunction(BaseModel):
    """A function that the model may call; `parameters` is the schema of its arguments."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # true: what of the schema cannot be enforced is refused

    @property
    def schema_(self) -> dict[str, Any]:
        """Of the arguments; without parameters, an empty object."""
        nothing = {"type": "object", "properties": {}, "additionalProperties": False}
        return self.parameters or nothing


class Tool(BaseModel):
    """An item of `tools`."""

    type: Literal["function"]
    function: ToolFunction


class NamedFunction(BaseModel):
    """`tool_choice.function`."""

    name: str


class NamedChoice(BaseModel):
    """`tool_choice` as an object."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model has written; `arguments` is JSON text."""

    name: str
    arguments: str

    def as_openai(self) -> dict[str, Any]:
        """An item of `message.tool_calls`."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How the tools of one request are used. Raises InvalidRequest for a name that there is not."""

    tools: Sequence[Tool]
    choice: ToolChoice
    template_knows_tools: bool

    def __post_init__(self) -> None:
        names = [tool.function.name for tool in self.tools]
        if isinstance(self.choice, NamedChoice) and self.choice.function.name not in names:
            raise InvalidRequest.of("tool_choice", self.choice.function.name, f"one of {names}")
        if self.choice == "required" and not names:
            raise InvalidRequest.of("tool_choice", self.choice, "only together with tools")

    @property
    def is_forced(self) -> bool:
        """Whether the whole output is a call."""
        return self.choice == "required" or isinstance(self.choice, NamedChoice)

    @property
    def may_call(self) -> bool:
        """Whether the output is to be read for calls."""
        return self.is_forced or (self.choice == "auto" and self._is_told)

    @property
    def for_template(self) -> str | None:
        """The tools as JSON, for a chat template that knows them."""
        if not self._is_told or self.choice == "none":
            return None
        return json.dumps([tool.model_dump(exclude_none=True) for tool in self.tools])

    def constraint(self) -> Constraint | None:
        """What the output must be. Raises InvalidRequest that names `tools`."""
        try:
            return self._constraint()
        except InvalidProgram as error:
            raise InvalidRequest(f"tools: {error}", "tools") from error

    def _constraint(self) -> Constraint | None:
        functions = [tool.function for tool in self.tools]
        is_lenient = not any(function.strict for function in functions)
        if isinstance(self.choice, NamedChoice):
            wanted = self.choice.function.name
            function = next(f for f in functions if f.name == wanted)
            return constraint_of(json_schema=function.schema_, lenient=not function.strict)
        if self.choice == "required":
            calls = [_call_schema(index, f) for index, f in enumerate(functions)]
            return constraint_of(json_schema={"anyOf": calls}, lenient=is_lenient)
        if not self.may_call:
            return None
        structures = [
            {
                "begin": f'{BEGIN}\n{{"name": "{f.name}", "arguments": ',
                "schema": f.schema_,
                "end": f"}}\n{END}",
            }
            for f in functions
        ]
        tag = {"type": "structural_tag", "structures": structures, "triggers": [BEGIN]}
        return constraint_of(structural_tag=tag, lenient=is_lenient)

    def read(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text before, between and behind the calls, and the calls; one that was cut is text.

        With "auto", `text` may begin anywhere outside a call.
        """
        if isinstance(self.choice, NamedChoice):
            call = ToolCall(self.choice.function.name, text)
            return ("", [call]) if _json_end(text, 0) == len(text) else (text, [])
        if self.choice == "required":
            found = _call_at(text, 0)
            return ("", [found[0]]) if found is not None else (text, [])
        return _tagged_calls(text)

    @property
    def _is_told(self) -> bool:
        return bool(self.tools) and self.template_knows_tools


def _call_schema(index: int, function: ToolFunction) -> dict[str, Any]:
    """The arguments' schema is a resource of its own: its pointers count from its own root."""
    arguments = {"$id": f"urn:stemma:tool:{index}", **function.schema_}
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _tagged_calls(text: str) -> tuple[str, list[ToolCall]]:
    """What lies outside of tags that hold a call, and the calls."""
    beside, calls = "", list[ToolCall]()
    done = at = 0
    while (at := text.find(BEGIN, at)) >= 0:
        begin, at = at, at + len(BEGIN)
        found = _call_at(text, at)
        if found is not None and text.startswith(END, found[1]):
            beside += text[done:begin]
            calls.append(found[0])
            done = at = found[1] + len(END)
    return beside + text[done:], calls


def _call_at(text: str, begin: int) -> tuple[ToolCall, int] | None:
    """The call {"name":NAME,"arguments":...} that begins here, arguments as they were written, and
    where it ends with the blanks behind it; None where none is."""
    head = _HEAD.match(text, begin)
    end = None if head is None else _json_end(text, head.end())
    tail = None if end is None else _TAIL.match(text, end)
    if head is None or tail is None:
        return None
    return ToolCall(head[1], text[head.end() : end]), tail.end()


def _json_end(text: str, begin: int) -> int | None:
    """Where the JSON that begins here ends; None where none is."""
    try:
        return json.JSONDecoder().raw_decode(text, begin)[1]
    except (ValueError, RecursionError):
        return None
