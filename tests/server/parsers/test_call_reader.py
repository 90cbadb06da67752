"""Calls, reasoning and content as they are read out of an output, however it is cut."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.frontend.chat_format.call_reader import (
    Arguments,
    CallBegun,
    CallReader,
    Content,
    NamedReader,
)
from stemma.frontend.chat_format.chat_format import ChatFormat
from stemma.frontend.chat_format.hermes import Hermes
from stemma.frontend.chat_format.json_calls import JsonCalls
from stemma.frontend.chat_format.llama3 import Llama3
from stemma.frontend.chat_format.matching import ValueScanner
from stemma.frontend.chat_format.mistral import Mistral
from stemma.frontend.chat_format.named_object import Forced
from stemma.frontend.chat_format.reading import gathered
from stemma.frontend.chat_format.reasoning import PAIRS, ReasoningTags, tags_of
from stemma.frontend.chat_format.registry import FORMATS as FORMAT_ROWS
from stemma.frontend.chat_format.registry import format_of
from stemma.frontend.chat_format.tagged_calls import TaggedCalls
from stemma.frontend.chat_format.tool_format import OfferedFunction, ToolFormat
from stemma.server.parsers.output_reader import OutputReader, ReasoningUse
from stemma.server.parsers.tools import Tool, ToolUse
from stemma.server.protocol.pieces import Outcome

Read = tuple[str, list[tuple[str, str]]]
FORMATS: dict[str, ToolFormat] = {
    "hermes": Hermes(),
    "llama3": Llama3(),
    "mistral": Mistral(),
    "forced": Forced(Hermes()),
    **{row.name: row.make(()) for row in FORMAT_ROWS},
}
A, B = '{"city": "a {b} \\" </tool_call> [TOOL_CALLS]"}', "{}"
CALL_A, CALL_B = ("weather", A), ("clock", B)
H = '<tool_call>\n{"name": "weather", "arguments": ' + A + "}\n</tool_call>"
H2 = '<tool_call>{"name":"clock","arguments":{}}</tool_call>'
L = '{"name": "weather", "parameters": ' + A + "}"
L2 = '{"type": "function", "name": "clock", "parameters": {}}'
M = '[TOOL_CALLS] [{"name": "weather", "arguments": ' + A + "}]"
M2 = '[{"name": "weather", "arguments": ' + A + '}, {"name":"clock","arguments":{},"id":"x"}]'


def read(tool_format: ToolFormat, *pieces: str) -> Read:
    reader = CallReader(tool_format)
    events = [event for piece in pieces for event in reader.feed(piece)]
    return gathered([*events, *reader.finish()])


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", "No tool.", "No tool.", []),
        ("hermes", " \n", " \n", []),
        ("hermes", f"Wait. {H}", "Wait.", [CALL_A]),
        ("hermes", f"{H}\n{H2}\n", "", [CALL_A, CALL_B]),
        ("hermes", f"A {H} b\n{H2} c", "A  b\n c", [CALL_A, CALL_B]),
        ("hermes", f"{H} b <tool_call>\n", " b <tool_call>", [CALL_A]),
        ("hermes", f"<tool_call> {H2}", "<tool_call>", [CALL_B]),
        ("hermes", f"a <tool_call> b {H2}", "a <tool_call> b", [CALL_B]),
        ("hermes", H2.removesuffix("}</tool_call>"), "", [CALL_B]),
        ("hermes", H2.removesuffix("_call>") + " x", "</tool x", [CALL_B]),
        ("hermes", H[:60], "", [("weather", H[45:60])]),
        ("hermes", '<tool_call>{"name": "f", "arguments": ', None, []),
        ("hermes", '<tool_call>{"name": "a b", "arguments": {}}</tool_call>', None, []),
        ("hermes", '<tool_call>{"name": "f", "arguments": x}</tool_call>', None, []),
        ("hermes", '<tool_call>{"name": "f", "arguments": 7}</tool_call>', "", [("f", "7")]),
        ("llama3", L, "", [CALL_A]),
        ("llama3", f" {L}; {L2}", "", [CALL_A, CALL_B]),
        ("llama3", f"<|python_tag|>{L}\n{L2}", "", [CALL_A, CALL_B]),
        ("llama3", f"See: <|python_tag|>{L2} then", "See:  then", [CALL_B]),
        ("llama3", f"An object: {L}", None, []),
        ("llama3", '{"answer": 7}', None, []),
        ("llama3", f"{L} and", " and", [CALL_A]),
        ("llama3", '<|python_tag|>search.call(query="x")', None, []),
        ("mistral", M, "", [CALL_A]),
        ("mistral", f"[TOOL_CALLS]{M2} so", " so", [CALL_A, CALL_B]),
        ("mistral", f"Hm. [TOOL_CALLS]weather[ARGS]{A}", "Hm.", [CALL_A]),
        ("mistral", f"[TOOL_CALLS]weather[ARGS]{A}[TOOL_CALLS]clock[CALL_ID]8a1[ARGS]{{}}", "",
         [CALL_A, CALL_B]),
        ("mistral", "[TOOL_CALLS]clock{}", "", [CALL_B]),
        ("mistral", "[TOOL_CALLS] and more", None, []),
        ("mistral", "[1, 2] [TOOL", None, []),
        ("forced", '{"name":"clock","arguments":{}}', "", [CALL_B]),
        ("forced", '{"name":"clock","arguments":{}', "", [CALL_B]),
        ("forced", '{"name":"clo', None, []),
    ],
)  # fmt: skip
def test_calls_are_read_as_they_were_written(
    name: str, text: str, content: str | None, calls: list[tuple[str, str]]
) -> None:
    expected = (text if content is None else content, calls)
    assert read(FORMATS[name], text) == expected
    assert read(FORMATS[name], *text) == expected, "character by character"


SNIPPETS = [H, H2, L, L2, M, M2, "[TOOL_CALLS]", "<tool_call>", "</tool_call>", "<|python_tag|>",
            "[TOOL_CALLS]clock[ARGS]{}", '{"name": "f", "arguments": ', "}", "]", "{", '"', "\\",
            ",", ";", " ", "\n", "text ", "<", "[", "<think>", "</think>", "7", "weather", "'", "=",
            ":", "(", ")", "<function=", "<parameter=", ">", "</parameter>", "</function>",
            "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", '<|"|>', "call:", "None",
            *(row.example for row in FORMAT_ROWS)]  # fmt: skip
TEXTS = st.lists(st.sampled_from(SNIPPETS), max_size=8).map("".join)


@given(st.sampled_from(sorted(FORMATS)), TEXTS, st.data())
def test_what_is_read_does_not_depend_on_how_the_text_was_cut(
    name: str, text: str, data: st.DataObject
) -> None:
    pieces = data.draw(cuts(text))
    assert read(FORMATS[name], *pieces) == read(FORMATS[name], text)


@st.composite
def cuts(draw: Callable[..., Any], text: str) -> list[str]:
    """The text in pieces, some perhaps empty."""
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=6)))
    return [text[i:j] for i, j in zip([0, *places], [*places, len(text)], strict=True)]


@given(TEXTS)
def test_text_without_calls_is_content_as_it_is(text: str) -> None:
    for tool_format in FORMATS.values():
        content, calls = read(tool_format, text)
        if not calls:
            assert content == text


def test_a_call_is_told_of_as_soon_as_its_name_is_known_and_arguments_as_they_come() -> None:
    reader = CallReader(Hermes())
    assert list(reader.feed('Hm. <tool_call>\n{"name": "weather"')) == [Content("Hm.")]
    assert list(reader.feed(', "arguments": {"ci')) == [CallBegun("weather"), Arguments('{"ci')]
    assert list(reader.feed('ty": ')) == [Arguments('ty": ')]
    assert list(reader.feed('"x"}}')) == [Arguments('"x"}')]
    assert list(reader.feed("\n</tool_call>")) == [] == list(reader.finish())


def test_a_named_functions_arguments_are_the_output() -> None:
    reader = NamedReader("weather")
    assert not reader.feed("") and not reader.finish()
    assert list(reader.feed('{"a')) == [CallBegun("weather"), Arguments('{"a')]
    assert list(reader.feed('":1}')) == [Arguments('":1}')]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@settings(max_examples=60)
@given(JSON, st.sampled_from(["", "}", ", 1", "] "]), st.data())
def test_a_values_end_is_found_wherever_it_is_cut(
    value: Any, behind: str, data: st.DataObject
) -> None:
    text = json.dumps(value, ensure_ascii=False)
    scanner, read = ValueScanner(), 0
    for piece in data.draw(cuts(text + behind)):
        end = scanner.end_in(piece)
        if end is not None:
            assert read + end == len(text)
            return
        read += len(piece)
    assert not behind and not isinstance(value, str | list | dict)


# --- reasoning ------------------------------------------------------------------------------------


THINK = ReasoningTags("<think>", "</think>", end_id=9)
PLAIN = ToolUse((), "none", ChatFormat())


def message(
    text: str, *, starts_inside: bool = False, pieces: Sequence[str] | None = None, **use: Any
) -> dict[str, Any]:
    """Whole, or put together from a stream."""
    reader = OutputReader(PLAIN, ReasoningUse(THINK, starts_inside, **use))
    outcome = Outcome(0, text, {"finish_reason": "stop", "output_ids": []})
    if pieces is None:
        return reader.message(outcome)[0]
    deltas = [delta for piece in pieces for delta in reader.feed(piece)]
    deltas += reader.finish(outcome)[0]
    whole: dict[str, Any] = {"content": ""}
    for delta in deltas:
        for name, value in delta.items():
            assert value
            whole[name] = whole.get(name, "") + value
    return whole


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("<think>\nWhy?\n</think>\n\nSo. ", False, "Why?", "So. "),
        ("\nWhy?</think>So.", True, "Why?", "So."),
        (" <think></think> So.", False, None, "So."),
        ("So.", False, None, "So."),
        (" So <think>no</think>", False, None, " So <think>no</think>"),
        ("<thin", False, None, "<thin"),
        ("Why? </thi", True, "Why? </thi", ""),
        ("<think>Why? ", False, "Why?", ""),
        ("a </think b </think> c </think>", True, "a </think b", "c </think>"),
        ("", True, None, ""),
    ],
)
def test_reasoning_is_split_off_by_its_tags(
    text: str, inside: bool, reasoning: str | None, content: str
) -> None:
    expected = {"content": content}
    if reasoning is not None:
        expected["reasoning_content"] = reasoning
    assert message(text, starts_inside=inside) == expected
    assert message(text, starts_inside=inside, pieces=text) == expected
    hidden = message(text, starts_inside=inside, is_told=False)
    assert hidden == {"content": content}


@settings(max_examples=60)
@given(TEXTS, st.booleans(), st.booleans(), st.data())
def test_reasoning_does_not_depend_on_how_the_text_was_cut(
    text: str, inside: bool, is_streamed: bool, data: st.DataObject
) -> None:
    pieces = data.draw(cuts(text))
    streamed = message(text, starts_inside=inside, pieces=pieces, is_streamed=is_streamed)
    assert streamed == message(text, starts_inside=inside)


def test_reasoning_that_is_not_streamed_comes_in_one_piece() -> None:
    reader = OutputReader(PLAIN, ReasoningUse(THINK, True, is_streamed=False))
    assert not reader.feed("Why") and not reader.feed("? ")
    assert reader.feed("</think>So") == [{"reasoning_content": "Why?"}, {"content": "So"}]


@pytest.mark.parametrize(
    ("text", "inside", "ids", "tokens"),
    [
        ("a</think>b", True, [1, 2, 9, 3], 3),
        ("<think>a</think>b", False, [1, 2, 9, 3], 3),
        ("a", True, [1, 2, 3], 3),
        ("b", False, [1, 2], 0),
        ("a</think>b", True, [1, 2], 0),
    ],
)
def test_tokens_of_reasoning_are_counted_by_the_closing_tag(
    text: str, inside: bool, ids: list[int], tokens: int
) -> None:
    reader = OutputReader(PLAIN, ReasoningUse(THINK, inside))
    outcome = Outcome(0, text, {"finish_reason": "stop", "output_ids": ids})
    reader.message(outcome)
    assert reader.num_reasoning_tokens(outcome) == tokens


@settings(max_examples=60)
@given(TEXTS, st.booleans(), st.data())
def test_a_streamed_message_is_the_whole_one(text: str, inside: bool, data: st.DataObject) -> None:
    """Reasoning, content and calls together; ids are drawn."""
    chat_format = ChatFormat(Hermes(), THINK, knows_tools=True, knows_calls=True)
    tool = Tool.model_validate({"type": "function", "function": {"name": "weather"}})
    use = ToolUse([tool], "auto", chat_format)
    outcome = Outcome(0, text, {"finish_reason": "stop", "output_ids": []})
    whole, reason = OutputReader(use, ReasoningUse(THINK, inside)).message(outcome)
    reader, deltas = OutputReader(use, ReasoningUse(THINK, inside)), list[dict[str, Any]]()
    for piece in data.draw(cuts(text)):
        deltas += reader.feed(piece)
    last, last_reason = reader.finish(outcome)
    content = "".join(delta.get("content", "") for delta in [*deltas, *last])
    reasoning = "".join(delta.get("reasoning_content", "") for delta in [*deltas, *last])
    calls: list[tuple[str, str]] = []
    for part in (part for delta in [*deltas, *last] for part in delta.get("tool_calls", ())):
        if "id" in part:
            assert part["index"] == len(calls) and part["type"] == "function"
            calls.append((part["function"]["name"], part["function"]["arguments"]))
        else:
            assert part["index"] == len(calls) - 1
            calls[-1] = calls[-1][0], calls[-1][1] + part["function"]["arguments"]
    found = [
        (c["function"]["name"], c["function"]["arguments"]) for c in whole.get("tool_calls", ())
    ]
    assert (content, reasoning, calls) == (
        whole["content"] or "", whole.get("reasoning_content", ""), found,
    )  # fmt: skip
    assert reason == last_reason == ("tool_calls" if calls else "stop")


# --- which format ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("marks", "kind"),
    [
        (["<tool_call>", "tool_calls"], Hermes),
        (["<|python_tag|>"], Llama3),
        (["ipython"], Llama3),
        (["[TOOL_CALLS]", "[ARGS]"], Mistral),
        ([], type(None)),
        (["<tool_call>", "<function=", "<parameter="], TaggedCalls),
        (["<tool_call>", "<function="], JsonCalls),
        (["<tool_call>", "<arg_key>"], TaggedCalls),
    ],
)
def test_the_format_is_found_by_the_marks_of_the_template(marks: list[str], kind: type) -> None:
    assert type(format_of("auto", marks)) is kind
    assert type(format_of("llama3", marks)) is Llama3
    assert format_of("none", marks) is None


def test_a_templates_own_marks_count_before_its_tokenizers() -> None:
    marks = ["<|python_tag|>", "<tool_call>", "[TOOL_CALLS]"]
    assert type(format_of("auto", marks, ["<|python_tag|>"])) is Llama3
    assert type(format_of("auto", marks, ["other"])) is Mistral


def test_the_newer_format_of_mistral_is_told_by_its_mark() -> None:
    newer = format_of("auto", ["[TOOL_CALLS]", "[ARGS]"])
    assert newer is not None
    (tag,) = newer.tags([OfferedFunction("f", {})], is_parallel=True)
    assert tag["begin"] == "[TOOL_CALLS]f[ARGS]"


def test_ids_are_as_the_templates_want_them() -> None:
    assert Hermes().new_id().startswith("call_")
    assert len(Mistral().new_id()) == 9 and Mistral().new_id().isalnum()


def test_tags_are_found_by_the_marks() -> None:
    assert tags_of("auto", {}) is None and tags_of("none", {"</think>": 3}) is None
    assert tags_of("auto", {"</think>": 3}) == ReasoningTags("<think>", "</think>", 3)
    assert tags_of("mistral", {}) == ReasoningTags("[THINK]", "[/THINK]", None)
    both = {"</think>": 3, "<|END_THINKING|>": None}
    assert tags_of("auto", both, {"<|END_THINKING|>"}) == PAIRS["cohere"], "the template's own"


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [("<a>", False), ("<a><think>\n", True), ("<think>\n\n</think>\n\n", False)],
)
def test_a_prompt_may_open_the_reasoning(prompt: str, is_open: bool) -> None:
    prompts = (({}, "<a>", "<b>"), ({"enable_thinking": True}, prompt, "<b><think>"))
    chat_format = ChatFormat(reasoning=THINK, generation_prompts=prompts)
    assert chat_format.opens_reasoning({"enable_thinking": True, "x": 1}) == is_open
    assert not chat_format.opens_reasoning({}) and not chat_format.will_reason({})
    assert chat_format.opens_reasoning({"enable_thinking": True}, after_tool=True)
    assert not ChatFormat(generation_prompts=prompts).opens_reasoning({"enable_thinking": True})


@pytest.mark.parametrize(
    ("by_default", "off", "on", "reasons"),
    [
        ("<a>", "<a><think></think>", "<a>", (True, False, True)),  # the model opens it itself
        ("<a>", "<a>", "<a><think>", (False, False, True)),
        ("<a></think>", "<a></think>", "<a><think>", (False, False, True)),
        ("<a><think>", "<a><think></think>", "<a><think>", (True, False, True)),
    ],
)
def test_whether_an_answer_begins_with_reasoning_is_told_by_the_prompts(
    by_default: str, off: str, on: str, reasons: tuple[bool, bool, bool]
) -> None:
    switched = (({}, by_default), ({"thinking": False}, off), ({"thinking": True}, on))
    prompts = tuple((given, prompt, "<b>") for given, prompt in switched)
    chat_format = ChatFormat(reasoning=THINK, generation_prompts=prompts)
    asked: list[dict[str, Any]] = [{}, {"thinking": False}, {"thinking": True}]
    assert tuple(map(chat_format.will_reason, asked)) == reasons
    assert not ChatFormat(generation_prompts=prompts).will_reason({"thinking": True})
    always = ChatFormat(reasoning=THINK, generation_prompts=(({}, "<think>\n", ""),))
    assert always.will_reason({}) and not always.will_reason({}, after_tool=True)
