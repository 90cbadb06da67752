"""Tool calls of earlier turns in templates: what is rendered; nobody smuggles tokens in."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from program_harness import ProgramHarness, gen, text
from templates import CHATML, HERMES_TOOLS, LLAMA3_TOOLS, MISTRAL_TOOLS, R1_TOOLS

from stemma.errors import InvalidProgram
from stemma.frontend.protocol import ir
from stemma.frontend.protocol.chat_message import Message
from stemma.runtime.programs.context import ProgramContext
from stemma.runtime.tokenizer.chat_template import NO_TEMPLATE_ARGS, ChatTemplate, TemplateArgs
from stemma.runtime.tokenizer.tokenizer import Tokenizer
from stemma.runtime.tokenizer.transcript import Transcript
from stemma.runtime.tokenizer.whole_chat import chat_prompt

Load = Callable[[str], ChatTemplate]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
SPECIALS = ("<bos>", "<eos>", "<pad>", "<unk>")


@pytest.fixture
def load(tmp_path: Path, byte_tokenizer: Tokenizer) -> Load:
    def load(source: str) -> ChatTemplate:
        (tmp_path / "chat_template.jinja").write_text(source)
        return ChatTemplate(tmp_path, byte_tokenizer)

    return load


def fields(arguments: str = '{"city": "Ulm"}', **more: Any) -> str:
    function = {"name": "weather", "arguments": arguments}
    return json.dumps(
        {"tool_calls": [{"id": "call12345", "type": "function", "function": function}], **more}
    )


def answer(tool_call_id: str = "call12345") -> str:
    return json.dumps({"tool_call_id": tool_call_id, "name": "weather"})


def called(content: str | None = None, arguments: str = '{"city": "Ulm"}') -> Message:
    if content is None:
        return Message("assistant", "", fields(arguments, content=None))
    return Message("assistant", content, fields(arguments))


ASKED = Message("user", "Weather?")
RAIN = Message("tool", "rain", answer())


def written(
    template: ChatTemplate,
    messages: Sequence[Message],
    args: TemplateArgs = NO_TEMPLATE_ARGS,
    *,
    opens_turn: bool = False,
) -> str:
    return chat_prompt(template, messages, args, opens_turn=opens_turn).text


def conversation(template: ChatTemplate, *, content: str | None) -> str:
    chat = [ASKED, called(content), RAIN]
    return written(template, chat, TemplateArgs.of(TOOLS), opens_turn=True)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (HERMES_TOOLS, '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": '
         '{"city": "Ulm"}}\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nrain\n'
         "</tool_response><|im_end|>\n<|im_start|>assistant\n"),
        (LLAMA3_TOOLS, '{"name": "weather", "parameters": {"city": "Ulm"}}<|eot_id|>'
         "<|start_header_id|>ipython<|end_header_id|>\n\nrain<|eot_id|>"
         "<|start_header_id|>assistant<|end_header_id|>\n\n"),
        (MISTRAL_TOOLS, '[INST] Weather?[/INST][TOOL_CALLS] [{"name": "weather", "arguments": '
         '{"city": "Ulm"}, "id": "call12345"}]<eos>[TOOL_RESULTS] rain[/TOOL_RESULTS]'),
        (R1_TOOLS, '<|User|>Weather?<|Assistant|>call weather\n{"city": "Ulm"}<eos><|Tool|>rain'
         "<|Assistant|><think>\n"),
    ],
    ids=["hermes", "llama3", "mistral", "r1"],
)  # fmt: skip
def test_a_turn_of_calls_and_its_result_are_written_as_the_template_does(
    load: Load, source: str, expected: str
) -> None:
    assert conversation(load(source), content=None).endswith(expected)


def test_text_beside_calls_is_kept_where_the_template_has_a_place_for_it(load: Load) -> None:
    text = conversation(load(HERMES_TOOLS), content="Let me see.")
    assert "assistant\nLet me see.\n<tool_call>" in text
    text = conversation(load(LLAMA3_TOOLS), content="Let me see.")
    assert "Let me see." not in text and '"parameters": {"city": "Ulm"}}<|eot_id|>' in text


def test_a_template_that_refuses_calls_says_so_in_its_own_words(load: Load) -> None:
    call = json.loads(fields())["tool_calls"][0]
    two = json.dumps({"content": None, "tool_calls": [call, call]})
    with pytest.raises(InvalidProgram, match="single tool-calls"):
        written(load(LLAMA3_TOOLS), [ASKED, Message("assistant", "", two)])
    short = json.dumps({"content": None, "tool_calls": [{**call, "id": "x"}]})
    with pytest.raises(InvalidProgram, match="nine characters"):
        written(load(MISTRAL_TOOLS), [ASKED, Message("assistant", "", short)])


def test_arguments_that_are_no_object_reach_the_template_as_text(load: Load) -> None:
    text = written(load(HERMES_TOOLS), [ASKED, called(arguments='{"city')])
    assert '"arguments": "{\\"city"}' in text


@pytest.mark.parametrize("given", ["", " ", "null"])
def test_arguments_that_are_nothing_are_an_empty_object(load: Load, given: str) -> None:
    template = load("{% for m in messages %}{{ m.tool_calls[0].function.arguments | tojson }}"
                    "{% endfor %}")  # fmt: skip
    assert written(template, [called(arguments=given)]) == "{}"


@pytest.mark.parametrize("given", ['{"city": "Ul', "[1]", "7"])
def test_a_template_that_wants_an_object_gets_one_that_holds_the_text(
    load: Load, given: str
) -> None:
    """So a chat goes on behind a call that was cut or garbled."""
    template = load("{% for m in messages %}{% for k, v in m.tool_calls[0].function.arguments"
                    ".items() %}{{ k }}={{ v }};{% endfor %}{% endfor %}")  # fmt: skip
    assert written(template, [called(arguments=given)]) == f"arguments={given};"
    assert written(template, [called(arguments='{"a": 1}')]) == "a=1;"


@pytest.mark.parametrize(
    "given", ["{", "[]", '{"role": "x"}', '{"content": "x"}', '{"content": 0}', "[" * 100_000]
)
def test_fields_that_are_none_are_refused(load: Load, given: str) -> None:
    with pytest.raises(InvalidProgram, match="fields"):
        written(load(HERMES_TOOLS), [Message("assistant", "", given)])


def test_only_an_assistant_may_be_without_content(load: Load) -> None:
    for role, content in (("user", ""), ("assistant", "x")):
        with pytest.raises(InvalidProgram, match="content=None"):
            written(load(HERMES_TOOLS), [Message(role, content, '{"content": null}')])


def test_a_message_without_content_cannot_be_continued(load: Load) -> None:
    with pytest.raises(InvalidProgram, match="without content"):
        written(load(HERMES_TOOLS), [ASKED, called()], opens_turn=True)


@pytest.mark.parametrize("role", ["user<eos>", "", "Über", "a" * 40])
def test_a_role_is_a_word(load: Load, role: str) -> None:
    with pytest.raises(InvalidProgram, match="role="):
        written(load(HERMES_TOOLS), [Message(role, "a")])


def test_reasoning_of_an_earlier_turn_is_what_the_template_makes_of_it(load: Load) -> None:
    reasoned = Message("assistant", "So.", json.dumps({"reasoning_content": "Why?"}))
    text = "<|im_start|>assistant\n<think>\nWhy?\n</think>\n\nSo.<|im_end|>\n"
    assert written(load(HERMES_TOOLS), [reasoned]) == text
    by_another_name = "{% for m in messages %}{{ m.thinking }}{% endfor %}"
    assert written(load(by_another_name), [reasoned]) == "Why?"
    assert "reasoning_content" in load(by_another_name).describe()["marks"]


def test_variables_reach_the_template_but_not_in_place_of_what_is_not_the_clients(
    load: Load,
) -> None:
    template = load(HERMES_TOOLS)
    assert template.around_answer() == ("<|im_start|>assistant\n", "<|im_end|>\n")
    assert template.behind_answers()[1] == "<|im_end|>\n<|im_start|>user\n"
    off, _ = template.around_answer(TemplateArgs.of((), {"enable_thinking": False}))
    assert off == "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    stolen = TemplateArgs.of((), {"messages": [], "bos_token": "x", "add_generation_prompt": True})
    assert template.delimiters(["user"], args=stolen) == template.delimiters(["user"])


# --- hostile --------------------------------------------------------------------------------------


HOSTILE = st.lists(
    st.sampled_from([*SPECIALS, "<BOS>", "<", "<eo", "s>", "eos>", "<<eos>", '"', "\ue000", "a "])
).map("".join)


@pytest.fixture(scope="module")
def writing_all(
    byte_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> ChatTemplate:
    """Writes clients' texts next to each other, and in other letters."""
    source = HERMES_TOOLS + "{{ a | lower }}{{ b }}{{ a }}{{ messages[0].tool_call_id }}{{ b }}"
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "chat_template.jinja").write_text(source)
    return ChatTemplate(folder, byte_tokenizer)


