"""Function calling over HTTP: what `tools` and `tool_choice` ask of an output, and how it is read.

"required" and a named function constrain the whole output to a call as JSON; "auto" leaves text
free until `<tool_call>` begins one (the format of Hermes models), if the model's chat template
knows tools at all.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field

from ...errors import InvalidProgram, InvalidRequest
from ...frontend.constraint import Constraint, constraint_of

BEGIN, END = "<tool_call>", "</tool_call>"
_ARGUMENTS = '"arguments":'
_CALL = re.compile(f"{BEGIN}\\s*(.*?)\\s*{END}", re.DOTALL)


class ToolFunction(BaseModel):
    """A function that the model may call; `parameters` is the schema of its arguments."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

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
        if isinstance(self.choice, NamedChoice):
            wanted = self.choice.function.name
            (schema,) = [f.schema_ for f in functions if f.name == wanted][:1]
            return constraint_of(json_schema=schema)
        if self.choice == "required":
            calls = [_call_schema(index, f) for index, f in enumerate(functions)]
            return constraint_of(json_schema={"anyOf": calls})
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
        return constraint_of(structural_tag=tag)

    def read(self, text: str) -> tuple[str | None, list[ToolCall]]:
        """The text beside the calls, and the calls; of a call that was cut, only text."""
        if isinstance(self.choice, NamedChoice):
            return (
                (None, [ToolCall(self.choice.function.name, text)])
                if _is_json(text)
                else (text, [])
            )
        if self.choice == "required":
            return (None, [_call_of(text)]) if _is_json(text) else (text, [])
        calls = [_call_of(found[1]) for found in _CALL.finditer(text) if _is_json(found[1])]
        return (text.partition(BEGIN)[0].strip() or None if calls else text), calls

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


def _call_of(text: str) -> ToolCall:
    """The arguments as they were written: {"name":NAME,"arguments":...}, NAME without quotes."""
    name = json.loads(text)["name"]
    return ToolCall(name, text.partition(_ARGUMENTS)[2].rpartition("}")[0].strip())


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
