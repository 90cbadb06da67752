"""Calls as each model writes them: read whole and in any pieces, and forced by a grammar."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from chats import TEMPLATES, call, said

from stemma.constrained.compiler import compile_grammar
from stemma.constrained.matcher import BoundGrammar
from stemma.constrained.spec import GrammarSpec
from stemma.constrained.validation import validation_errors
from stemma.constrained.vocabulary import single_bytes
from stemma.errors import InvalidProgram
from stemma.frontend.chat_format.call_grammar import calls_constraint, forced_constraint
from stemma.frontend.chat_format.call_reader import CallBegun, CallReader
from stemma.frontend.chat_format.reading import gathered
from stemma.frontend.chat_format.registry import FORMATS, format_of
from stemma.frontend.chat_format.tool_format import OfferedFunction, TaughtFormat
from stemma.frontend.protocol.constraint import Constraint
from stemma.runtime.tokenizer.template_sandbox import template_sandbox, to_json

Calls = list[tuple[str, Any]]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "$defs": {"Place": {"type": "object", "properties": {"x": {"type": "number"}}}},
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "where": {"$ref": "#/$defs/Place"},
        "ok": {"type": "boolean"},
        "note": {"type": "string"},
        "some": {"anyOf": [{"type": "string"}, {"type": "null"}, {"type": "integer"}]},
        "any": {},
    },
}
SCHEMAS = {"weather": SCHEMA, "clock": {"type": "object", "properties": {}}}

# Of each format a template that writes it.
WRITTEN_BY = {
    "mistral": "mistral_v3_tools",
    "deepseek_v3": "deepseek_v3_tools",
    "deepseek_v31": "deepseek_v31_tools",
    "kimi_k2": "kimi_k2_tools",
    "minimax_m2": "minimax_m2_tools",
    "seed_oss": "seed_oss_tools",
    "gemma4": "gemma4_tools",
    "lfm2": "lfm2_tools",
    "command_r7b": "command_r7b_tools",
    "functionary_v3_2": "functionary_v32_tools",
    "qwen3_coder": "qwen3_coder_tools",
    "functionary_v3_1": "functionary_v31_tools",
    "glm47": "glm47_tools",
    "glm45": "glm4",
    "phi4_mini_json": "phi4_mini_tools",
    "granite": "granite33_tools",
    "hermes": "qwen25_tools",
    "llama3": "llama31_tools",
}
ONE_CALL = {"llama3"}  # whose template refuses more
ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "</s>", "<|end_of_text|>", "[e~[", "<turn|>",
        "<|END_OF_TURN_TOKEN|>")  # fmt: skip

ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain": {"city": "Ulm"},
    "none": {},
    "typed": {"city": "Ulm", "days": -2, "ok": True, "tags": ["a", "b"], "some": None},
    "nested": {"where": {"x": 1.5, "deep": {"k": [1, {"l": "ü"}]}}, "tags": [], "city": ""},
    "unicode": {"city": "Köln 世界 🙂 \u2028e\u0301"},
    "lines": {"city": "\nfirst\n\n  second \n", "note": "\tx\r\n"},
    "looks": {"city": "12", "note": "null", "some": "{x", "any": "true story"},
    "marks": {
        "city": '</tool_call> <function=x> </parameter> "q" \\ {a} [TOOL_CALLS] </arg_value> ```'
    },
}


def taught(name: str) -> TaughtFormat:
    """Under the marks of its template."""
    found = format_of(name, [mark for mark in ("functools",) if name == "phi4_mini_json"])
    assert found is not None
    return found


def written(name: str, calls: Sequence[tuple[str, dict[str, Any]]], before: str = "") -> str:
    """An assistant's calls as the model's template writes them."""
    template = template_sandbox(to_json).from_string(TEMPLATES[WRITTEN_BY[name]])
    made = []
    for index, (function, arguments) in enumerate(calls):
        call_id = f"functions.{function}:{index}" if name == "kimi_k2" else "call12345"
        one = call(function, call_id)
        made.append({**one, "function": {**one["function"], "arguments": arguments}})
    fields = {"bos_token": "<s>", "eos_token": "</s>", "tools": None}
    asked = [said("user", "?")]
    prompt = template.render(messages=asked, add_generation_prompt=True, **fields)
    turns = [*asked, said("assistant", before, tool_calls=made)]
    text = template.render(messages=turns, add_generation_prompt=False, **fields)
    while not text.startswith(prompt):  # a prompt that opens the reasoning
        prompt = prompt[: prompt.rindex("<")]
    text = text.removeprefix(prompt)
    for end in ("</think>", "<think>"):
        text = text.removeprefix(end)
    while any(text.rstrip().endswith(end) for end in ENDS):
        text = next(text.rstrip().removesuffix(end) for end in ENDS if text.rstrip().endswith(end))
    return text


def read(name: str, *pieces: str) -> tuple[str, list[tuple[str, str]]]:
    reader = CallReader(taught(name), SCHEMAS, wrapping=taught(name))
    events = [event for piece in pieces for event in reader.feed(piece)]
    return gathered([*events, *reader.finish()])


def read_in_any_pieces(name: str, text: str) -> tuple[str, list[tuple[str, str]]]:
    """The same, however it is cut."""
    whole = read(name, text)
    assert read(name, *text) == whole, "character by character"
    for place in range(1, len(text)):
        assert read(name, text[:place], text[place:]) == whole, text[:place]
    return whole


def values(calls: Sequence[tuple[str, str]]) -> Calls:
    return [(name, json.loads(arguments)) for name, arguments in calls]


def test_each_format_has_a_template_that_writes_it() -> None:
    assert set(WRITTEN_BY) == {row.name for row in FORMATS}


@pytest.mark.parametrize("kind", ARGUMENTS)
@pytest.mark.parametrize("name", WRITTEN_BY)
def test_what_a_template_writes_is_read_back(name: str, kind: str) -> None:
    text = written(name, [("weather", ARGUMENTS[kind])])
    content, calls = read_in_any_pieces(name, text)
    assert (content.strip(), values(calls)) == ("", [("weather", ARGUMENTS[kind])])


@pytest.mark.parametrize("name", [name for name in WRITTEN_BY if name not in ONE_CALL])
def test_several_calls_are_read_in_their_order(name: str) -> None:
    given = [("weather", ARGUMENTS["typed"]), ("clock", {}), ("weather", {"city": "Rom"})]
    content, calls = read_in_any_pieces(name, written(name, given))
    assert (content.strip(), values(calls)) == ("", given)


@pytest.mark.parametrize("name", [name for name in WRITTEN_BY if name not in ("llama3", "mistral")])
def test_text_before_a_call_is_content(name: str) -> None:
    text = written(name, [("weather", {"city": "Ulm"})], before="Let me <see>.")
    content, calls = read_in_any_pieces(name, text)
    assert (content.strip(), values(calls)) == ("Let me <see>.", [("weather", {"city": "Ulm"})])


@pytest.mark.parametrize("name", WRITTEN_BY)
def test_a_call_that_is_cut_keeps_what_there_is_of_it(name: str) -> None:
    text = written(name, [("weather", ARGUMENTS["typed"])])
    _, ((_, whole),) = read(name, text)
    for end in range(len(text)):
        content, calls = read(name, text[:end])
        assert (content, calls) == read(name, *text[:end])
        reader = CallReader(taught(name), SCHEMAS, wrapping=taught(name))
        told = gathered(reader.feed(text[:end]))[1]
        assert not told or whole.startswith(told[0][1]), "nothing told is taken back"
        assert len(told) == len(calls)


Q = "<tool_call>\n<function={}>\n{}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        # a value that is no JSON of its kind is a string; unknown functions have any kinds
        ("qwen3_coder", Q.format("weather", "<parameter=days>\ntwo\n</parameter>\n"), "",
         [("weather", {"days": "two"})]),
        ("qwen3_coder", Q.format("f", "<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n"
         "</parameter>\n<parameter=c>\nTrue\n</parameter>\n"), "",
         [("f", {"a": 1, "b": "x", "c": True})]),
        ("qwen3_coder", Q.format("weather", "<parameter=city>\na</parameter>b\n</parameter>\n"), "",
         [("weather", {"city": "a</parameter>b"})]),
        ("qwen3_coder", Q.format("weather", "<parameter=city>Ulm</parameter>"), "",
         [("weather", {"city": "Ulm"})]),
        ("qwen3_coder", Q.format("weather", "<parameter=tags>\n['a', \"it's\"]\n</parameter>\n"
         "<parameter=where>\n{'x': None, 'y': (1, True)}\n</parameter>\n<parameter=ok>\nFALSE\n"
         "</parameter>\n<parameter=some>\n['a']\n</parameter>\n"), "",
         [("weather", {"tags": ["a", "it's"], "where": {"x": None, "y": [1, True]}, "ok": False,
                       "some": "['a']"})]),
        ("glm45", "<tool_call>weather\n<arg_key>tags</arg_key>\n<arg_value>['a']}</arg_value>\n"
         "</tool_call>", "", [("weather", {"tags": "['a']}"})]),
        ("qwen3_coder", Q.format("weather", "<parameter=tags>\n[1,\n</parameter>\n"), "",
         [("weather", {"tags": "[1,"})]),
        ("qwen3_coder", Q.format("weather", "<parameter=tags>\n" + "[" * 9999 + "\n</parameter>\n"),
         "", [("weather", {"tags": "[" * 9999})]),
        # values without their closing tag
        ("qwen3_coder", Q.format("weather", "<parameter=city>\nUlm\n<parameter=days>\n3\n") + "\n"
         + Q.format("weather", "<parameter=days>\n4\n<parameter=city>\nRom\n"), "",
         [("weather", {"city": "Ulm", "days": 3}), ("weather", {"days": 4, "city": "Rom"})]),
        ("qwen3_coder", Q.format("weather", "<parameter=city>\na <parameter=city> </function>\n"
         "<parameter=x>\n</tool_call> <tool_call>\n</function>\nb\n</parameter>\n"), "",
         [("weather", {"city": "a <parameter=city> </function>\n<parameter=x>\n</tool_call> "
                       "<tool_call>\n</function>\nb"})]),
        ("glm45", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Ulm\n<arg_key>days"
         "</arg_key>\n<arg_value>3\n</tool_call>", "", [("weather", {"city": "Ulm", "days": 3})]),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Ulm\n'
         '<parameter name="days">4\n</invoke>\n</minimax:tool_call>', "",
         [("weather", {"city": "Ulm", "days": 4})]),
        ("qwen3_coder", "<function=clock>\n</function>\n</tool_call>", "", [("clock", {})]),
        ("qwen3_coder", "<tool_call>\n<function=clock>\n</tool_call> so", " so", [("clock", {})]),
        ("qwen3_coder", "<tool_call> and </tool_call>.", "<tool_call> and </tool_call>.", []),
        ("qwen3_coder", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
         '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', []),
        ("qwen3_coder", "<tool_call>\n<function=clock>\nnow</function>", "\nnow</function>",
         [("clock", {})]),
        ("glm45", "<tool_call>weather<arg_key>city</arg_key><arg_value>Ulm</arg_value></tool_call>",
         "", [("weather", {"city": "Ulm"})]),
        ("glm45", "<tool_call>clock</tool_call>", "", [("clock", {})]),
        ("glm45", "<tool_call>two words</tool_call>", "<tool_call>two words</tool_call>", []),
        ("minimax_m2", '<invoke name="clock"></invoke>', "", [("clock", {})]),
        ("lfm2", "<|tool_call_start|>[weather(city='a\\'b\\n\\u00fc\\x41\\q', days=1_0, "
         "tags=('a',), where={'x': .5, 2: None,}, ok=False)]<|tool_call_end|> so", " so",
         [("weather", {"city": "a'b\nüA\\q", "days": 10, "tags": ["a"], "ok": False,
                       "where": {"x": 0.5, "2": None}})]),
        ("lfm2", '<|tool_call_start|>[{"name": "clock", "arguments": {}}, {"name": "weather", '
         '"arguments": {"days": 2}}]<|tool_call_end|>', "",
         [("clock", {}), ("weather", {"days": 2})]),
        ("lfm2", "<|tool_call_start|>clock()<|tool_call_end|>", "", [("clock", {})]),
        ("lfm2", "<|tool_call_start|>[f(a=07, b=-1_000, c=0123456789012345678901, d=+2, e=1.0)]"
         "<|tool_call_end|>", "",
         [("f", {"a": 7, "b": -1000, "c": 123456789012345678901, "d": 2, "e": 1.0})]),
        # quotes that are not escaped
        ("lfm2", "<|tool_call_start|>[f(a='sed -n '1,2p' /x', b=\"say \"hi\" <b>\" , c=['it's'])]"
         "<|tool_call_end|>", "",
         [("f", {"a": "sed -n '1,2p' /x", "b": 'say "hi" <b>', "c": ["it's"]})]),
        ("lfm2", "<|tool_call_start|>[f(a='x'<|tool_call_end|>", "", None),
        ("lfm2", "<|tool_call_start|> hm", "<|tool_call_start|> hm", []),
        # values without names, sets
        ("lfm2", "<|tool_call_start|>[weather('Ulm', 3, ok=True, tags={'a', \"b\"}, "
         "where={'x': {1}, 'y': {}})]<|tool_call_end|>", "",
         [("weather", {"city": "Ulm", "days": 3, "ok": True, "tags": ["a", "b"],
                       "where": {"x": [1], "y": {}}})]),
        ("lfm2", "<|tool_call_start|>[f(1)]<|tool_call_end|> so", "1)]<|tool_call_end|> so", None),
        # strings without their marks
        ("gemma4", '<|tool_call>call:weather{"city":"a\\n",some: 5 ,tags:[x y,z]}<tool_call|>', "",
         [("weather", {"city": "a\n", "some": 5, "tags": ["x y", "z"]})]),
        ("gemma4", "<|tool_call>call:weather{city:Köln, it's far,days:3,where:{x:12:30,y:http://a.b/c,}"
         ",note:}<tool_call|> so", " so",
         [("weather", {"city": "Köln, it's far", "days": 3, "note": "",
                       "where": {"x": "12:30", "y": "http://a.b/c"}})]),
        ("gemma4", '<|tool_call>call:weather{<|"|>city<|"|>:<|"|>"\\<|"|>}<tool_call|>', "",
         [("weather", {"city": '"\\'})]),
        ("command_r7b", "<|START_RESPONSE|>Hi <b>.<|END_RESPONSE|>", "Hi <b>.", []),
        ("command_r7b", '<|START_ACTION|>[{"tool_name": "clock", "parameters": {}}]<|END_ACTION|>',
         "", [("clock", {})]),
        ("functionary_v3_2", "all\nHi.", "Hi.", []),
        ("functionary_v3_2", "all\nHi.>>>clock\n{}>>>all\nSo.", "Hi.So.", [("clock", {})]),
        ("functionary_v3_2", "Sure\nthing", "Sure\nthing", []),
        ("functionary_v3_2", "al", "al", []),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n{}\n```"
         "<｜tool▁call▁end｜>", "", [("clock", {})]),
        ("deepseek_v31", "<｜tool▁calls▁begin｜>hm", "<｜tool▁calls▁begin｜>hm", []),
        ("kimi_k2", "<|tool_call_begin|>clock:3<|tool_call_argument_begin|>{}<|tool_call_end|>", "",
         [("clock", {})]),
        ("kimi_k2", "<|tool_call_begin|>clock<|tool_call_argument_begin|>{}",
         "<|tool_call_begin|>clock<|tool_call_argument_begin|>{}", []),
        ("granite", '<tool_call>[{"name": "clock", "arguments": {}}]', "", [("clock", {})]),
        # objects in another order, or without arguments
        ("hermes", '<tool_call>\n{"arguments": {"name": "x}"}, "name": "f"}\n</tool_call> so',
         " so", [("f", {"name": "x}"})]),
        ("hermes", '<tool_call>\n{"name": "clock"}\n</tool_call>', "", [("clock", {})]),
        ("hermes", '<tool_call>{"function": {"name": "f", "arguments": {"a": 1}}}</tool_call>', "",
         [("f", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "f", "x": {}</tool_call>',
         '<tool_call>{"name": "f", "x": {}</tool_call>', []),
        ("hermes", '<tool_call>{"answer": 7, "name": "f"}', '<tool_call>{"answer": 7, "name": "f"}',
         []),
        ("mistral", '[TOOL_CALLS] [{"arguments": {"a": 1}, "name": "f"}, {"name": "clock"}] so',
         " so", [("f", {"a": 1}), ("clock", {})]),
        ("command_r7b", '<|START_ACTION|>[{"tool_call_id": 0, "tool_name": "f", "parameters": {"a"'
         ': 1}}]<|END_ACTION|>', "", [("f", {"a": 1})]),
        ("lfm2", '<|tool_call_start|>[{"arguments": {}, "name": "f"}, {"name": "clock"}]'
         "<|tool_call_end|>", "", [("f", {}), ("clock", {})]),
        ("llama3", '{"type": "function", "function": "f", "parameters": {"a": 1}}; {"parameters": '
         '{}, "name": "clock"}', "", [("f", {"a": 1}), ("clock", {})]),
        ("llama3", '{"name": "clock", "parameters": {}}, {"name": "f", "parameters": {"a": 1}},\n'
         '{"name": "clock", "parameters": {}}, and', ", and",
         [("clock", {}), ("f", {"a": 1}), ("clock", {})]),
        ("llama3", '{"name": "Ada"}', '{"name": "Ada"}', []),
        ("llama3", '{"type": "function"}', '{"type": "function"}', []),
        # an object's JSON as a string, which Granite 4 writes
        ("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"U\\\\nm\\"}"}'
         "</tool_call> so", " so", [("weather", {"city": "U\nm"})]),
        ("hermes", '<tool_call>{"name": "clock", "arguments": null}</tool_call>', "",
         [("clock", {})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', "", [("f", "x")]),
        ("granite", '<|tool_call|>[{"name": "clock", "arguments": null}, {"name": "clock", '
         '"arguments": "{}"}]', "", [("clock", {}), ("clock", {})]),
        ("phi4_mini_json", '<|tool_call|>[{"name": "clock", "arguments": {}}]<|/tool_call|>', "",
         [("clock", {})]),
    ],
)  # fmt: skip
def test_what_else_models_write_is_read_as_far_as_it_goes(
    name: str, text: str, content: str, calls: Calls | None
) -> None:
    found = read(name, text) if len(text) > 5000 else read_in_any_pieces(name, text)
    assert found[0].strip() == content.strip()
    if calls is not None:
        assert values(found[1]) == calls


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("glm45", "<tool_call>weather" + " " * 1001 + "<arg_key>"),
        ("command_r7b", '<|START_ACTION|>[{"tool_call_id": "' + "x" * 4500 + '", "tool_name": "f"'),
        ("hermes", "<tool_call>" + "\n" * 1001 + '{"name": "weather"'),
        ("hermes", '<tool_call>{"arguments": {"a": "' + "x" * 4500 + '"}, "name": "f"'),
    ],
)
def test_what_is_waited_for_is_bounded(name: str, text: str) -> None:
    """Behind it, the text is told as it comes."""
    reader = CallReader(taught(name), SCHEMAS, wrapping=taught(name))
    told = [event for char in text for event in reader.feed(char)]
    assert gathered(told)[0] == text == read(name, text)[0]


def test_a_long_text_is_read_as_a_stream_is() -> None:
    given = [("weather", {"city": "x<y\n" * 3000, "tags": ["</parameter>"] * 900})] * 3
    text = written("qwen3_coder", given)
    assert values(read("qwen3_coder", text)[1]) == given
    pieces = [text[at : at + 777] for at in range(0, len(text), 777)]
    assert read("qwen3_coder", *pieces) == read("qwen3_coder", text)


def test_json_that_is_none_is_told_as_it_is() -> None:
    _, calls = read("deepseek_v31", written("deepseek_v31", [("weather", {})]).replace("{}", "{x"))
    assert calls[0][1].startswith("{x")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "</a>"\n</tool_call>\n'
         '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'),
        ("kimi_k2", written("kimi_k2", [("weather", {"city": "</a>"}), ("clock", {})])
         .replace("}", "", 1)),
        ("deepseek_v31", written("deepseek_v31", [("weather", {"city": "</a>"}), ("clock", {})])
         .replace("}", "", 1)),
    ],
    ids=["hermes", "kimi_k2", "deepseek_v31"],
)  # fmt: skip
def test_json_without_its_end_does_not_hold_the_next_call(name: str, text: str) -> None:
    content, calls = read_in_any_pieces(name, text)
    assert [called for called, _ in calls] == ["weather", "clock"] and not content.strip()
    assert json.loads(calls[0][1] + "}") == {"city": "</a>"} and calls[1][1] == "{}"


@pytest.mark.parametrize("written_", ['"{\\"city\\": ', "nul", '"', "null and"])
def test_arguments_that_wait_are_told_when_they_are_cut(written_: str) -> None:
    _, calls = read_in_any_pieces("hermes", '<tool_call>{"name": "f", "arguments": ' + written_)
    assert calls == [("f", "{}" if written_ == "null and" else written_)]


def test_a_string_between_tags_is_told_as_it_comes() -> None:
    reader = CallReader(taught("qwen3_coder"), SCHEMAS, wrapping=taught("qwen3_coder"))
    reader.feed("<tool_call>\n<function=weather>\n<parameter=city>\n")
    assert gathered([CallBegun("f"), *reader.feed("one ")])[1] == [("f", "one ")]
    assert gathered([CallBegun("f"), *reader.feed('"two"\n</par')])[1] == [("f", '\\"two\\"')]
    assert not reader.feed("am")
    assert gathered([CallBegun("f"), *reader.feed("x")])[1] == [("f", "\\n</paramx")]


def test_an_id_that_the_model_writes_is_the_calls_unless_it_was_there() -> None:
    text = written("kimi_k2", [("weather", {}), ("clock", {})])
    reader = CallReader(taught("kimi_k2"), SCHEMAS, wrapping=taught("kimi_k2"))
    events = [*reader.feed(text.replace("clock:1", "weather:0")), *reader.finish()]
    assert [e.id for e in events if isinstance(e, CallBegun)] == ["functions.weather:0", None]
    reader = CallReader(taught("mistral"), SCHEMAS, wrapping=taught("mistral"))
    calls = [f"[TOOL_CALLS]clock[CALL_ID]{written}[ARGS]{{}}" for written in ("8a1b2c3d4", "8a1")]
    events = [*reader.feed("".join(calls)), *reader.finish()]
    assert [e.id for e in events if isinstance(e, CallBegun)] == ["8a1b2c3d4", None]


# --- grammars -------------------------------------------------------------------------------------


BYTES = single_bytes()
SHORT = {"type": "string", "maxLength": 4}
BOUND: dict[str, Any] = {
    "type": "object",
    "$defs": {"Kind": {"enum": ["a b", "null", 7, None]}},
    "properties": {
        "city": SHORT,
        "days": {"type": "integer", "minimum": -20, "maximum": 300},
        "kind": {"$ref": "#/$defs/Kind"},
        "ok": {"type": "boolean"},
        "some": {
            "anyOf": [SHORT, {"type": "null"}, {"type": "integer", "maximum": 9, "minimum": 0}]
        },
        "where": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}, "s": SHORT},
            "required": ["x"],
            "additionalProperties": False,
        },
        "tags": {"type": "array", "items": SHORT, "maxItems": 2},
    },
    "required": ["city", "where"],
    "additionalProperties": False,
}
OFFERED = [
    OfferedFunction("weather", BOUND),
    OfferedFunction("weather_now", {"type": "object", "properties": {}}),
]
FORCED = [row.name for row in FORMATS if not taught(row.name).is_forced_as_json]
LED = [row.name for row in FORMATS if taught(row.name).grammar_triggers]


def bound(constraint: Constraint | None) -> BoundGrammar:
    assert constraint is not None
    spec = GrammarSpec(constraint.kind, constraint.source, is_lenient=constraint.is_lenient)
    return compile_grammar(spec).bind(BYTES)


def accepts(grammar: BoundGrammar, text: str) -> bool:
    matcher = grammar.matcher()
    return all(matcher.consume(byte) for byte in text.encode()) and matcher.is_accepting()


def walk(grammar: BoundGrammar, chance: random.Random, max_bytes: int = 3000) -> str:
    """A random text of the language, byte by byte."""
    matcher, said = grammar.matcher(), bytearray()
    mask = np.empty(BYTES.num_words, np.uint32)
    while len(said) < max_bytes:
        matcher.mask(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        allowed = [int(byte) for byte in np.flatnonzero(bits) if byte < 256]
        if not allowed or (matcher.is_accepting() and chance.random() < 0.5):
            assert matcher.is_accepting()
            return said.decode()
        byte = chance.choice(allowed)
        assert matcher.consume(byte)
        said.append(byte)
    raise AssertionError(f"no end: {said[-100:]!r}")


@pytest.mark.parametrize("name", FORCED)
def test_random_texts_of_a_forced_grammar_are_calls_that_are_valid(name: str) -> None:
    grammar = bound(forced_constraint(taught(name).forced(OFFERED), is_lenient=False))
    schemas = {function.name: function.schema for function in OFFERED}
    chance, names = random.Random(7), set[str]()
    for _ in range(25):
        text = walk(grammar, chance)
        reader = CallReader(taught(name), schemas, wrapping=taught(name))
        content, ((function, arguments),) = gathered([*reader.feed(text), *reader.finish()])
        assert not content.strip(), text
        assert not validation_errors(json.dumps(schemas[function]), arguments), (text, arguments)
        names.add(function)
    assert names == {"weather", "weather_now"}


@pytest.mark.parametrize("kind", ["plain", "typed", "unicode", "lines"])
@pytest.mark.parametrize("name", [name for name in FORCED if name not in ("command_r7b", "lfm2")])
def test_a_forced_grammar_accepts_what_the_template_writes(name: str, kind: str) -> None:
    """Blanks and the order of keys apart, which are the grammar's own."""
    known = SCHEMA["properties"]
    given = {k: v for k, v in ARGUMENTS[kind].items() if k in ("city", "note")}
    given = {key: given[key] for key in known if key in given}
    grammar = bound(forced_constraint(taught(name).forced([OfferedFunction("weather", SCHEMA)])))
    text = written(name, [("weather", given)]).strip()
    compact = json.dumps(given, ensure_ascii=False, separators=(",", ":"))
    for spaced in (json.dumps(given, ensure_ascii=False), json.dumps(given)):
        text = text.replace(spaced, compact)
    assert accepts(grammar, text), text
    assert not accepts(grammar, text.replace("weather", "wetter"))


