"""Messages over HTTP as a chat template is to see them, whether it knows calls or not."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from stemma.errors import InvalidRequest
from stemma.frontend.chat_format.chat_format import ChatFormat
from stemma.frontend.chat_format.mistral import Mistral
from stemma.frontend.protocol.chat_message import Message
from stemma.frontend.protocol.ir import MAX_FIELDS_CHARS
from stemma.server.api.openai.chat_messages import ChatMessage, fitting

KNOWING = ChatFormat(knows_tools=True, knows_calls=True, knows_reasoning=True)
ASK = {"role": "user", "content": "Weather?"}


def call(name: str, call_id: str, arguments: str = '{"city":"Ulm"}') -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


CALLS = {"role": "assistant", "tool_calls": [call("weather", "a"), call("clock", "b", "{}")]}
RESULTS = [
    {"role": "tool", "tool_call_id": "b", "content": "noon"},
    {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "rain"}]},
]


def messages(*given: dict[str, Any], chat_format: ChatFormat = KNOWING) -> list[Message]:
    plain = [ChatMessage.model_validate(item).plain(i) for i, item in enumerate(given)]
    return fitting(plain, chat_format)


def test_a_template_that_knows_calls_sees_them_with_the_names_of_results() -> None:
    found = messages(ASK, CALLS, *RESULTS)
    assert [(m.role, m.content) for m in found[1:]] == [
        ("assistant", ""), ("tool", "noon"), ("tool", "rain"),
    ]  # fmt: skip
    assert found[0] == Message("user", "Weather?")
    fields = [json.loads(m.fields or "") for m in found[1:]]
    assert fields[0] == {"content": None, "tool_calls": CALLS["tool_calls"]}
    assert fields[1] == {"tool_call_id": "b", "name": "clock"}
    assert fields[2] == {"tool_call_id": "a", "name": "weather"}


def test_a_result_has_the_name_of_the_call_before_it_where_ids_come_again() -> None:
    """Clients count calls of each turn anew; models write an id twice in one."""
    twice = {"role": "assistant", "tool_calls": [call("weather", "a"), call("clock", "a", "{}")]}
    once = {"role": "assistant", "tool_calls": [call("stocks", "a")]}
    result = {"role": "tool", "tool_call_id": "a", "content": "x"}
    found = messages(ASK, twice, result, result, once, result, result)
    names = [json.loads(m.fields or "")["name"] for m in found if m.role == "tool"]
    assert names == ["weather", "clock", "stocks", "stocks"]


def test_ids_of_other_clients_are_made_those_that_a_template_takes() -> None:
    """Mistral's templates refuse all but nine letters and digits."""
    calls = [call("weather", "call_0123456789"), call("clock", "a1B2c3D4e", "{}")]
    told = [{"role": "tool", "tool_call_id": each["id"], "content": ""} for each in reversed(calls)]
    said = {"role": "assistant", "tool_calls": calls}
    found = messages(ASK, said, *told, chat_format=replace(KNOWING, tool_format=Mistral()))
    first, second = (each["id"] for each in json.loads(found[1].fields or "")["tool_calls"])
    assert re.fullmatch("[a-zA-Z0-9]{9}", first) and second == "a1B2c3D4e"
    assert [json.loads(m.fields or "")["tool_call_id"] for m in found[2:]] == [second, first]


def test_one_that_knows_none_gets_text() -> None:
    said = {**CALLS, "content": "Let me see.", "reasoning_content": "Hm."}
    found = messages(ASK, said, *RESULTS, ASK, chat_format=ChatFormat())
    assert found == [
        Message("user", "Weather?"),
        Message(
            "assistant",
            'Let me see.\n{"name":"weather","arguments":{"city":"Ulm"}}\n'
            '{"name":"clock","arguments":{}}',
        ),
        Message("user", "clock: noon\nweather: rain"),
        Message("user", "Weather?"),
    ]


def test_reasoning_goes_to_templates_that_read_it() -> None:
    said = {"role": "assistant", "content": "So.", "reasoning_content": "Hm."}
    assert json.loads(messages(ASK, said)[1].fields or "") == {"reasoning_content": "Hm."}
    assert messages(ASK, said, chat_format=ChatFormat())[1] == Message("assistant", "So.")


@pytest.mark.parametrize("behind", [[], [{"role": "assistant", "content": "x"}]])
def test_calls_without_results_are_refused_unless_the_user_goes_on(
    behind: list[dict[str, Any]],
) -> None:
    with pytest.raises(InvalidRequest, match="results"):
        messages(ASK, CALLS, *behind)
    assert [message.role for message in messages(ASK, CALLS, ASK)] == ["user", "assistant", "user"]


def test_calls_beyond_all_bounds_are_refused() -> None:
    large = {"role": "assistant", "tool_calls": [call("f", "a", "x" * MAX_FIELDS_CHARS)]}
    with pytest.raises(InvalidRequest, match=r"messages\.1"):
        messages(ASK, large, *RESULTS)
