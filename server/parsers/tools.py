"""Function calling over HTTP: how `tools` and `tool_choice` constrain an output and who parses it.

"required" and a named function constrain the whole output to a call, in the model's own format or
as plain JSON; "auto" leaves the text free until a call begins in the model's own format, if its
chat template supports tools. Where that template has no mark of a known format, "auto" reads no
calls and says so in the response's warnings, and calls that must come, or must be strict, are
refused.
Schemas are enforced strictly where a function that may be called is `strict`, else leniently: each
part that cannot be enforced becomes a warning of the response, and a call has listed parameters
alone, if its schema does not say what others may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import BaseModel, Field

from ...errors import InvalidProgram, InvalidRequest
from ...frontend.chat_format.call_beginnings import CallBeginnings
from ...frontend.chat_format.call_grammar import calls_constraint, forced_constraint, tools_text
from ...frontend.chat_format.call_reader import CallReader, ContentReader, NamedReader, Reader
from ...frontend.chat_format.chat_format import UNKNOWN_FORMAT, ChatFormat
from ...frontend.chat_format.contents import document, one_of
from ...frontend.chat_format.hermes import Hermes
from ...frontend.chat_format.named_object import Forced
from ...frontend.chat_format.reasoning import ReasoningTags
from ...frontend.chat_format.tool_format import OfferedFunction, TaughtFormat
from ...frontend.protocol.constraint import Constraint, constraint_of
from ...frontend.protocol.schema_words import require_schema
from ..protocol.constraint_words import ConstraintWords
from ..protocol.known_fields import Items

FUNCTION_NAME = r"^[a-zA-Z0-9_-]{1,64}$"
MAX_TOOLS = 256  # guess: OpenAI allows 128
# Keywords by which an object may have properties that `properties` does not list.
_OTHERS = frozenset(
    ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames",
     "minProperties", "$ref", "allOf", "anyOf", "oneOf", "not", "if",
     "dependentSchemas", "dependentRequired")
)  # fmt: skip


class ToolFunction(BaseModel):
    """A function that the model may call; `parameters` is the schema of its arguments."""

    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # true: what of the schema cannot be enforced is refused

    @property
    def schema_(self) -> dict[str, Any]:
        """The schema of the arguments; without parameters, an empty object."""
        nothing = {"type": "object", "properties": {}, "additionalProperties": False}
        return self.parameters or nothing

    @property
    def enforced_schema(self) -> dict[str, Any]:
        """The same as calls are held to: as given where `strict`, else closed, where the object's
        own words list its properties and leave others open."""
        schema = self.schema_
        listed, required = schema.get("properties"), schema.get("required", [])
        if self.strict or not isinstance(listed, dict) or schema.keys() & _OTHERS:
            return schema
        is_whole = isinstance(required, list) and all(name in listed for name in required)
        return {**schema, "additionalProperties": False} if is_whole else schema


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


class AllowedTools(BaseModel):
    """`tool_choice.allowed_tools`."""

    mode: Literal["auto", "required"]
    tools: Items[NamedChoice] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedChoice(BaseModel):
    """`tool_choice` that leaves out some of the tools: these are told of, but not to be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedChoice | AllowedChoice


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How the tools of one request are used. Raises InvalidRequest for an unknown name.

    `own`: the client's constraint of the output, which is no call then unless one is forced, or the
    constraint is to a JSON document, in whose place a call may come; `is_parallel`: several calls
    may come.
    """

    tools: Sequence[Tool]
    choice: ToolChoice
    chat_format: ChatFormat
    is_parallel: bool = True
    own: Constraint | None = None

    def __post_init__(self) -> None:
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise InvalidRequest.of("tools", names, "functions with different names")
        for index, tool in enumerate(self.tools):
            _require_schema(index, tool.function)
        for name in self._chosen_names:
            if name not in names:
                raise InvalidRequest.of("tool_choice", name, f"one of {names}")
        if self._mode == "required" and not names:
            raise InvalidRequest.of("tool_choice", "required", "only together with tools")
        if self._needs_format and self.chat_format.is_unknown:
            raise InvalidRequest(f"tools: {UNKNOWN_FORMAT}; {_REMEDY}", "tools")

    @property
    def is_forced(self) -> bool:
        """Whether the whole output is a call."""
        return self._mode == "required" or isinstance(self.choice, NamedChoice)

    @property
    def may_call(self) -> bool:
        """Whether the output is parsed for calls."""
        return self.is_forced or self._may_choose_to_call

    @property
    def for_template(self) -> str | None:
        """The tools as JSON, for a chat template that supports them. Raises InvalidRequest."""
        if not self._is_told or self.choice == "none":
            return None
        return tools_text([_told(tool) for tool in self.tools])

    @property
    def warnings(self) -> tuple[str, ...]:
        """Where the tools behave otherwise than the client may expect."""
        if self._mode != "auto" or not self.tools or self._may_choose_to_call:
            return ()
        if self._excludes_calls:
            what = "the output is what the request's own constraint says, and so never a call"
        elif not self.chat_format.knows_tools:
            what = "the model was not told of them: its chat template does not know tools"
        else:
            what = "calls are not read from the output: their format is not known"
            what += f" ({_REMEDY})" if self.chat_format.is_unknown else ""
        return (f"tools: {what}",)

    def reader(self) -> Reader:
        """A parser for one output."""
        taught, schemas = self.chat_format.tool_format, self._schemas
        own = self._forced_format
        if isinstance(self.choice, NamedChoice) and own is None:
            return NamedReader(self.choice.function.name)
        if self.is_forced and own is None:
            return CallReader(Forced(taught or Hermes()))
        if taught is None or (not self.may_call and not self.has_wrappings):
            return ContentReader()
        return CallReader(taught, schemas, wrapping=taught, may_call=self.may_call)

    @property
    def beginnings(self) -> CallBeginnings | None:
        """The calls that end reasoning; none where a call that must come follows it."""
        taught = self.chat_format.tool_format
        if taught is None or not self._may_choose_to_call:
            return None
        return CallBeginnings(taught, self._schemas)

    @property
    def has_wrappings(self) -> bool:
        """Whether the model's format has marks around plain answers."""
        taught = self.chat_format.tool_format
        return taught is not None and bool(taught.wrappings or taught.opening)

    def new_id(self) -> str:
        """A new call's id."""
        return (self.chat_format.tool_format or Hermes()).new_id()

    def constraint(self, reasoning: ReasoningTags | None = None) -> Constraint | None:
        """The output's constraint; `reasoning`: if open, it applies after the end of this.

        Raises InvalidRequest that names `tools`.
        """
        try:
            return self._constraint(reasoning)
        except InvalidProgram as error:
            raise InvalidRequest(f"tools: {error}", "tools") from error

    def document_or_call(self, reasoning: ReasoningTags | None = None) -> Constraint | None:
        """The client's own constraint, where a call may come in place of its document; else None.
        What of either's schemas cannot be enforced is refused where the client's is strict and a
        function that may be called is. Raises InvalidRequest that names `tools`."""
        own, taught = self.own, self.chat_format.tool_format
        if own is None or not self._may_choose_to_call:
            return None
        functions = _offered(self._allowed)
        try:
            if self.chat_format.channels is not None:
                found = self.chat_format.channels.in_final(own, functions)
            else:
                assert taught is not None, "calls may come"
                content = one_of([document(own.schema), taught.forced(functions)])
                behind = None if reasoning is None else (reasoning.end, reasoning.gap)
                found = forced_constraint(content, behind=behind)
        except InvalidProgram as error:
            raise InvalidRequest(f"tools: {error}", "tools") from error
        assert found is not None, "a document is asked for"
        is_lenient = own.is_lenient or self._is_lenient
        return replace(own, kind="structural_tag", source=found.source, is_lenient=is_lenient)

    def words(self, constraint: Constraint) -> ConstraintWords:
        """In which the client is told of `constraint`, which is this one's."""
        return ConstraintWords(constraint, self._named_schemas, '`"strict": false` in each tool')

    def _named_schemas(self) -> Sequence[tuple[str, object]]:
        functions = [(_name(i, tool.function), tool.function) for i, tool in enumerate(self.tools)]
        return [
            (name, schema)
            for name, function in functions
            for schema in (function.enforced_schema, _arguments(function))
        ]

    def _constraint(self, reasoning: ReasoningTags | None) -> Constraint | None:
        functions, is_lenient = self._allowed, self._is_lenient
        channels, own = self.chat_format.channels, self._forced_format
        if channels is not None and self.may_call:
            return channels.calls_constraint(
                _offered(functions), is_forced=self.is_forced, is_lenient=is_lenient
            )
        if own is not None:
            behind = None if reasoning is None else (reasoning.end, reasoning.gap)
            content = own.forced(_offered(functions))
            return forced_constraint(content, behind=behind, is_lenient=is_lenient)
        if isinstance(self.choice, NamedChoice):
            schema: object = functions[0].enforced_schema
        elif self.is_forced:
            schema = {"anyOf": [_call_schema(function) for function in functions]}
        else:
            return self._tags(functions, is_lenient)
        constraint = constraint_of(json_schema=schema, lenient=is_lenient)
        return constraint if reasoning is None else behind_reasoning(reasoning, constraint)

    def _tags(self, functions: Sequence[ToolFunction], is_lenient: bool) -> Constraint | None:
        taught = self.chat_format.tool_format
        if taught is None or not self._may_choose_to_call:
            return None
        return calls_constraint(
            taught, _offered(functions), is_lenient=is_lenient, is_parallel=self.is_parallel
        )

    @property
    def _forced_format(self) -> TaughtFormat | None:
        """The format in which a forced call is written; None: plain JSON, or none is forced."""
        taught = self.chat_format.tool_format
        if taught is None or taught.is_forced_as_json or not self.is_forced:
            return None
        return taught if self.chat_format.knows_tools else None

    @property
    def _schemas(self) -> dict[str, object]:
        return {tool.function.name: tool.function.schema_ for tool in self.tools}

    @property
    def _needs_format(self) -> bool:
        """Whether calls must come, or must be strict where they do."""
        return self.is_forced or (
            self._mode == "auto"
            and self.own is None
            and any(function.strict for function in self._allowed)
        )

    @property
    def _mode(self) -> str:
        """none, auto, required or function."""
        if isinstance(self.choice, AllowedChoice):
            return self.choice.allowed_tools.mode
        return self.choice if isinstance(self.choice, str) else "function"

    @property
    def _chosen_names(self) -> Sequence[str]:
        if isinstance(self.choice, NamedChoice):
            return [self.choice.function.name]
        if isinstance(self.choice, AllowedChoice):
            return [tool.function.name for tool in self.choice.allowed_tools.tools]
        return []

    @property
    def _is_lenient(self) -> bool:
        return not any(function.strict for function in self._allowed)

    @property
    def _allowed(self) -> Sequence[ToolFunction]:
        """The functions that may be called."""
        functions = [tool.function for tool in self.tools]
        names = self._chosen_names
        return [f for f in functions if f.name in names] if names else functions

    @property
    def _may_choose_to_call(self) -> bool:
        chat_format = self.chat_format
        is_known = chat_format.tool_format is not None or chat_format.channels is not None
        has_format = self._is_told and is_known
        return self._mode == "auto" and has_format and not self._excludes_calls

    @property
    def _excludes_calls(self) -> bool:
        """Whether the client's own constraint has no place for a call by choice."""
        return self.own is not None and not self.own.is_document

    @property
    def _is_told(self) -> bool:
        return bool(self.tools) and self.chat_format.knows_tools