@pytest.mark.parametrize("name", LED)
def test_calls_by_choice_are_led_by_a_grammar_in_each_format(name: str) -> None:
    offered = [OfferedFunction("weather", BOUND)]
    forced = bound(forced_constraint(taught(name).forced(offered), is_lenient=False))
    text = walk(forced, random.Random(3))
    grammar = bound(calls_constraint(taught(name), offered, is_lenient=False))
    for before in ("", "Well. "):
        assert accepts(grammar, before) and accepts(grammar, before + text)
        assert not accepts(grammar, before + text.replace("weather", "wetter"))
        assert not accepts(grammar, before + text.replace("city", "town"))
    assert accepts(grammar, text + "\n" + text)
    one = bound(calls_constraint(taught(name), offered, is_parallel=False))
    assert accepts(one, "Well. " + text) and not accepts(one, text + text)


def test_calls_by_choice_without_a_mark_before_them_cannot_be_led() -> None:
    functionary = taught("functionary_v3_2")
    assert calls_constraint(functionary, OFFERED) is None
    with pytest.raises(InvalidProgram, match="strict"):
        calls_constraint(functionary, OFFERED, is_lenient=False)
    with pytest.raises(InvalidProgram, match="parallel_tool_calls"):
        calls_constraint(functionary, OFFERED, is_parallel=False)


def test_a_forced_call_comes_behind_the_reasoning() -> None:
    content = taught("qwen3_coder").forced([OfferedFunction("clock", {"type": "object"})])
    grammar = bound(forced_constraint(content, behind=("</think>", "\n\n")))
    call_ = "<tool_call>\n<function=clock>\n</function>\n</tool_call>"
    assert accepts(grammar, f"Hm <tool_call>.</think>\n\n{call_}")
    assert not accepts(grammar, call_) and not accepts(grammar, f"</think>\n\n{call_}x")
