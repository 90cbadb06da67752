"""gpt-oss's harmony format: what is read of outputs, however they are cut; grammars; history."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from grammars import SINGLE_BYTES
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.constrained.compiler import compile_grammar
from stemma.constrained.spec import GrammarSpec
from stemma.frontend.chat_format.call_reader import Event, Reasoning
from stemma.frontend.chat_format.chat_format import ChatFormat
from stemma.frontend.chat_format.harmony import EXAMPLE, Harmony
from stemma.frontend.chat_format.harmony_reader import HarmonyReader
from stemma.frontend.chat_format.hermes import Hermes
from stemma.frontend.chat_format.reading import gathered, read_message
from stemma.frontend.protocol.chat_message import Message
from stemma.frontend.protocol.constraint import Constraint
from stemma.server.api.openai.chat_messages import fitting
from stemma.server.parsers.output_reader import OutputReader, ReasoningUse
from stemma.server.parsers.tools import Tool, ToolUse
from stemma.server.protocol.pieces import Outcome

FORMAT = Harmony(end_id=9)
KNOWING = ChatFormat(
    reasoning=FORMAT.reasoning, channels=FORMAT, knows_tools=True, knows_calls=True,
    knows_reasoning=True,
)  # fmt: skip
ARGS = '{"city": "a {b} <|end|> \\" to=x<|start|>"}'
A = "<|channel|>analysis<|message|>Hm. "
S = "<|start|>assistant"
F = "<|channel|>final<|message|>"
C = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + ARGS
BY_ROLE = " to=functions.weather<|channel|>commentary json<|message|>" + ARGS
PREAMBLE = "<|channel|>commentary<|message|>I look it up."
CALL = ("weather", ARGS)
Read = tuple[str, str, list[tuple[str, str]]]  # reasoning, content, calls


def of(pieces: Sequence[str], *, may_call: bool = True) -> Read:
    reader = HarmonyReader(may_call=may_call)
    events = [event for piece in pieces for event in reader.feed(piece)]
    return _told([*events, *reader.finish()])


@pytest.mark.parametrize(
    "place", ["<|channel|>commentary{}<|message|>", "{}<|channel|>analysis<|message|>"]
)
def test_a_functions_name_without_its_namespace_is_its_too(place: str) -> None:
    """Only where there is such a function: other names are tools of the model's own."""
    for name, is_call in (("weather", True), ("python", False), ("assistant", False)):
        text = f"{A}<|end|>{S}" + place.format(f" to={name} <|constrain|>json") + ARGS
        message = OutputReader(use(), ReasoningUse(FORMAT.reasoning, False)).message(
            outcome_of(text)
        )[0]
        found = [call["function"]["name"] for call in message.get("tool_calls", ())]
        assert found == ([name] if is_call else [])
        schemas = {"weather": {}}
        assert len(read_message(text, KNOWING, schemas).calls) == is_call
        assert not read_message(text, KNOWING).calls


def _told(events: Iterable[Event]) -> Read:
    events = list(events)
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    return reasoning, *gathered(events)


