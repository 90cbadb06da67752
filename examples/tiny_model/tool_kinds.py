"""What a tool is here: a kind of tool, and the wording that one conversation gives it.

Names and parameters come in several wordings, so that a model has to read the tools that it is
told of. This module knows no tool.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from world import World

Value = str | int | float | bool


@dataclass(frozen=True)
class Parameter:
    """`names` are its wordings; `make` draws a value; `clause` asks for it, if it is optional."""

    key: str
    names: tuple[str, ...]
    make: Callable[[World], Value]
    kind: str = "string"
    choices: tuple[str, ...] = ()
    clause: str = ""


@dataclass(frozen=True)
class Kind:
    """A kind of tool: how it may be called and described, what is asked of it, what it answers.

    In `questions` and `answer` stand the parameters' keys, in `questions` also what `details`
    draws; `result` draws a tool's response, given the values, and {r} stands for it in `answer`.
    """

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    questions: tuple[str, ...]
    result: Callable[[World, dict[str, Value]], str]
    answer: str
    details: Callable[[World, dict[str, Value]], dict[str, str]] = lambda world, values: {}
    others: tuple["Kind", ...] = ()  # with the same schema, but other questions

    @property
    def family(self) -> str:
        """Kinds with the same family are not told of together."""
        return self.names[0]


@dataclass
class Tool:
    """A tool of one conversation: a kind with its wordings drawn."""

    name: str
    description: str
    kind: Kind
    keys: dict[str, str] = field(default_factory=dict)  # of each parameter: its name here

    def schema(self) -> dict[str, Any]:
        """The tool in OpenAI's format."""
        properties, required = {}, []
        for parameter in self.kind.parameters:
            described: dict[str, Any] = {"type": parameter.kind}
            if parameter.choices:
                described["enum"] = list(parameter.choices)
            properties[self.keys[parameter.key]] = described
            if not parameter.clause:
                required.append(self.keys[parameter.key])
        parameters = {"type": "object", "properties": properties, "required": required}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        if not self.description:
            del function["description"]
        return {"type": "function", "function": function}

    def arguments(self, values: dict[str, Value]) -> dict[str, Value]:
        """The values by their names here, in the order of the schema."""
        keys = [p.key for p in self.kind.parameters if p.key in values]
        return {self.keys[key]: values[key] for key in keys}


def tool_of(kind: Kind, world: World) -> Tool:
    """One wording of a kind."""
    rng = world.rng
    name = rng.choice(kind.names)
    keys = {p.key: rng.choice(p.names) for p in kind.parameters}
    description = "" if rng.random() < 0.08 else rng.choice(kind.descriptions)
    return Tool(name, description, kind, keys)


def ask(kind: Kind, world: World) -> tuple[str, dict[str, Value]]:
    """A question for this kind of tool, and the values that it tells."""
    rng = world.rng
    values = {p.key: p.make(world) for p in kind.parameters if not p.clause}
    question = rng.choice(kind.questions)
    for parameter in kind.parameters:
        if parameter.clause and rng.random() < 0.4:
            value = parameter.make(world)
            values[parameter.key] = value
            end = question[-1] if question[-1] in ".?" else ""
            clause = parameter.clause.format(**{parameter.key: shown(value)})
            question = f"{question.removesuffix(end)} {clause}{end}"
    told = {key: shown(value) for key, value in values.items()}
    text = question.format(**told, **kind.details(world, values))
    if rng.random() < 0.07 and question[0] != "{" and not question.startswith("I "):
        return text[:1].lower() + text[1:], values
    return text[:1].upper() + text[1:], values


def shown(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
