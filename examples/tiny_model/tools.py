"""Samples of conversations with tools: calls in Hermes' form, their results, answers from these.

    user       What is the weather in Ulm?
    assistant  <tool_call>
               {"name": "get_weather", "arguments": {"city":"Ulm"}}
               </tool_call>
    user       <tool_response>           <- as the chat template writes a message of role tool
               sunny
               </tool_response>
    assistant  The weather in Ulm is sunny.

A question needs one call, or none.
"""

import json
import random
from collections.abc import Sequence
from typing import Any

from catalogue import (
    KINDS,
    LOOKUP,
)
from chat import FACTS, OUT_OF_SCOPE, SYSTEMS, Chat
from samples import CHOICE_WEIGHT, Sample, compact
from tool_kinds import Kind, Tool, Value, ask, tool_of
from world import World, split_list

SYSTEM_TEXTS = [
    *SYSTEMS, "You are a helpful assistant with tools.", "Use the tools to answer the question.",
    "You are an agent. Call tools when you need them.", "Answer the user's questions.",
    "You are a helpful AI assistant.", "You can call tools.", "Be brief.",
]  # fmt: skip
ERRORS = """
not found,timeout,no connection,access denied,unknown name,service unavailable,invalid value,
too many requests,no result,internal error,nothing was found,not allowed,the server is down
"""
ERROR_LIST = split_list(ERRORS)
UNANSWERABLE = [
    "Write a poem about {w}.", "Write a story about a {pet}.", "Can you dance?", "Draw a {pet}.",
    "Can you sing a song?", "What is the meaning of life?", "Why is the sky blue?",
    "Explain {w} to me.", "How do plants grow?", "Open the window.", "{w} {v}", "Do you like {f}?",
    "How does a {item} work?", "Why do people like {f}?", "What does {w} mean?", "Fix my {item}.",
]  # fmt: skip
OKAY = ("ok", "done", "success", "sent", "saved")
RIVALS = [  # families that answer the same questions
    ({"calculator"}, {"add", "subtract", "multiply", "divide"}),
    ({"search"}, {"lookup"}),
]


class Conversation:
    """One conversation under way: the tools told and what is said."""

    def __init__(self, world: World, tools: Sequence[Tool]) -> None:
        self.world = world
        self.rng = world.rng
        self.sample = Sample("tools")
        self.tools = tools
        text = self.rng.choice(SYSTEM_TEXTS) if self.rng.random() < 0.5 else ""
        self.sample.system_with_tools(text, [tool.schema() for tool in tools])
        self.chat = Chat(self.sample, world, {})

    def turn(self) -> None:
        """A question and all that it takes to answer it."""
        moves = [self._one, self._chat, self._absent, self._failing]
        self.rng.choices(moves, weights=[73, 18, 4, 5])[0]()

    def forced(self) -> None:
        """The call alone, as `tool_choice` forces it: any tool's, or the arguments of one."""
        tool, question, values = self._drawn()
        arguments = compact(tool.arguments(values))
        self.sample.user(question)
        self.sample.open()
        if self.rng.random() < 0.6:
            self.sample.text('{"name":"')
            self.sample.generated(tool.name, CHOICE_WEIGHT)
            self.sample.generated(f'","arguments":{arguments}}}')
        else:
            self.sample.text("{")
            self.sample.generated(arguments.removeprefix("{"))
        self.sample.close()

    def called(self) -> None:
        """A question and its call, whose result does not come."""
        tool, question, values = self._drawn()
        self.sample.user(question)
        self.sample.open()
        self.sample.write_calls([(tool.name, tool.arguments(values))])
        self.sample.close()

    def _drawn(self) -> tuple[Tool, str, dict[str, Value]]:
        tool = self.rng.choice(self.tools)
        return (tool, *ask(self._kind(tool), self.world))

    def _kind(self, tool: Tool) -> Kind:
        """What is asked of a tool: some have other questions too."""
        share = 1.0 if tool.kind is LOOKUP else 0.15
        others = tool.kind.others
        return self.rng.choice(others) if others and self.rng.random() < share else tool.kind

    def _one(self) -> None:
        tool = self.rng.choice(self.tools)
        kind = self._kind(tool)
        question, values = ask(kind, self.world)
        self.sample.user(question)
        self._answered([(tool, kind, values)])

    def _absent(self) -> None:
        """What no tool can do."""
        self.chat.say(self.chat.fill(self.rng.choice(UNANSWERABLE)), OUT_OF_SCOPE)

    def _failing(self) -> None:
        tool, question, values = self._drawn()
        message = self.rng.choice(ERROR_LIST)
        if self.rng.random() < 0.3:
            message = f"{self.world.made_up()} {self.rng.choice(['not found', 'is unknown'])}"
        self.sample.user(question)
        text = self.rng.choice(["error: {}", "error: {}", "Error: {}", "Error: {}."])
        self.sample.call([(tool.name, tool.arguments(values))], [text.format(message)])
        self.sample.reply(f"Sorry, that did not work: {message}.")

    def _chat(self) -> None:
        """What needs no tool is answered as in the chat skill."""
        kind = self.rng.choice(["hello", "hello", "how_are_you", "thanks", "thanks", "bye", "who",
                                "can", "well", "okay", "joke", "small_talk", "tell", "tell",
                                "ask", "ask"])  # fmt: skip
        if kind == "tell":
            new = [fact for fact in FACTS if fact not in self.chat.known]
            return self.chat.tell([self.rng.choice(new)])
        if kind == "ask":
            known = list(self.chat.known) or list(FACTS)
            return self.chat.ask(self.rng.choice(known))
        self.chat.small_talk(kind)

    def _answered(self, asked: Sequence[tuple[Tool, Kind, dict[str, Value]]]) -> None:
        """The calls in one message, their results, and the answer."""
        calls = [(tool.name, tool.arguments(values)) for tool, _, values in asked]
        found = [_result(kind, values, self.world) for _, kind, values in asked]
        self.sample.call(calls, [result for result, _ in found])
        self.sample.reply(" ".join(answer for _, answer in found))


