"""What people ask of the embedded model, as programs: extraction, agents, chat, classification.

The conversations are held-out cases of its training (examples/tiny_model/conversations.py).
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from ...frontend.dsl.expr import assistant, assistant_begin, assistant_end, system, user
from ...frontend.dsl.function import Function, function
from ...frontend.dsl.generation import gen
from ...frontend.dsl.state import ProgramState

STOP = "\nObservation:"
MAX_ACTIONS = 5
MAX_TOKENS = 160  # of a reply
# Of a reply that calls a tool: its name, and the argument.
ACTION = re.compile(r"\nAction: (calculator|lookup)\[(.*)\]$", re.DOTALL)
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Conversation:
    """`limits`: what a program sets to each reply, as arguments of `gen`; `facts`: what an agent
    may look up."""

    skill: str
    system: list[str]
    user: list[str]
    limits: list[dict[str, Any]]
    facts: dict[str, str]
    max_tokens: int = MAX_TOKENS  # of a reply

    @property
    def program(self) -> Function:
        """What carries it out: a function of `case` and `temperature`."""
        return _agent if self.skill == "react" else converse


def conversations(num_each: int | None = None) -> dict[str, list[Conversation]]:
    """By skill, at most `num_each` of each; always the same ones."""
    text = files(__package__).joinpath("data/conversations.json").read_text()
    by_skill: dict[str, list[Conversation]] = {}
    for fields in json.loads(text):
        cases = by_skill.setdefault(fields["skill"], [])
        if num_each is None or len(cases) < num_each:
            cases.append(Conversation(**fields))
    return by_skill


@dataclass(frozen=True, slots=True)
class Extraction:
    """A conversation in which JSON is asked for, and the right reply to each turn."""

    conversation: Conversation
    answers: list[str]


def extractions(num: int) -> list[Extraction]:
    """At most so many; always the same ones."""
    text = files(__package__).joinpath("data/extractions.json").read_text()
    told = json.loads(text)[:num]
    return [Extraction(answers=case.pop("answers"), conversation=Conversation(**case))
            for case in told]  # fmt: skip


def is_answer(said: str | None, answer: str | None) -> bool:
    """The same text, or JSON of the same value."""
    if said is None or answer is None or not answer.startswith(("{", "[")):
        return said == answer
    try:
        return bool(json.loads(said) == json.loads(answer))
    except ValueError:
        return False


@function
def converse(s: ProgramState, case: Conversation, temperature: float) -> None:
    for text in case.system:
        s += system(text)
    for turn, (question, limits) in enumerate(zip(case.user, case.limits, strict=True)):
        s += user(question)
        s += assistant(
            gen(f"reply{turn}", max_tokens=case.max_tokens, temperature=temperature, **limits)
        )


@function
def _agent(s: ProgramState, case: Conversation, temperature: float) -> None:
    for text in case.system:
        s += system(text)
    for turn, question in enumerate(case.user):
        s += user(question) + assistant_begin()
        for step in range(MAX_ACTIONS + 1):
            name = f"step{turn}.{step}"
            s += gen(name, max_tokens=case.max_tokens, stop=STOP, temperature=temperature)
            action = ACTION.search(s[name])
            if action is None:
                break
            s += f"{STOP} {use_tool(action[1], action[2], case.facts)}\n"
        s += assistant_end()


def use_tool(tool: str, argument: str, facts: dict[str, str]) -> str:
    """What an agent's action observes."""
    if tool == "lookup":
        return facts.get(argument, "not found")
    try:
        value = round(_value(ast.parse(argument, mode="eval").body), 4)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError):
        return "error"
    return str(int(value)) if value == int(value) else str(value)


def _value(node: ast.AST) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return float(_OPERATORS[type(op)](_value(left), _value(right)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
    raise ValueError("only numbers and + - * /")