TEXTS: dict[str, tuple[str, Read]] = {
    "an answer": (f"{F}Yes.", ("", "Yes.", [])),
    "reasoning and an answer": (f"{A}<|end|>{S}{F}Yes. <|return|>", ("Hm. ", "Yes. ", [])),
    "the documentation's example": (EXAMPLE, ("", "", [("weather", '{"city": "Ulm"}')])),
    "a call": (C, ("", "", [CALL])),
    "reasoning and a call": (f"{A}<|end|>{S}{C}<|call|>", ("Hm. ", "", [CALL])),
    "a call named before its channel": (f"{A}<|end|>{S}{BY_ROLE}", ("Hm. ", "", [CALL])),
    "such a call at once": (BY_ROLE, ("", "", [CALL])),
    "a call without a type": (
        "<|channel|>commentary to=functions.clock<|message|>{}", ("", "", [("clock", "{}")]),
    ),
    "a preamble": (
        f"{A}<|end|>{S}{PREAMBLE}<|end|>{S}{C}", ("Hm. ", "I look it up.", [CALL]),
    ),
    "two thoughts, two texts": (
        f"{A}<|end|>{S}{PREAMBLE}<|end|>{S}{A}<|end|>{S}{F}So.",
        ("Hm. \n\nHm. ", "I look it up.\n\nSo.", []),
    ),
    "two calls": (f"{C}<|call|>{S}{C}", ("", "", [CALL, CALL])),
    "a cut thought": ("<|channel|>analysis<|message|>Because <|en", ("Because <|en", "", [])),
    "a cut header": (f"{A}<|end|>{S}<|channel|>fin", ("Hm. ", "", [])),
    "a cut call": (C[:-5], ("", "", [("weather", ARGS[:-5])])),
    "a missing end": (f"{A}{F}Yes.", ("Hm. ", "Yes.", [])),
    "a missing role": (f"{A}<|end|>{F}Yes.", ("Hm. ", "Yes.", [])),
    "blanks between": (f"{A}<|end|> \n{S}{F}Yes.", ("Hm. ", "Yes.", [])),
    "no header": ("Yes, to=it <b>.", ("", "Yes, to=it <b>.", [])),
    "a text that goes on": ("and so on.<|end|>", ("", "and so on.", [])),
    "text behind an end": (f"{F}Yes.<|end|> And", ("", "Yes.\n\n And", [])),
    "to a tool of another kind": (
        "<|channel|>commentary to=python code<|message|>1+1", ("", "1+1", []),
    ),
    "to a tool while thinking": (
        "<|channel|>analysis to=browser.open code<|message|>{}", ("{}", "", []),
    ),
    "arguments that are no object": (
        "<|channel|>commentary to=functions.f<|message|> 7<|end|>", ("", "", [("f", " 7")]),
    ),
    "JSON without its end": (
        f'{C[:-1]}<|call|>{S}<|channel|>final<|message|>So.', ("", "So.", [("weather", ARGS[:-1])]),
    ),
    "text behind a call": (f"{C} and<|call|> so", ("", " and\n\n so", [CALL])),
    "no channel": (f"<|message|>Yes.<|end|>{S}<|message|>No.", ("", "Yes.\n\nNo.", [])),
    "no name": ("<|channel|>commentary to=functions.<|message|>{}", ("", "{}", [])),
    "nothing": ("", ("", "", [])),
    "an empty call": (
        "<|channel|>commentary to=functions.f json<|message|>", ("", "", [("f", "")]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_an_output_is_read_the_same_wherever_it_is_cut(name: str) -> None:
    text, expected = TEXTS[name]
    assert of([text]) == expected
    assert of([*text]) == expected, "character by character"
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1, 31):
            assert of([text[:first], text[first:second], text[second:]]) == expected


SNIPPETS = [A, F, C, S, BY_ROLE, PREAMBLE, "<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|",
            "<|channel|>", "<|message|>", "<|constrain|>", " to=functions.f", "final", "text ",
            "{}", "{", "7", "\n", " ", "analysis"]  # fmt: skip


@settings(max_examples=300)
@given(st.lists(st.sampled_from(SNIPPETS), max_size=8).map("".join), st.booleans(), st.data())
def test_any_text_is_read_the_same_wherever_it_is_cut(
    text: str, may_call: bool, data: st.DataObject
) -> None:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[i:j] for i, j in zip([0, *places], [*places, len(text)], strict=True)]
    assert of(pieces, may_call=may_call) == of([text], may_call=may_call)


def test_text_is_told_as_it_comes() -> None:
    reader = HarmonyReader(may_call=True)
    kinds = [
        [type(event).__name__ for event in reader.feed(piece)]
        for piece in ("<|channel|>analysis<|message|>", "Hm", f". <|end|>{S}{C[:-5]}", C[-5:])
    ]
    assert kinds == [[], ["Reasoning"], ["Reasoning", "CallBegun", "Arguments"], ["Arguments"]]


def test_a_header_that_never_ends_is_content() -> None:
    text = "<|channel|>" + "x" * 5000
    assert of([text]) == ("", text, []) == of([*text])


def test_without_tools_there_are_no_calls() -> None:
    assert of([C.replace(ARGS, "{}")], may_call=False) == ("", "{}", [])


def test_programs_read_whole_outputs_too() -> None:
    found = read_message(f"{A}<|end|>{S}{C}", KNOWING)
    assert (found.reasoning, found.content) == ("Hm. ", "")
    assert [(call.name, call.arguments) for call in found.calls] == [CALL]


# --- over HTTP ------------------------------------------------------------------------------------


def _tool(name: str, strict: bool | None = None) -> Tool:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    }
    function = {"name": name, "parameters": schema, "strict": strict}
    return Tool.model_validate({"type": "function", "function": function})