_REMEDY = "stemma serve --tool-call-parser names the format, or none to have calls as plain JSON"


def _told(tool: Tool) -> dict[str, Any]:
    """A tool for a template: many fail over one that leaves its parameters out."""
    function = tool.function.model_dump(exclude_none=True)
    if tool.function.parameters is None:
        function["parameters"] = {"type": "object", "properties": {}}
    return {"type": tool.type, "function": function}


def _offered(functions: Sequence[ToolFunction]) -> list[OfferedFunction]:
    return [OfferedFunction(function.name, function.enforced_schema) for function in functions]


def _require_schema(index: int, function: ToolFunction) -> None:
    """Raises InvalidRequest for parameters that are an example."""
    try:
        require_schema(function.parameters or {}, "parameters")
    except InvalidProgram as error:
        raise InvalidRequest(f"{_name(index, function)}: {error}", "tools") from error


def _name(index: int, function: ToolFunction) -> str:
    """Of a function in messages."""
    return f"tools[{index}] ({function.name})"


def behind_reasoning(tags: ReasoningTags, constraint: Constraint | None) -> Constraint | None:
    """Free text up to the end of the reasoning, then `constraint`, if that is JSON; else None,
    unless it is a structural tag already."""
    if constraint is None or constraint.kind == "structural_tag":
        return constraint
    if not constraint.is_document:
        return None
    found = forced_constraint(document(constraint.schema), behind=(tags.end, tags.gap))
    return replace(constraint, kind="structural_tag", source=found.source)


def _call_schema(function: ToolFunction) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "arguments": _arguments(function)},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _arguments(function: ToolFunction) -> dict[str, Any]:
    """Their schema as a resource of its own: its pointers start at its own root."""
    return {"$id": f"urn:stemma:tool:{function.name}", **function.enforced_schema}
