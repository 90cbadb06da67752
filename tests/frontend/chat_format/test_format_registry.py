"""The table of formats, and which row a template has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chats import KINDS, TEMPLATES, call, make_tokenizer
from templates import CHATML, HERMES_TOOLS, LLAMA3_TOOLS, MISTRAL_TOOLS, R1_TOOLS

from stemma.frontend.chat_format.call_reader import CallReader
from stemma.frontend.chat_format.chat_format import ChatFormat
from stemma.frontend.chat_format.reading import gathered, read_message
from stemma.frontend.chat_format.reasoning import PAIRS
from stemma.frontend.chat_format.registry import (
    FORMATS,
    STRUCTURE_MARKS,
    TOOL_CALL_PARSERS,
    KnownFormat,
    detected,
)
from stemma.frontend.protocol.chat_message import Message
from stemma.runtime.tokenizer.chat_template import ChatTemplate
from stemma.runtime.tokenizer.tokenizer import Tokenizer
from stemma.runtime.tokenizer.whole_chat import chat_prompt
from stemma.server.api.openai.chat_messages import fitting

FOUND = {
    "command_r7b_tools": "command_r7b",
    "deepseek_v31_tools": "deepseek_v31",
    "deepseek_v3_tools": "deepseek_v3",
    "functionary_v31_tools": "functionary_v3_1",
    "functionary_v32_tools": "functionary_v3_2",
    "gemma4_tools": "gemma4",
    "glm47_tools": "glm47",
    "glm4": "glm45",
    "granite33_tools": "granite",
    "hermes_tool_use": "hermes",
    "kimi_k2_tools": "kimi_k2",
    "lfm2_tools": "lfm2",
    "llama31_tools": "llama3",
    "minimax_m2_tools": "minimax_m2",
    "mistral_nemo": "mistral",
    "mistral_v3_tools": "mistral",
    "phi4_mini_tools": "phi4_mini_json",
    "qwen25_tools": "hermes",
    "qwen35_needs_a_query": "qwen3_coder",
    "qwen3_coder_tools": "qwen3_coder",
    "qwen3_thinking": "hermes",
    "seed_oss_tools": "seed_oss",
}
ONE_CALL = {"llama31_tools"}  # fails over several in a message
HARMONIES = {"gpt_oss_like", "harmony"}
REASONING = {
    "command_r7b_tools": "cohere",
    "deepseek_v31_tools": "think",
    "gemma4_tools": "gemma4",
    "granite33_tools": "granite",
    "glm47_tools": "think",
    "glm4": "think",
    "minimax_m2_tools": "think",
    "qwen35_needs_a_query": "think",
    "qwen3_thinking": "think",
    "seed_oss_tools": "seed_oss",
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Without any token of calls or reasoning."""
    folder = tmp_path_factory.mktemp("plain")
    kind = "metaspace_always"
    assert kind in KINDS
    return Tokenizer(folder, make_tokenizer(folder, kind))


def chat_format(folder: Path, tokenizer: Tokenizer, source: str) -> ChatFormat:
    (folder / "chat_template.jinja").write_text(source)
    template = ChatTemplate(folder, tokenizer)
    info = {"chat_format": template.describe(), "template_knows_tools": template.knows_tools}
    return ChatFormat.of(json.loads(json.dumps(info)), "auto", "auto")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_has_the_format_and_the_reasoning_of_its_own_marks(
    tmp_path: Path, tokenizer: Tokenizer, name: str
) -> None:
    """None has one that it does not write."""
    marks = [m for row in FORMATS for group in row.marks for m in group if m in TEMPLATES[name]]
    row = detected(marks, marks)
    assert (None if row is None else row.name) == FOUND.get(name)
    found = chat_format(tmp_path, tokenizer, TEMPLATES[name])
    assert (found.tool_format is None) == (name not in FOUND)
    assert (found.channels is not None) == (name in HARMONIES)
    assert not (name in HARMONIES and found.is_unknown)
    assert found.takes_one_call == (name in ONE_CALL)
    tags = PAIRS.get(REASONING.get(name, ""))
    if name in FOUND:
        assert (found.reasoning and found.reasoning.end) == (tags and tags.end)


@pytest.mark.parametrize(
    ("source", "is_unknown"),
    [(HERMES_TOOLS, False), (LLAMA3_TOOLS, False), (MISTRAL_TOOLS, False), (CHATML, False),
     ("{{ tools }}{{ messages[0].content }}", True), (R1_TOOLS + "{{ tools }}", True)],
)  # fmt: skip
def test_a_template_that_knows_tools_and_has_no_mark_is_none_that_is_known(
    tmp_path: Path, tokenizer: Tokenizer, source: str, is_unknown: bool
) -> None:
    found = chat_format(tmp_path, tokenizer, source)
    assert found.is_unknown == is_unknown
    if is_unknown:
        assert found.tool_format is None
        assert read_message('<tool_call>{"name": "f", "arguments": {}}', found).calls == ()


def test_several_calls_reach_a_template_that_takes_one_as_messages_of_their_own(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Else a turn of calls that the model made could not be sent back."""
    found = chat_format(tmp_path, tokenizer, TEMPLATES["llama31_tools"])
    calls = [call("weather", "a", city="Ulm"), call("clock", "b")]
    given = [
        Message("user", "?"),
        Message("assistant", "", json.dumps({"content": None, "tool_calls": calls})),
        Message("tool", "rain", json.dumps({"tool_call_id": "a"})),
        Message("tool", "noon", json.dumps({"tool_call_id": "b"})),
    ]
    text = chat_prompt(ChatTemplate(tmp_path, tokenizer), fitting(given, found)).text
    places = [text.index(word) for word in ('"weather"', "rain", '"clock"', "noon")]
    assert places == sorted(places)


@pytest.mark.parametrize("row", FORMATS, ids=[row.name for row in FORMATS])
def test_the_example_of_a_row_is_a_call_in_it_alone(row: KnownFormat) -> None:
    taught = row.make([mark for group in row.marks for mark in group])
    reader = CallReader(taught, wrapping=taught)
    _, ((name, arguments),) = gathered([*reader.feed(row.example), *reader.finish()])
    assert (name, json.loads(arguments)) == ("weather", {"city": "Ulm"})


def test_names_are_different_and_tokens_are_shown() -> None:
    assert len(set(TOOL_CALL_PARSERS)) == len(TOOL_CALL_PARSERS)
    assert all(token in STRUCTURE_MARKS for row in FORMATS for token in row.tokens)
    assert {"harmony", "deepseek_v3", "qwen3_coder", "glm45", "kimi_k2"} <= set(TOOL_CALL_PARSERS)
