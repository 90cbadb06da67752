"""Tools over HTTP: what they ask of an output, how calls are read from it and sent in a stream."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stemma.constrained.compiler import compile_grammar
from stemma.constrained.spec import GrammarSpec
from stemma.constrained.vocabulary import Vocabulary
from stemma.errors import InvalidRequest, UnsupportedSchema
from stemma.frontend.constraint import Constraint
from stemma.runtime.chat_template import ChatTemplate, Told
from stemma.runtime.server.generation.pieces import Outcome, Piece
from stemma.runtime.server.openai.chat import ChatReply
from stemma.runtime.server.openai.completions import TextReply
from stemma.runtime.server.tool_calls.tool_reader import ToolReader
from stemma.runtime.server.tool_calls.tools import (
    BEGIN,
    END,
    NamedChoice,
    Tool,
    ToolChoice,
    ToolUse,
)
from stemma.runtime.tokenizer import Tokenizer

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    Tool.model_validate({"type": "function", "function": {"name": "weather", "parameters": CITY}}),
    Tool.model_validate({"type": "function", "function": {"name": "clock"}}),
]
BYTES = Vocabulary([bytes([i]) for i in range(256)], lambda text: list(text.encode()), 256)
NAMED = NamedChoice.model_validate({"type": "function", "function": {"name": "weather"}})
CLOCK = f'{BEGIN}{{"name":"clock","arguments":{{}}}}{END}'
CUT = f'{BEGIN}\n{{"name": "weather", "argum'
CITY_CALL = ("weather", '{"city": "a {b}"}')
CALL = f'{BEGIN}\n{{"name": "weather", "arguments": {{"city": "a {{b}}"}}}}\n{END}'


def use(choice: ToolChoice, knows: bool = True) -> ToolUse:
    return ToolUse(TOOLS, choice, knows)


def events(stream: bytes) -> list[dict[str, Any]]:
    lines = stream.decode().splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line]


def test_a_forced_call_is_json_of_the_functions_and_their_arguments() -> None:
    required = use("required").constraint()
    assert required is not None and required.kind == "json_schema"
    calls = json.loads(required.source)["anyOf"]
    assert [call["properties"]["name"]["const"] for call in calls] == ["weather", "clock"]
    assert CITY.items() <= calls[0]["properties"]["arguments"].items()
    named = use(NAMED).constraint()
    assert named is not None and json.loads(named.source) == CITY


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ("required", '{"name":"clock","arguments":{"x":true}}'),
        (NAMED, '{"x":7}'),
        ("auto", f'{BEGIN}\n{{"name": "weather", "arguments": {{"x":7}}}}\n{END}'),
    ],
    ids=["required", "named", "auto"],
)
def test_references_within_a_tools_parameters_count_from_their_own_root(
    choice: ToolChoice, text: str
) -> None:
    tools = [_tool("weather", _referring("integer")), _tool("clock", _referring("boolean"))]
    constraint = ToolUse(tools, choice, True).constraint()
    assert constraint is not None
    bound = compile_grammar(_spec(constraint)).bind(BYTES)
    matcher = bound.matcher()
    assert all(matcher.consume(byte) for byte in text.encode()) and matcher.is_accepting()


def _spec(constraint: Constraint) -> GrammarSpec:
    return GrammarSpec(constraint.kind, constraint.source, is_lenient=constraint.is_lenient)


def _tool(name: str, parameters: dict[str, Any], *, strict: bool | None = None) -> Tool:
    function = {"name": name, "parameters": parameters, "strict": strict}
    return Tool.model_validate({"type": "function", "function": function})


def _referring(kind: str) -> dict[str, Any]:
    return {
        "$defs": {"A": {"type": kind}},
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/A"}},
        "required": ["x"],
        "additionalProperties": False,
    }


def test_tools_too_large_are_refused_in_their_own_name() -> None:
    tools = [_tool("weather", {"type": "object", "description": "x" * 2**20})]
    with pytest.raises(InvalidRequest, match="tools: ") as refused:
        ToolUse(tools, "required", True).constraint()
    assert refused.value.field == "tools"


def test_auto_is_free_text_with_tags_where_the_template_knows_tools() -> None:
    constraint = use("auto").constraint()
    assert constraint is not None and constraint.kind == "structural_tag"
    tag = json.loads(constraint.source)
    assert tag["triggers"] == [BEGIN]
    assert all(structure["begin"].startswith(BEGIN) for structure in tag["structures"])
    for unused in (use("auto", knows=False), use("none"), ToolUse((), "auto", True)):
        assert unused.constraint() is None and not unused.may_call
        assert unused.for_template is None


def test_a_choice_that_there_is_not_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="tool_choice"):
        ToolUse(TOOLS[1:], NAMED, True)
    with pytest.raises(InvalidRequest, match="tool_choice"):
        ToolUse((), "required", True)


@pytest.mark.parametrize(
    ("choice", "text", "content", "calls"),
    [
        ("required", '{"name":"clock","arguments":{}}', "", [("clock", "{}")]),
        ("required", '{"name":"clock","arguments":{}', '{"name":"clock","arguments":{}', []),
        (NAMED, '{"city":"x"}', "", [("weather", '{"city":"x"}')]),
        (NAMED, '{"city":"x', '{"city":"x', []),
        ("required", '{"name":"clo', '{"name":"clo', []),
        ("auto", "No tool.", "No tool.", []),
        ("auto", f"Wait. {CALL}", "Wait. ", [("weather", '{"city": "a {b}"}')]),
        ("auto", CALL + CALL, "", [("weather", '{"city": "a {b}"}')] * 2),
        ("auto", f"A {CALL} b\n{CLOCK} c", "A  b\n c", [CITY_CALL, ("clock", "{}")]),
        ("auto", f"{CALL} b {CUT}", f" b {CUT}", [CITY_CALL]),
        ("auto", CALL.replace("a {b}", f"x {END} {BEGIN}"), "",
         [("weather", f'{{"city": "x {END} {BEGIN}"}}')]),
        ("auto", CALL.replace("city", '\\"arguments\\":'), "",
         [("weather", '{"\\"arguments\\":": "a {b}"}')]),
        ("auto", f"{BEGIN} {CLOCK}", f"{BEGIN} ", [("clock", "{}")]),
        ("auto", f'{BEGIN}{{"name":"clock","arguments":{{}}}} x', None, []),
        ("auto", f"{BEGIN}\n{{", f"{BEGIN}\n{{", []),
    ],
)  # fmt: skip
def test_calls_are_read_as_they_were_written(
    choice: ToolChoice, text: str, content: str | None, calls: list[tuple[str, str]]
) -> None:
    found, read = use(choice).read(text)
    assert found == (text if content is None else content)
    assert [(call.name, call.arguments) for call in read] == calls


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_what_was_cut_behind_a_call_keeps_its_reason_and_its_text(reason: str) -> None:
    reply = ChatReply("m", partial(ToolReader, use("auto")))
    outcome = Outcome(0, f"A {CALL}{CUT}", {"finish_reason": reason})
    choice = reply.choice(outcome)
    assert choice["finish_reason"] == ("tool_calls" if reason == "stop" else "length")
    assert choice["message"]["content"] == f"A {CUT}"
    assert len(choice["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("choice", ["required", NAMED, "auto"], ids=["required", "named", "auto"])
def test_schemas_are_strict_where_a_tool_is_and_else_lenient(choice: ToolChoice) -> None:
    """That arrays differ is more than a grammar can say."""
    pairs = {"type": "array", "items": {"type": "array"}, "uniqueItems": True}
    schema = {"type": "object", "properties": {"pairs": pairs}}
    lenient = ToolUse([_tool("weather", schema)], choice, True).constraint()
    assert lenient is not None
    compiled = compile_grammar(_spec(lenient))
    assert any("uniqueItems" in warning for warning in compiled.warnings)
    strict = ToolUse([_tool("weather", schema, strict=True)], choice, True).constraint()
    assert strict is not None
    with pytest.raises(UnsupportedSchema, match="uniqueItems"):
        compile_grammar(_spec(strict))


def test_a_stream_ends_with_the_warnings() -> None:
    outcome = Outcome(0, "{}", {"finish_reason": "stop", "warnings": ["/: something"]})
    for reply in (ChatReply("m"), TextReply("m")):
        last = events(reply.end(outcome))[-1]["choices"][0]
        assert last["warnings"] == ["/: something"] and last["finish_reason"] == "stop"


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    "text",
    ["Plain < text <tool", f"Before {CALL}", CALL, f"A {BEGIN[:-1]} b", f"x {BEGIN} {{",
     f"A {CALL} b {CLOCK}\n", f"{CALL}{CUT}", f"{CALL}\n"],
)  # fmt: skip
def test_a_stream_sends_text_at_once_and_calls_whole(text: str, size: int) -> None:
    tool_use = use("auto")
    reply = ChatReply("m", partial(ToolReader, tool_use))
    deltas: list[dict[str, Any]] = []
    for start in range(0, len(text), size):
        chunks = events(reply.piece(Piece(0, text[start : start + size])))
        deltas += [chunk["choices"][0]["delta"] for chunk in chunks]
    chunks = events(reply.end(Outcome(0, text, {"finish_reason": "stop"})))
    deltas += [chunk["choices"][0]["delta"] for chunk in chunks]
    streamed = "".join(delta.get("content", "") for delta in deltas)
    content, calls = tool_use.read(text)
    names = [c["function"]["name"] for d in deltas for c in d.get("tool_calls", ())]
    assert names == [call.name for call in calls]
    assert streamed.strip() == content.strip()
    reason = chunks[-1]["choices"][0]["finish_reason"]
    assert reason == ("tool_calls" if calls else "stop")


def test_a_template_is_told_of_tools_if_it_knows_them(
    byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    source = (
        "{% if tools %}{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}{% endif %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    (tmp_path / "chat_template.jinja").write_text(source)
    template = ChatTemplate(tmp_path, byte_tokenizer)
    tools = json.loads(use("auto").for_template or "[]")
    assert template.knows_tools
    assert template.marks(["user"], told=Told.of(tools)) == ["[weather][clock]<user>", ""]
    assert template.marks(["user"]) == ["<user>", ""]
    plain = ChatTemplate(tmp_path / "none", byte_tokenizer)
    assert not plain.knows_tools
    assert plain.marks(["user"], told=Told.of(tools)) == plain.marks(["user"])
