"""Calls within reasoning whose closing tag was forgotten."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from stemma.frontend.chat_format.call_beginnings import CallBeginnings
from stemma.frontend.chat_format.chat_format import ChatFormat
from stemma.frontend.chat_format.reading import read_message
from stemma.frontend.chat_format.reasoning import ReasoningTags
from stemma.frontend.chat_format.registry import FORMATS, format_of
from stemma.server.parsers.output_reader import OutputReader, ReasoningUse
from stemma.server.parsers.tools import Tool, ToolChoice, ToolUse
from stemma.server.protocol.pieces import Outcome

THINK = ReasoningTags("<think>", "</think>", end_id=9)
TOOL = Tool.model_validate({"type": "function", "function": {"name": "weather"}})
MARKED = [row for row in FORMATS if not row.make(()).begins_at_start]


def use(name: str, choice: ToolChoice = "auto") -> ToolUse:
    chat_format = ChatFormat(format_of(name, ()), THINK, knows_tools=True, knows_calls=True)
    return ToolUse([TOOL], choice, chat_format)


def read(tool_use: ToolUse, pieces: Sequence[str]) -> tuple[str, str, list[str], int]:
    """Reasoning, content, arguments of calls, and how many tokens were reasoning."""
    reader = OutputReader(tool_use, ReasoningUse(THINK, starts_inside=True))
    outcome = Outcome(0, "", {"finish_reason": "stop", "output_ids": [1, 9]})
    deltas = [delta for piece in pieces for delta in reader.feed(piece)]
    deltas += reader.finish(outcome)[0]
    said = ["".join(d.get(f, "") for d in deltas) for f in ("reasoning_content", "content")]
    calls: list[str] = []
    for part in (part for delta in deltas for part in delta.get("tool_calls", ())):
        calls += [""] if "id" in part else []
        calls[-1] += part["function"]["arguments"]
    return said[0], said[1], calls, reader.num_reasoning_tokens(outcome)


@pytest.mark.parametrize("row", MARKED, ids=[row.name for row in MARKED])
def test_a_call_ends_the_reasoning_wherever_the_output_is_cut(row: Any) -> None:
    text = f"I need it.\n{row.example}\n</think>\n\nSo."
    whole = read(use(row.name), [text])
    assert whole[0] == "I need it." and whole[1].strip() == "So."
    assert len(whole[2]) == 1 and "Ulm" in whole[2][0]
    assert read(use(row.name), text) == whole, "character by character"
    chance = random.Random(5)
    for _ in range(20):
        first, second = sorted(chance.choices(range(len(text)), k=2))
        assert read(use(row.name), [text[:first], text[first:second], text[second:]]) == whole


HERMES = '<tool_call>\n{"name": "weather", "arguments": {"at": "</think>"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "num_calls"),
    [
        (f"Hm. {HERMES}", "Hm.", "", 1),
        (f"Hm. {HERMES}{HERMES}", "Hm.", "", 2),
        (f"{HERMES}</think> So </think>", "", " So", 1),
        (f"Hm.</think>{HERMES} a </think>", "Hm.", " a </think>", 1),  # nothing was forgotten
        # what only looks like a call, or calls nothing that there is
        (f"a <tool_call> b {HERMES}", "a <tool_call> b", "", 1),
        ("I write <tool_call> and so on</think>A", "I write <tool_call> and so on", "A", 0),
        ('<tool_call>{"name": "f", "arguments": {}}</think>A',
         '<tool_call>{"name": "f", "arguments": {}}', "A", 0),
        ('<tool_call>\n{"name": "weather"</think>A', '<tool_call>\n{"name": "weather"', "A", 0),
        ("Hm. <tool_call>\n", "Hm. <tool_call>", "", 0),
    ],
)  # fmt: skip
def test_reasoning_may_speak_of_calls(
    text: str, reasoning: str, content: str, num_calls: int
) -> None:
    whole = read(use("hermes"), [text])
    assert (whole[0], whole[1], len(whole[2])) == (reasoning, content, num_calls)
    assert read(use("hermes"), text) == whole, "character by character"


def test_tokens_of_reasoning_are_not_known_where_a_call_ended_it() -> None:
    assert read(use("hermes"), [f"Hm. {HERMES}</think>"])[3] == 0
    assert read(use("hermes"), ["Hm. </think>"])[3] == 2


def test_a_call_that_must_come_follows_the_reasoning() -> None:
    """Its grammar lets it come behind the closing tag alone; what is before is no call."""
    forced = use("kimi_k2", "required")
    example = format_example("kimi_k2")
    reasoning, _, calls, _ = read(forced, [f"Like {example}</think>\n\n{example}"])
    assert reasoning == f"Like {example}" and len(calls) == 1
    assert use("hermes", "none").beginnings is None


def format_example(name: str) -> str:
    return next(row.example for row in FORMATS if row.name == name)


def test_programs_read_such_an_output_too() -> None:
    chat_format = ChatFormat(format_of("hermes", ()), THINK, knows_tools=True)
    found = read_message(f"<think>Hm. {HERMES}</think> So", chat_format, {"weather": {}})
    assert (found.reasoning, found.content, len(found.calls)) == ("Hm.", " So", 1)
    assert read_message(f"<think>Hm. {HERMES}</think> So", chat_format, {}).calls == ()


def test_many_marks_are_read_in_pieces() -> None:
    """Else each would be looked for in all that follows."""
    hermes = format_of("hermes", ())
    assert hermes is not None
    assert CallBeginnings(hermes, ["f"]).first_in("<tool_call>" * 300)[1] is False
    text = "<tool_call> " * 50_000
    assert read(use("hermes"), [text])[0] == text.rstrip()