TOOLS = [_tool("weather"), _tool("clock")]
NAMED = {"type": "function", "function": {"name": "clock"}}


def use(
    choice: Any = "auto",
    tools: Sequence[Tool] = TOOLS,
    chat_format: ChatFormat = KNOWING,
    **fields: Any,
) -> ToolUse:
    if isinstance(choice, dict):
        from pydantic import TypeAdapter

        from stemma.server.parsers.tools import ToolChoice

        choice = TypeAdapter(ToolChoice).validate_python(choice)
    return ToolUse(tools, choice, chat_format, **fields)


def outcome_of(text: str, ids: Sequence[int] = ()) -> Outcome:
    return Outcome(0, text, {"finish_reason": "stop", "output_ids": list(ids)})


@pytest.mark.parametrize("name", TEXTS)
def test_a_streamed_message_is_the_whole_one(name: str) -> None:
    text, (reasoning, content, calls) = TEXTS[name]
    how = ReasoningUse(FORMAT.reasoning, False)
    whole, reason = OutputReader(use(), how).message(outcome_of(text))
    assert whole.get("reasoning_content", "") == reasoning and (whole["content"] or "") == content
    found = [
        (c["function"]["name"], c["function"]["arguments"]) for c in whole.get("tool_calls", ())
    ]
    assert found == calls and reason == ("tool_calls" if calls else "stop")
    for is_streamed in (True, False):
        reader = OutputReader(use(), ReasoningUse(FORMAT.reasoning, False, is_streamed=is_streamed))
        deltas = [delta for piece in text for delta in reader.feed(piece)]
        last, last_reason = reader.finish(outcome_of(text))
        deltas += last
        for field, expected in (("reasoning_content", reasoning), ("content", content)):
            assert "".join(delta.get(field, "") for delta in deltas) == expected
        parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
        assert len([part for part in parts if "id" in part]) == len(calls)
        assert last_reason == reason


def test_reasoning_may_be_left_out_or_told_in_one_piece_or_as_content() -> None:
    text = f"{A}<|end|>{S}{F}Yes."
    hidden = OutputReader(use(), ReasoningUse(FORMAT.reasoning, False, is_told=False))
    assert hidden.message(outcome_of(text))[0] == {"content": "Yes."}
    joined = OutputReader(use())
    assert joined.message(outcome_of(text))[0] == {"content": "Hm. Yes."}
    late = OutputReader(use(), ReasoningUse(FORMAT.reasoning, False, is_streamed=False))
    assert not late.feed(A) and not late.feed(f"<|end|>{S}")
    assert late.feed(f"{F}Yes") == [{"reasoning_content": "Hm. "}, {"content": "Yes"}]


@pytest.mark.parametrize(
    ("text", "ids", "tokens"),
    [(f"{A}<|end|>{S}{F}Yes.", [1, 2, 9, 3], 3), (A, [1, 2], 2), (f"{F}Yes.", [1, 2], 0)],
)
def test_tokens_of_reasoning_are_counted(text: str, ids: list[int], tokens: int) -> None:
    reader = OutputReader(use(), ReasoningUse(FORMAT.reasoning, False))
    outcome = outcome_of(text, ids)
    reader.message(outcome)
    assert reader.num_reasoning_tokens(outcome) == tokens


