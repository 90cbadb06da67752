"""Tools over HTTP: what they ask of an output, how calls are read from it and sent in a stream."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stemma.constrained.compiler import compile_grammar
from stemma.constrained.serving.frames import named
from stemma.constrained.spec import GrammarSpec
from stemma.constrained.vocabulary import single_bytes
from stemma.errors import InvalidGrammar, InvalidRequest, UnsupportedSchema
from stemma.frontend.chat_format.chat_format import ChatFormat
from stemma.frontend.chat_format.hermes import BEGIN, END, Hermes
from stemma.frontend.chat_format.llama3 import Llama3
from stemma.frontend.chat_format.mistral import Mistral
from stemma.frontend.chat_format.reasoning import ReasoningTags
from stemma.frontend.chat_format.registry import format_of
from stemma.frontend.chat_format.tool_format import TaughtFormat
from stemma.frontend.protocol.constraint import Constraint
from stemma.runtime.tokenizer.chat_template import ChatTemplate, TemplateArgs
from stemma.runtime.tokenizer.tokenizer import Tokenizer
from stemma.server.api.openai.chat import ChatReply
from stemma.server.api.openai.completions import TextReply
from stemma.server.parsers.output_reader import OutputReader
from stemma.server.parsers.tools import (
    AllowedChoice,
    NamedChoice,
    Tool,
    ToolChoice,
    ToolUse,
    behind_reasoning,
)
from stemma.server.protocol.pieces import Outcome, Piece

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    Tool.model_validate({"type": "function", "function": {"name": "weather", "parameters": CITY}}),
    Tool.model_validate({"type": "function", "function": {"name": "clock"}}),
]
BYTES = single_bytes()
NAMED = NamedChoice.model_validate({"type": "function", "function": {"name": "weather"}})
CLOCK = f'{BEGIN}{{"name":"clock","arguments":{{}}}}{END}'
CUT = f'{BEGIN}\n{{"name": "weather", "argum'
CITY_CALL = ("weather", '{"city": "a {b}"}')
CALL = f'{BEGIN}\n{{"name": "weather", "arguments": {{"city": "a {{b}}"}}}}\n{END}'


KNOWING = ChatFormat(Hermes(), knows_tools=True, knows_calls=True)


def use(choice: ToolChoice, knows: bool = True, **fields: Any) -> ToolUse:
    return ToolUse(TOOLS, choice, KNOWING if knows else ChatFormat(), **fields)


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
    assert named is not None
    assert json.loads(named.source) == {**CITY, "additionalProperties": False}


OPEN = {"properties": {"city": {}}}


@pytest.mark.parametrize(
    ("parameters", "strict", "is_closed"),
    [
        (CITY, None, True),
        (CITY, True, False),
        (OPEN, False, True),
        ({**CITY, "additionalProperties": True}, None, False),
        ({**CITY, "required": ["city", "day"]}, None, False),
        ({**CITY, "patternProperties": {"^x": {}}}, None, False),
        ({"$ref": "#/$defs/A", "$defs": {"A": CITY}, **OPEN}, None, False),
        ({"type": "object"}, None, False),
    ],
)
def test_a_call_has_listed_parameters_alone_unless_it_is_strict_or_its_schema_says_otherwise(
    parameters: dict[str, Any], strict: bool | None, is_closed: bool
) -> None:
    tools = [_tool("weather", parameters, strict=strict)]
    constraint = ToolUse(tools, NAMED, KNOWING).constraint()
    assert constraint is not None
    closed = {**parameters, "additionalProperties": False}
    assert json.loads(constraint.source) == (closed if is_closed else parameters)


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
    constraint = ToolUse(tools, choice, KNOWING).constraint()
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
        ToolUse(tools, "required", KNOWING).constraint()
    assert refused.value.field == "tools"


def test_auto_is_free_text_with_tags_where_the_template_knows_tools() -> None:
    constraint = use("auto").constraint()
    assert constraint is not None and constraint.kind == "structural_tag"
    body = json.loads(constraint.source)["format"]
    assert body["triggers"] == [BEGIN] and not body["stop_after_first"]
    assert all(tag["begin"].startswith(BEGIN) for tag in body["tags"])
    for unused in (use("auto", knows=False), use("none"), ToolUse((), "auto", KNOWING)):
        assert unused.constraint() is None and not unused.may_call
        assert unused.for_template is None


def test_a_choice_that_there_is_not_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="tool_choice"):
        ToolUse(TOOLS[1:], NAMED, KNOWING)
    with pytest.raises(InvalidRequest, match="tool_choice"):
        ToolUse((), "required", KNOWING)


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_what_was_cut_behind_a_call_keeps_its_reason_and_its_text(reason: str) -> None:
    reply = ChatReply("m", partial(OutputReader, use("auto")))
    outcome = Outcome(0, f"A {CALL}{CUT}", {"finish_reason": reason})
    choice = reply.choice(outcome)
    assert choice["finish_reason"] == ("tool_calls" if reason == "stop" else "length")
    assert choice["message"]["content"] == f"A {CUT}"
    assert len(choice["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("choice", ["required", NAMED, "auto"], ids=["required", "named", "auto"])
def test_schemas_are_strict_where_a_tool_is_and_else_lenient(choice: ToolChoice) -> None:
    """Multiples of a large number are more than a grammar can say."""
    schema = {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 12345}}}
    lenient = ToolUse([_tool("weather", schema)], choice, KNOWING).constraint()
    assert lenient is not None
    compiled = compile_grammar(_spec(lenient))
    assert any("multipleOf" in warning for warning in compiled.warnings)
    strict = ToolUse([_tool("weather", schema, strict=True)], choice, KNOWING).constraint()
    assert strict is not None
    with pytest.raises(UnsupportedSchema, match="multipleOf"):
        compile_grammar(_spec(strict))


def test_a_stream_ends_with_the_warnings() -> None:
    outcome = Outcome(0, "{}", {"finish_reason": "stop", "warnings": ["/: something"]})
    for reply in (ChatReply("m"), TextReply("m")):
        last = events(reply.end(outcome))[-1]["choices"][0]
        assert last["warnings"] == ["/: something"] and last["finish_reason"] == "stop"


def test_a_stream_tells_of_a_call_before_its_arguments_are_there() -> None:
    reply = ChatReply("m", partial(OutputReader, use("auto")))
    deltas: list[dict[str, Any]] = []
    for piece in ("Hm. ", CALL[:40], CALL[40:55], CALL[55:]):
        chunks = events(reply.piece(Piece(0, piece)))
        deltas += [chunk["choices"][0]["delta"] for chunk in chunks]
    chunks = events(reply.end(Outcome(0, f"Hm. {CALL}", {"finish_reason": "stop"})))
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert [delta.get("content") for delta in deltas[:2]] == ["", "Hm."]
    parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
    assert parts[0]["id"] and parts[0]["type"] == "function" and parts[0]["index"] == 0
    assert parts[0]["function"] == {"name": "weather", "arguments": ""}
    assert all(set(part) == {"index", "function"} for part in parts[1:]) and len(parts) > 2
    assert "".join(part["function"]["arguments"] for part in parts) == CITY_CALL[1]


# --- formats and choices --------------------------------------------------------------------------


FORMATS: dict[str, tuple[TaughtFormat, str]] = {
    "hermes": (Hermes(), CALL),
    "llama3": (Llama3(), '{"name": "weather", "parameters": {"city": "a {b}"}}'),
    "mistral": (Mistral(), '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "a {b}"}}]'),
    "newer mistral": (Mistral(is_newer=True), '[TOOL_CALLS]weather[ARGS]{"city": "a {b}"}'),
}


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_strict_calls_are_held_to_their_schema_in_each_format(name: str) -> None:
    taught, text = FORMATS[name]
    tools = [_tool("weather", {**CITY, "additionalProperties": False}, strict=True)]
    chat_format = ChatFormat(taught, knows_tools=True)
    constraint = ToolUse(tools, "auto", chat_format).constraint()
    assert constraint is not None and not constraint.is_lenient
    text = text.replace('{"city": "a {b}"}', '{"city":"a {b}"}')  # the grammar's own blanks
    for said in ("", "Well. "):
        assert _accepts(constraint, said + text) and _accepts(constraint, said)
        assert _accepts(constraint, said + text + " And " + text)
        assert not _accepts(constraint, said + text.replace("city", "town"))
        assert not _accepts(constraint, said + text.replace("weather", "wetter"))
    one = ToolUse(tools, "auto", chat_format, is_parallel=False).constraint()
    assert one is not None and _accepts(one, "Well. " + text)
    assert not _accepts(one, text + text)


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("reasons", [False, True])
def test_beside_a_document_that_the_client_asks_for_a_call_may_come(
    name: str, reasons: bool
) -> None:
    taught, text = FORMATS[name]
    text = text.replace('{"city": "a {b}"}', '{"city":"a {b}"}')
    asked = Constraint("json_schema", json.dumps({"enum": [{"a": 1}]}))
    tool_use = ToolUse(TOOLS, "auto", ChatFormat(taught, knows_tools=True), own=asked)
    tags = ReasoningTags("<think>", "</think>")
    either = tool_use.document_or_call(tags if reasons else None)
    assert either is not None and either.is_lenient and tool_use.may_call
    thought = f"Hm {{{tags.end}{tags.gap}" if reasons else ""
    assert _accepts(either, thought + text) and _accepts(either, thought + '{"a":1}')
    for other in ("Well", '{"a":2}', text.replace("city", "town"), '{"a":1}' + text, ""):
        assert not _accepts(either, thought + other)
    for said, content in (('{"a":1}', '{"a":1}'), (text, None)):
        message, reason = OutputReader(tool_use).message(
            Outcome(0, said, {"finish_reason": "stop"})
        )
        assert message["content"] == content and ("tool_calls" in message) == (content is None)
        assert reason == ("stop" if content else "tool_calls")


def test_a_document_or_a_call_is_strict_where_both_are() -> None:
    strict = [_tool("weather", CITY, strict=True)]
    for tools, lenient, expected in ((strict, False, False), (strict, True, True),
                                     (TOOLS, False, True)):  # fmt: skip
        own = Constraint("json_object", is_lenient=lenient)
        either = ToolUse(tools, "auto", KNOWING, own=own).document_or_call()
        assert either is not None and either.is_lenient is expected
    for choice, own in (
        ("required", Constraint("json_object")),
        ("auto", Constraint("regex", "a")),
    ):
        assert use(choice, own=own).document_or_call() is None  # type: ignore[arg-type]


def _accepts(constraint: Constraint, text: str) -> bool:
    matcher = compile_grammar(_spec(constraint)).bind(BYTES).matcher()
    return all(matcher.consume(byte) for byte in text.encode()) and matcher.is_accepting()


QWEN3_CODER = ChatFormat(format_of("qwen3_coder", ()), knows_tools=True)
CITY_TAGS = "<parameter=city>\na {b}\n</parameter>\n"
XML = f"<tool_call>\n<function=weather>\n{CITY_TAGS}</function>\n</tool_call>"
LOST = {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 12345}}}
WRONG = {
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/X"}},
    "$defs": {"X": {"type": "strng"}},
}
CHOICES = ["auto", "required", "named", "allowed"]
ONE_ALLOWED = AllowedChoice.model_validate(
    {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [NAMED.model_dump()]},
    }
)


@pytest.mark.parametrize("tags", [None, ReasoningTags("<think>", "</think>")], ids=["", "thinks"])
@pytest.mark.parametrize("chat_format", [KNOWING, QWEN3_CODER], ids=["json", "parameters"])
@pytest.mark.parametrize("choice", ["auto", "required", NAMED, ONE_ALLOWED], ids=CHOICES)
def test_what_is_wrong_with_a_schema_names_its_tool_and_the_place_in_it(
    choice: ToolChoice, chat_format: ChatFormat, tags: ReasoningTags | None
) -> None:
    def told(schema: dict[str, Any], *, strict: bool | None = None) -> str:
        tools = [TOOLS[1], _tool("weather", schema, strict=strict), _tool("other", CITY)]
        use = ToolUse(tools, choice, chat_format)
        constraint = use.constraint(tags)
        assert constraint is not None
        try:
            (said,) = compile_grammar(_spec(constraint)).warnings
        except InvalidGrammar as error:
            said = named(constraint.kind, error)
        return use.words(constraint).reworded(said)

    assert told(WRONG).startswith("tools[1] (weather): /$defs/X: type='strng' is not allowed")
    assert told({"type": "strng"}).startswith("tools[1] (weather): /: type='strng' is not")
    place = "tools[1] (weather): /properties/n: multipleOf "
    assert told(LOST).startswith(f"{place}is not enforced")
    refused = told(LOST, strict=True)
    assert refused.startswith(f"{place}cannot be enforced")
    assert refused.endswith('an `enum`, or `"strict": false` in each tool, which drops the keyword')


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_forced_call_is_written_in_the_models_own_format(choice: ToolChoice) -> None:
    forced = ToolUse(TOOLS, choice, QWEN3_CODER)
    constraint = forced.constraint()
    assert constraint is not None and _accepts(constraint, XML)
    assert not _accepts(constraint, f"So: {XML}") and not _accepts(constraint, XML + XML)
    assert _accepts(constraint, XML.replace("weather", "clock").replace(CITY_TAGS, "")) == (
        choice == "required"
    )
    message, reason = OutputReader(forced).message(Outcome(0, XML, {"finish_reason": "stop"}))
    (call,) = message["tool_calls"]
    assert reason == "tool_calls" and message["content"] is None
    assert call["function"] == {"name": "weather", "arguments": '{"city": "a {b}"}'}


def test_a_template_without_tools_has_forced_calls_as_json_whatever_its_tokenizer_has() -> None:
    untold = ToolUse(TOOLS, "required", ChatFormat(format_of("qwen3_coder", ())))
    constraint = untold.constraint()
    assert constraint is not None and constraint.kind == "json_schema"


UNKNOWN = ChatFormat(knows_tools=True, is_unknown=True)


@pytest.mark.parametrize("choice", ["required", NAMED, "auto"], ids=["required", "named", "auto"])
def test_calls_that_must_be_in_a_format_that_is_not_known_are_refused(choice: ToolChoice) -> None:
    strict = [_tool("weather", CITY, strict=choice == "auto")]
    with pytest.raises(InvalidRequest, match=r"no mark of a known format.*--tool-call-parser"):
        ToolUse(strict, choice, UNKNOWN)
    by_choice = ToolUse(TOOLS, "auto", UNKNOWN)
    assert not by_choice.may_call and "--tool-call-parser" in by_choice.warnings[0]
    for own in (Constraint("regex", "a"), Constraint("json_object")):
        asked = ToolUse(strict, "auto", UNKNOWN, own=own)
        assert asked.warnings and not asked.may_call and asked.document_or_call() is None


def test_marks_around_an_answer_are_no_part_of_it() -> None:
    command = ChatFormat(format_of("command_r7b", ()), knows_tools=True)
    outcome = Outcome(0, "<|START_RESPONSE|>Hi<|END_RESPONSE|>", {"finish_reason": "stop"})
    for tools, choice in ((TOOLS, "auto"), (TOOLS, "none"), ((), "none")):
        use_ = ToolUse(tools, choice, command)  # type: ignore[arg-type]
        assert OutputReader(use_).message(outcome)[0] == {"content": "Hi"}


@pytest.mark.parametrize("name", ["llama3", "mistral"])
def test_calls_that_need_not_be_strict_are_left_to_a_model_whose_triggers_are_text(
    name: str,
) -> None:
    chat_format = ChatFormat(FORMATS[name][0], knows_tools=True)
    assert ToolUse(TOOLS, "auto", chat_format).constraint() is None
    assert ToolUse(TOOLS, "auto", chat_format, is_parallel=False).constraint() is not None


def test_allowed_tools_are_those_that_may_be_called_and_all_are_told_of() -> None:
    choice = _allowed("required", "clock")
    some = use(choice)
    assert some.is_forced and some.may_call
    assert len(json.loads(some.for_template or "[]")) == 2
    constraint = some.constraint()
    assert constraint is not None
    assert _accepts(constraint, '{"name":"clock","arguments":{}}')
    assert not _accepts(constraint, '{"name":"weather","arguments":{"city":"x"}}')
    auto = use(_allowed("auto", "clock")).constraint()
    assert auto is not None and len(json.loads(auto.source)["format"]["tags"]) == 1
    with pytest.raises(InvalidRequest, match="tool_choice"):
        use(_allowed("auto", "nothing"))


def _allowed(mode: str, name: str) -> AllowedChoice:
    tools = [{"type": "function", "function": {"name": name}}]
    allowed = {"mode": mode, "tools": tools}
    return AllowedChoice.model_validate({"type": "allowed_tools", "allowed_tools": allowed})


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="different names"):
        ToolUse([TOOLS[0], TOOLS[0]], "auto", KNOWING)


@pytest.mark.parametrize(
    ("tool_use", "words"),
    [
        (use("auto", knows=False), "does not know tools"),
        (use("auto", own=Constraint("regex", "a")), "never a call"),
        (use("auto", own=Constraint("json_object")), None),
        (ToolUse(TOOLS, "auto", ChatFormat(knows_tools=True)), "format is not known"),
        (use("auto"), None),
        (use("none", knows=False), None),
        (use("required", knows=False), None),
        (ToolUse((), "auto", ChatFormat()), None),
    ],
)
def test_a_client_is_warned_where_no_call_can_come(tool_use: ToolUse, words: str | None) -> None:
    outcome = Outcome(0, "x", {"finish_reason": "stop"})
    warnings = ChatReply("m", partial(OutputReader, tool_use)).choice(outcome).get("warnings")
    assert (warnings is None) if words is None else (words in warnings[0])


def test_what_is_asked_for_comes_behind_the_reasoning() -> None:
    tags = ReasoningTags("<think>", "</think>")
    for choice, text in (("required", '{"name":"clock","arguments":{}}'), (NAMED, '{"city":"x"}')):
        constraint = use(choice).constraint(tags)  # type: ignore[arg-type]
        assert constraint is not None
        assert _accepts(constraint, f"Why? {{}}\n</think>\n\n{text}")
        assert not _accepts(constraint, text) and not _accepts(constraint, f"</think>\n\n{text} x")
    whole = behind_reasoning(tags, Constraint("json_object"))
    assert whole is not None and _accepts(whole, "a</think>\n\n{}")
    assert behind_reasoning(tags, Constraint("regex", "a")) is None


def test_forced_calls_behind_reasoning_are_read() -> None:
    from stemma.server.parsers.output_reader import ReasoningUse

    tags = ReasoningTags("<think>", "</think>")
    reader = OutputReader(use("required"), ReasoningUse(tags, starts_inside=True))
    text = 'Why?</think>\n\n{"name":"clock","arguments":{}}'
    message, reason = reader.message(Outcome(0, text, {"finish_reason": "stop"}))
    assert message["reasoning_content"] == "Why?" and reason == "tool_calls"
    assert message["tool_calls"][0]["function"] == {"name": "clock", "arguments": "{}"}


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
    assert template.delimiters(["user"], args=TemplateArgs.of(tools)) == [
        "[weather][clock]<user>",
        "",
    ]
    assert template.delimiters(["user"]) == ["<user>", ""]
    plain = ChatTemplate(tmp_path / "none", byte_tokenizer)
    assert not plain.knows_tools
    assert plain.delimiters(["user"], args=TemplateArgs.of(tools)) == plain.delimiters(["user"])