def tools_sample(world: World, max_turns: int = 3) -> Sample:
    """A conversation over one to four tools, of at most `max_turns` questions."""
    conversation = Conversation(world, _some_tools(world))
    for _ in range(world.rng.randint(1, max_turns)):
        conversation.turn()
    if not world.held_out and world.rng.random() < 0.1:
        conversation.forced()
    return conversation.sample


def tools_many_sample(world: World) -> Sample:
    """Many questions over a few tools and nothing but their calls: for training only, as which tool
    is meant and how its parameters are called is what is hard."""
    conversation = Conversation(world, _some_tools(world))
    for _ in range(world.rng.randint(4, 7)):
        conversation.called()
    return conversation.sample


def fits(kind: Kind, others: Sequence[Kind]) -> bool:
    """Whether none of `others` is for the questions of `kind`."""
    families = {other.family for other in others}
    rivals = {kind.family}
    for left, right in RIVALS:
        rivals |= right if kind.family in left else left if kind.family in right else set()
    return not families & rivals


def _some_tools(world: World) -> list[Tool]:
    rng = world.rng
    num = rng.choices([1, 2, 3, 4], weights=[28, 32, 26, 14])[0]
    tools: list[Tool] = []
    while len(tools) < num:
        kind = rng.choice(KINDS)
        tool = tool_of(kind, world)
        if fits(kind, [tool.kind for tool in tools]) and tool.name not in {t.name for t in tools}:
            tools.append(tool)
    rng.shuffle(tools)
    return tools


def _result(kind: Kind, values: dict[str, Value], world: World) -> tuple[str, str]:
    """A response of the tool, in one of several forms, and the answer that follows from it."""
    rng = world.rng
    found = kind.result(world, values)
    if found == "error":
        return found, "Sorry, that did not work."
    form = rng.random()
    answer = _answer(kind, values, found)
    if form < 0.15:
        key = rng.choice(["status", "result"] if found in OKAY else ["result", "value", "answer"])
        return _object({key: found}, rng), answer
    if found in OKAY:
        return found, answer
    return found, answer


def _answer(kind: Kind, values: dict[str, Value], found: str) -> str:
    if kind.answer:
        return kind.answer.format(**{"r": found, **values})
    return "Done." if found in OKAY else f"The result is {found}."


def _object(fields: dict[str, str], rng: random.Random) -> str:
    """JSON, numbers often as numbers, with or without blanks."""
    given: dict[str, Any] = {
        key: float(value) if "." in value else int(value)
        for key, value in fields.items()
        if value.replace(".", "", 1).isdigit() and not value.endswith("0") and rng.random() < 0.7
    }
    whole = {**fields, **given}
    return json_blanks(whole) if rng.random() < 0.6 else compact(whole)


def json_blanks(value: Any) -> str:
    """JSON as most tools write it."""
    return json.dumps(value, ensure_ascii=False)