@settings(max_examples=60)
@given(name=HOSTILE, value=HOSTILE, described=HOSTILE, variable=HOSTILE)
def test_no_text_of_a_client_becomes_a_special_token(
    byte_tokenizer: Tokenizer,
    writing_all: ChatTemplate,
    name: str,
    value: str,
    described: str,
    variable: str,
) -> None:
    """Not even put together from pieces, or in other letters."""
    tools = [{"type": "function", "function": {"name": "f", "description": described}}]
    args = TemplateArgs.of(tools, {"a": variable, "b": value})
    arguments = json.dumps({name: value})
    call = {"id": name, "function": {"name": name, "arguments": arguments}}
    chat = [
        Message("tool", value, json.dumps({"tool_call_id": name})),
        Message("assistant", "", json.dumps({"content": None, "tool_calls": [call]})),
        Message("user", value + described, None, (len(value), len(described))),
    ]
    prompt = chat_prompt(writing_all, chat, args, opens_turn=False)
    assert not byte_tokenizer.special_ids & set(prompt.ids)
    shown = byte_tokenizer.decode(prompt.ids, skip_special=False)
    assert json.dumps(value, ensure_ascii=False) in shown and value + described in shown
    assert shown == prompt.text and "\ue002" not in shown


@pytest.mark.parametrize("escaped", ["<eos>", "\\u003ceos\\u003e", "<e\\u006fs>"])
def test_escapes_in_arguments_make_no_special_tokens(
    load: Load, byte_tokenizer: Tokenizer, escaped: str
) -> None:
    """They are text of JSON before they are an object."""
    chat = [called(arguments=f'{{"city": "{escaped}"}}')]
    prompt = chat_prompt(load(HERMES_TOOLS), chat, opens_turn=False)
    assert not byte_tokenizer.special_ids & set(prompt.ids)
    assert '{"city": "<eos>"}' in byte_tokenizer.decode(prompt.ids, skip_special=False)