# --- which format ---------------------------------------------------------------------------------

MARKS = {"<|channel|>": 7, "<|start|>": 6, "<|message|>": 8, "<|end|>": 9, "tool_calls": None}


def described(
    marks: dict[str, int | None], written: Sequence[str] | None = None, **parsers: Any
) -> ChatFormat:
    info = {
        "chat_format": {
            "marks": marks,
            "written_marks": [*marks] if written is None else written,
            "variables": [],
            "generation_prompts": [[{}, "", ""]],
        },
        "template_knows_tools": True,
    }
    given = {"tool_call_parser": "auto", "reasoning_parser": "auto", **parsers}
    return ChatFormat.of(info, given["tool_call_parser"], given["reasoning_parser"])


def test_it_is_chosen_by_the_marks_of_a_template_and_never_by_default() -> None:
    found = described(MARKS)
    assert found.channels == FORMAT and found.tool_format is None and not found.is_unknown
    for missing in ("<|channel|>", "<|start|>", "<|message|>"):
        rest = {mark: i for mark, i in MARKS.items() if mark != missing}
        assert described(rest).channels is None and described(rest).is_unknown
    assert described(MARKS, tool_call_parser="hermes").channels is None
    named = described({}, tool_call_parser="harmony")
    assert named.channels == Harmony() and named.reasoning is not None and not named.is_unknown
    assert described(MARKS, reasoning_parser="none").reasoning is None


def test_a_tokenizer_that_has_its_tokens_does_not_choose_it() -> None:
    found = described(MARKS, ["tool_calls"])
    assert found.channels is None and found.is_unknown
    assert type(described(MARKS, ["<tool_call>"]).tool_format) is Hermes
    assert described(MARKS, ["tool_calls"], tool_call_parser="harmony").channels == FORMAT


def test_its_marks_in_a_template_count_before_others() -> None:
    found = described({**MARKS, "<tool_call>": 1})
    assert found.channels == FORMAT and found.tool_format is None


def test_a_call_that_must_come_or_be_strict_is_not_refused_for_its_format() -> None:
    found = described(MARKS)
    for choice in ("required", NAMED):
        assert accepts(use(choice, chat_format=found).constraint(), call("clock"))
    strict = use(tools=[_tool("weather", strict=True)], chat_format=found)
    assert strict.may_call and strict.constraint() is not None and not strict.warnings


# --- grammars -------------------------------------------------------------------------------------


def accepts(constraint: Constraint | None, text: str) -> bool:
    assert constraint is not None
    spec = GrammarSpec(constraint.kind, constraint.source or "", is_lenient=constraint.is_lenient)
    matcher = compile_grammar(spec).bind(SINGLE_BYTES).matcher()
    return all(matcher.consume(byte) for byte in text.encode()) and matcher.is_accepting()


def call(name: str, arguments: str = '{"city":"Ulm"}') -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"


def test_a_forced_call_comes_at_once_or_behind_one_message() -> None:
    forced = use("required").constraint()
    for before in ("", f"{A}<|end|>{S}", f"{PREAMBLE}<|end|>{S}"):
        assert accepts(forced, before + call("weather")) and accepts(forced, before + call("clock"))
        assert not accepts(forced, before + call("other")) and not accepts(forced, before)
        assert not accepts(forced, before + call("weather", '{"town":"Ulm"}'))
        assert not accepts(forced, before + call("weather") + " and more")
    assert not accepts(forced, f"{A}<|end|>{S}{F}No.")
    assert not accepts(forced, f"{A}<|end|>{S}{A}<|end|>{S}{call('clock')}")


def test_a_named_function_alone_can_be_called() -> None:
    named = use(NAMED).constraint()
    assert accepts(named, call("clock")) and not accepts(named, call("weather"))
    assert accepts(named, f"{A}<|end|>{S}{call('clock')}")


