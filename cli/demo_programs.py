"""The programs that `stemma demo` runs, with the small world they are about.

They use the public DSL only; the prompts are those that the embedded model was trained on
(examples/tiny_model/README.md).
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

from ..frontend.dsl.expr import assistant, assistant_begin, assistant_end, system, user
from ..frontend.dsl.function import function
from ..frontend.dsl.generation import gen
from ..frontend.dsl.state import ProgramState
from ..frontend.dsl.tool import tool
from ..frontend.dsl.tool_loop import tool_loop

AGENT_SYSTEM = """\
Answer the question with the help of two tools.
calculator[expression] computes, for example calculator[12*7].
lookup[subject] finds a fact, for example lookup[capital of France].
Write a Thought, then an Action, and wait for the Observation. When you know the result, write the Answer.
Example:
Question: What is 12 times 7?
Thought: I need to multiply 12 by 7.
Action: calculator[12*7]
Observation: 84
Thought: I know the answer.
Answer: 84"""  # noqa: E501 (the very text that the model was trained on)

FACTS = {
    "capital of Portugal": "Lisbon",
    "population of Velmora": "48200",
    "population of Tarnby": "31750",
    "height of Mount Kiro": "2914",
    "author of The Glass Harbor": "Mira Solane",
}

QUESTIONS = (
    ("What is 48 * 17?", "816"),
    ("What is the capital of Portugal?", "Lisbon"),
    ("What is the population of Velmora?", "48200"),
    ("Who wrote The Glass Harbor?", "Mira Solane"),
    ("How many more people live in Velmora than in Tarnby?", "16450"),
    ("What is twice the height of Mount Kiro?", "5828"),
)

TEXTS = (
    ("person", "name, age, city", "Anna Berg is 34 years old. She lives in Lisbon."),
    ("person", "name, job, city", "Tomas Velik works as a nurse. He lives in Prague."),
    ("person", "name, age, hobby", "Mira Solane is 52 years old. She likes chess."),
    ("order", "customer, item, quantity", "Paul Dorn ordered 3 lamps."),
    ("order", "customer, item, quantity, city", "Lena Fisk from Oslo bought 12 x chair."),
    ("order", "customer, item, price", "Omar Haddad bought a desk for 149.50 dollars."),
    ("event", "event, city, date", "The Winter Fair takes place in Bergen on 12 May 2024."),
    ("event", "event, city, time", "The Book Club meets in Porto at 18:30."),
    ("person", "name, company, city", "Ivo Kral works for Nordwind. He lives in Vienna."),
    ("event", "event, host, date", "The Jazz Night is hosted by Ella Moor on 3 June 2025."),
)

CHAT = (
    ("Hi, my name is Nora.", "Nora"),
    ("I live in Bergen.", "Bergen"),
    ("My lucky number is 42.", "42"),
    ("What is my name?", "Nora"),
    ("Where do I live?", "Bergen"),
)

FORK_TEXT = "Clara Voss is 41 years old. She works as a pilot. She lives in Geneva and likes chess."
FORK_FIELDS = ("name, age", "job, city", "name, hobby")

TOOL_QUESTIONS = (
    ("What is the weather in Lisbon?", "sunny, 24 degrees"),
    ("What is 48 times 17?", "816"),
    ("How do you say good morning in French?", "bonjour"),
)

NUMBERS = ("age", "quantity", "price", "guests")  # which the model writes without quotes

_ACTION = re.compile(r"Action: (calculator|lookup)\[(.*)\]\s*$")
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> str:
    """The value of an arithmetic expression, or "error"."""
    try:
        rounded = round(_value(ast.parse(expression, mode="eval").body), 4)
        return str(int(rounded)) if rounded == int(rounded) else str(rounded)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError):
        return "error"


def _value(node: ast.AST) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return float(_OPERATORS[type(op)](_value(left), _value(right)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
    raise ValueError("only numbers and + - * /")


def use_tool(name: str, argument: str) -> str:
    """What the agent observes."""
    return calculate(argument) if name == "calculator" else FACTS.get(argument, "not found")


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return {"Lisbon": "sunny, 24 degrees"}.get(city, "unknown")


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


@tool
def translate(text: str, language: str) -> str:
    """Translate a text."""
    return {("good morning", "French"): "bonjour"}.get((text, language), "unknown")


@function
def assistant_with_tools(s: ProgramState, question: str) -> None:
    """The model calls Python functions by its own choice, and answers from what they return."""
    s += user(question)
    tool_loop([get_weather, multiply, translate], max_turns=3, temperature=0)(s)


@function
def agent(s: ProgramState, question: str, max_steps: int = 6) -> None:
    """A ReAct agent: think, act, observe, until there is an answer."""
    s += system(AGENT_SYSTEM) + user(question) + assistant_begin()
    step = ""
    for number in range(max_steps):
        name = f"step{number}"
        s += gen(name, max_tokens=96, stop="\nObservation:", temperature=0)
        step = s[name]
        action = _ACTION.search(step)
        if action is None:
            break
        s += f"\nObservation: {use_tool(*action.groups())}\n"
    s += assistant_end()
    s["answer"] = step.rpartition("Answer:")[2].strip()


def schema_of(fields: str) -> dict[str, Any]:
    """Of an object with these fields in this order, each a text, a number, or null."""
    return {
        "type": "object",
        "properties": {
            name: {"type": ["number" if name in NUMBERS else "string", "null"]}
            for name in fields.split(", ")
        },
        "required": fields.split(", "),
        "additionalProperties": False,
    }


@function
def extract(s: ProgramState, kind: str, fields: str, text: str) -> None:
    """A text becomes a JSON object."""
    s += user(f"Text: {text}\nExtract {fields} as JSON.")
    s += assistant(gen("json", max_tokens=96, temperature=0, json_schema=schema_of(fields)))


@function
def chat(s: ProgramState, messages: tuple[str, ...]) -> None:
    """A conversation of several turns."""
    for number, message in enumerate(messages):
        s += user(message)
        s += assistant(gen(f"reply{number}", max_tokens=64, temperature=0))


@function
def fork_join(s: ProgramState, text: str, field_sets: tuple[str, ...]) -> None:
    """Several extractions of one text, side by side; the text is computed once."""
    s += user(f"Text: {text}\nExtract the person as JSON.")
    s += assistant(gen("whole", max_tokens=96, temperature=0))
    forks = s.fork(len(field_sets))
    for fork, fields in zip(forks, field_sets, strict=True):
        fork += user(f"Now extract {fields} as JSON.")
        fork += assistant(gen("part", max_tokens=64, temperature=0, json_schema=schema_of(fields)))
    forks.join()