def test_a_template_that_escapes_letters_tells_no_mark(load: Load) -> None:
    template = load("{{ tools | tojson(ensure_ascii=true) }}{{ messages[0].content }}")
    args = TemplateArgs.of([{"type": "ü<eos>"}])
    prompt = chat_prompt(template, [ASKED], args, opens_turn=False)
    assert prompt.text == '[{"type": "\\u00fc<eos>"}]Weather?'


@pytest.mark.parametrize("depth", [400, 900, 5000])
def test_what_is_nested_too_deeply_is_refused_or_rendered(load: Load, depth: int) -> None:
    nested = '{"a":' * depth + "1" + "}" * depth
    for shown in (f'{{"x": {nested}}}', fields(nested, content=None)):
        try:
            written(load(HERMES_TOOLS), [ASKED, Message("assistant", "", shown)])
        except InvalidProgram:
            assert depth > 300


def test_the_templates_own_special_tokens_stay(load: Load, byte_tokenizer: Tokenizer) -> None:
    prompt = chat_prompt(load(MISTRAL_TOOLS), [ASKED, called()], opens_turn=False)
    assert prompt.ids[-1] in byte_tokenizer.special_ids


def test_a_placeholder_in_a_clients_text_is_no_place_for_a_content(load: Load) -> None:
    text = written(load(HERMES_TOOLS), [ASKED, called(arguments='{"city": "\\ue0000\\ue001"}')])
    assert "\ue0000\ue001" in text


def test_a_template_that_writes_a_content_twice_is_refused_to_programs(load: Load) -> None:
    template = load("{{ messages[0].content }}{{ messages[0].content }}")
    with pytest.raises(InvalidProgram, match="twice"):
        template.delimiters(["user"])
    assert written(template, [ASKED]) == "Weather?Weather?"