def test_calls_by_choice_are_held_to_strict_schemas_and_left_alone_else() -> None:
    assert use().constraint() is None and use(is_parallel=False).constraint() is None
    strict = use(tools=[_tool("weather", strict=True)]).constraint()
    by_role = f"{S} to=functions.weather<|channel|>commentary json<|message|>"
    assert accepts(strict, f"{A}<|end|>{S}{F}No.") and accepts(strict, "")
    assert accepts(strict, f"{A}<|end|>{S}{call('weather')}")
    assert accepts(strict, f'{A}<|end|>{by_role}{{"city":"Ulm"}}')
    for text in (call("weather", '{"town":"Ulm"}'), call("clock"), f'{by_role}{{"town":"Ulm"}}'):
        assert not accepts(strict, f"{A}<|end|>{text}")


def test_json_is_that_of_the_final_message() -> None:
    schema = json.dumps({"type": "integer"})
    final = FORMAT.in_final(Constraint("json_schema", schema))
    for before in ("", f"{A}<|end|>{S}"):
        assert accepts(final, f"{before}{F}7")
        assert accepts(final, f"{before}<|channel|>final <|constrain|>json<|message|>7")
        assert not accepts(final, f"{before}{F}x") and not accepts(final, before)
    assert accepts(FORMAT.in_final(Constraint("json_object", "")), f"{F}{{}}")
    either = use(tools=[_tool("weather")], own=Constraint("json_schema", schema)).document_or_call()
    for before in ("", f"{A}<|end|>{S}"):
        assert accepts(either, f"{before}{F}7") and accepts(either, before + call("weather"))
        assert not accepts(either, f"{before}{F}x") and not accepts(either, before + call("clock"))
    assert FORMAT.in_final(Constraint("regex", "a")) is None


# --- history --------------------------------------------------------------------------------------


def _called(*names: str, content: str = "", reasoning: str | None = None) -> Message:
    calls = [
        {"id": f"id{i}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for i, name in enumerate(names)
    ]
    fields: dict[str, Any] = {"tool_calls": calls}
    if not content:
        fields["content"] = None
    if reasoning is not None:
        fields["reasoning_content"] = reasoning
    return Message("assistant", content, json.dumps(fields))


def _result(number: int) -> Message:
    return Message("tool", f"r{number}", json.dumps({"tool_call_id": f"id{number}"}))


def test_a_messages_calls_come_one_by_one_each_before_its_result() -> None:
    """The format has one call a message, and templates write the first alone."""
    given = [Message("user", "Hi"), _called("a", "b", reasoning="Hm."), _result(1), _result(0),
             Message("assistant", "So.")]  # fmt: skip
    user, first, its, second, other, last = fitting(given, KNOWING)
    assert (user, last) == (given[0], given[-1])
    fields = json.loads(first.fields or "")
    assert [c["function"]["name"] for c in fields["tool_calls"]] == ["a"]
    assert fields["reasoning_content"] == "Hm." and its.content == "r0"
    fields = json.loads(second.fields or "")
    assert [c["function"]["name"] for c in fields["tool_calls"]] == ["b"]
    assert "reasoning_content" not in fields and other.content == "r1"


def test_calls_with_one_id_have_a_result_each() -> None:
    """Else the second call would have none, which templates refuse."""
    called = _called("a", "b")
    twice = called._replace(fields=(called.fields or "").replace("id1", "id0"))
    results = [_result(0), _result(0)._replace(content="r1")]
    found = fitting([Message("user", "Hi"), twice, *results], KNOWING)
    assert [message.role for message in found[1:]] == ["assistant", "tool"] * 2
    assert [message.content for message in found[2::2]] == ["r0", "r1"]


def test_what_was_said_beside_a_call_joins_the_reasoning() -> None:
    """Templates refuse a message that has both."""
    both = fitting([_called("a", content="Look.", reasoning="Hm."), _result(0)], KNOWING)[0]
    fields = json.loads(both.fields or "")
    assert both.content == "" and fields["content"] is None
    assert fields["reasoning_content"] == "Hm.\n\nLook."
    said = fitting([_called("a", content="Look."), _result(0)], KNOWING)[0]
    assert said.content == "Look." and "reasoning_content" not in json.loads(said.fields or "")