def test_what_is_kept_of_renderings_is_bounded(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stemma.runtime.tokenizer.chat_template._MAX_CACHED_CHARS", 100_000)
    template = load(HERMES_TOOLS)
    for number in range(50):
        template.delimiters(["user"] * 100, args=TemplateArgs.of([f"{number}{'y' * 10_000}"]))
        assert sum(len(m) for delimiters in template._cache.values() for m in delimiters) <= 100_000


# --- token identity -------------------------------------------------------------------------------


def make_world(context: ProgramContext, folder: Path, source: str) -> ProgramContext:
    tokenizer = Tokenizer(make_byte_tokenizer(folder), 260)
    (folder / "chat_template.jinja").write_text(source)
    return replace(context, tokenizer=tokenizer, template=ChatTemplate(folder, tokenizer))


@pytest.mark.parametrize("said", ["", "Let me see."])
def test_a_turn_of_calls_sent_back_gets_the_ids_it_was_generated_with(
    context: ProgramContext, tmp_path: Path, said: str
) -> None:
    """Ids that no encoding of the text gives stand for it here."""
    context = make_world(context, tmp_path, HERMES_TOOLS)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
    output = f"{said}\n{call}" if said else call
    asked = chat_prompt(context.template, [ASKED])
    known = asked.ids + asked.ids[:3]
    context.assistant_turns.remember("", asked.digest, output, known)
    harness = ProgramHarness(context)
    harness.on(0, chat(ASKED, called(said or None), RAIN), gen())
    prompt = harness.queue.open[-1].prompt
    assert prompt[: len(known)] == known, "the ids that were remembered"
    decoded = context.tokenizer.decode(prompt[len(known) :], skip_special=False)
    assert decoded.startswith("<|im_end|>\n<|im_start|>user\n<tool_response>\nrain")


def chat(*messages: Message) -> Callable[[int, int], ir.Op]:
    return lambda branch, seq: ir.Chat(branch, seq, None, messages)


def test_a_chat_is_the_beginning_of_its_branch(context: ProgramContext, tmp_path: Path) -> None:
    harness = ProgramHarness(make_world(context, tmp_path, HERMES_TOOLS))
    harness.on(0, text("a"), chat(ASKED), gen(), end=True)
    assert "beginning of its branch" in harness.failures[0] and harness.is_done


def test_what_opens_an_answer_may_be_another_behind_a_result(load: Load) -> None:
    ((none, after_user, after_tool),) = load(R1_TOOLS).describe()["generation_prompts"]
    assert not none and after_user == after_tool == "<|Assistant|><think>\n"
    source = R1_TOOLS.replace("{% if add_", "{% if messages[-1].role != 'tool' and add_")
    assert load(source).describe()["generation_prompts"] == [[{}, after_user, ""]]
    switched = load(HERMES_TOOLS).describe()["generation_prompts"]
    assert [given for given, *_ in switched] == [
        {}, {"enable_thinking": False}, {"enable_thinking": True},
    ]  # fmt: skip
    assert switched[1][1].endswith("</think>\n\n") and switched[1][1] == switched[1][2]


def test_a_template_that_wants_a_content_that_there_is_not_gets_none_or_an_empty_one(
    load: Load,
) -> None:
    searching = (
        "{% for m in messages %}{% if '</think>' in m.content + '' %}{% endif %}{% endfor %}"
    )
    turns = [ASKED, called()]
    assert written(load(searching + HERMES_TOOLS), turns) == written(load(HERMES_TOOLS), turns)
    asking = "{% for m in messages %}{{ m.content + '' if m.content is not none }}|{% endfor %}"
    assert written(load(asking), turns) == "Weather?||"


def test_a_message_without_content_is_never_the_word_none(load: Load) -> None:
    assert written(
        load("{% for m in messages %}{{ m.content }}|{% endfor %}"), [ASKED, called()]
    ) == ("Weather?||")


# --- calls of programs ----------------------------------------------------------------------------


@pytest.mark.parametrize("source", [HERMES_TOOLS, LLAMA3_TOOLS], ids=["hermes", "llama3"])
def test_calls_read_in_what_was_generated_keep_its_ids(
    load: Load, byte_tokenizer: Tokenizer, source: str
) -> None:
    """Two rounds; the template would write other whitespace than the model has."""
    said = {
        HERMES_TOOLS: '<tool_call>\n{"name":"weather","arguments":{"city":"Ulm"}}\n</tool_call>',
        LLAMA3_TOOLS: '{"name":"weather","parameters":{"city":"Ulm"}}',
    }[source]
    transcript = Transcript(byte_tokenizer, load(source), TemplateArgs.of(TOOLS))
    transcript.begin_role("user")
    transcript.append_text("Weather?")
    transcript.end_role()
    shown = ""
    for result in ("rain", "sun"):
        transcript.begin_role("assistant")
        before = transcript.ids[:]
        ids = byte_tokenizer.encode_array(said)
        transcript.append_ids(ids, said)
        change = transcript.end_role_as(fields(content=None))
        assert not change.replace and "weather" not in change.text
        assert transcript.ids[: len(before) + len(ids)] == before + ids
        transcript.begin_role("tool", answer())
        transcript.append_text(result)
        transcript.end_role()
        shown = byte_tokenizer.decode(transcript.ids, skip_special=False)
    assert shown.count(said) == 2 and "rain" in shown and "sun" in shown


def test_what_a_template_refuses_as_calls_stays_the_text_that_it_is(
    load: Load, byte_tokenizer: Tokenizer
) -> None:
    call = json.loads(fields())["tool_calls"][0]
    transcript = Transcript(byte_tokenizer, load(LLAMA3_TOOLS))
    transcript.begin_role("user")
    transcript.append_text("Weather?")
    transcript.end_role()
    transcript.begin_role("assistant")
    transcript.append_text("two calls")
    transcript.end_role_as(json.dumps({"content": None, "tool_calls": [call, call]}))
    assert byte_tokenizer.decode(transcript.ids, skip_special=False).endswith("two calls<|eot_id|>")


def test_fields_close_only_what_an_assistant_generated(
    load: Load, byte_tokenizer: Tokenizer
) -> None:
    transcript = Transcript(byte_tokenizer, load(HERMES_TOOLS))
    with pytest.raises(InvalidProgram, match="no message of an assistant"):
        transcript.end_role_as(fields())
    transcript.begin_role("user")
    with pytest.raises(InvalidProgram, match="no message of an assistant"):
        transcript.end_role_as(fields())
    with pytest.raises(InvalidProgram, match="between messages"):
        transcript.use_tools(json.dumps(TOOLS))


def test_tools_told_later_are_as_if_they_were_told_first(
    load: Load, byte_tokenizer: Tokenizer
) -> None:
    template = load(HERMES_TOOLS)
    first = Transcript(byte_tokenizer, template, TemplateArgs.of(TOOLS))
    later = Transcript(byte_tokenizer, template)
    for transcript in (first, later):
        transcript.begin_role("user")
        transcript.append_text("Weather?")
        transcript.end_role()
    assert later.use_tools(json.dumps(TOOLS)).replace
    assert first.ids == later.ids
    early = Transcript(byte_tokenizer, template)
    assert early.use_tools(json.dumps(TOOLS)).text == ""
    early.begin_role("user")
    early.append_text("Weather?")
    early.end_role()
    assert early.ids == first.ids
    for wrong in ("{", "{}", "[1]", "[" * 100_000):
        with pytest.raises(InvalidProgram, match="tools"):
            early.use_tools(wrong)
    with pytest.raises(InvalidProgram, match="knows none"):
        Transcript(byte_tokenizer, load(CHATML)).use_tools(json.dumps(TOOLS))


def test_text_in_a_message_without_content_is_refused_and_what_the_template_drops_is_not(
    load: Load, byte_tokenizer: Tokenizer
) -> None:
    transcript = Transcript(byte_tokenizer, load(HERMES_TOOLS))
    transcript.begin_role("assistant", fields(content=None))
    with pytest.raises(InvalidProgram, match="without content"):
        transcript.append_text("x")
    transcript = Transcript(byte_tokenizer, load(LLAMA3_TOOLS))
    transcript.begin_role("user")
    transcript.append_text("Weather?")
    transcript.end_role()
    transcript.begin_role("assistant", fields())
    transcript.append_text("Let me see.")
    transcript.end_role()
    shown = byte_tokenizer.decode(transcript.ids, skip_special=False)
    assert "Let me see." not in shown and shown.endswith('{"city": "Ulm"}}<|eot_id|>')
