"""Ollama's bodies in OpenAI's words: options, thinking, and calls with their results."""

from __future__ import annotations

from typing import Any

import pytest

from stemma.errors import InvalidRequest
from stemma.server.api.ollama.options import Options
from stemma.server.api.ollama.schema import ChatBody, GenerateBody
from stemma.server.protocol.task import UNBOUNDED

USER = {"role": "user", "content": "Hi"}


def called(*names: str) -> dict[str, Any]:
    calls = [{"function": {"name": name, "arguments": {"of": name}}} for name in names]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def test_options_have_their_names_here() -> None:
    options = Options.model_validate(
        {"temperature": 0.5, "top_k": 7, "repeat_penalty": 1.5, "seed": 3, "stop": ["a"],
         "num_ctx": 4096, "mirostat": 0, "mirostat_tau": 5.0, "num_predict": -1}
    )  # fmt: skip
    fields = {name: value for name, value in options.fields().items() if value is not None}
    assert fields == {"temperature": 0.5, "top_k": 7, "repetition_penalty": 1.5, "seed": 3,
                      "stop": ["a"]}  # fmt: skip
    assert options.max_tokens is None and Options(num_predict=5).max_tokens == 5
    assert Options(seed=-1).fields()["seed"] is None
    assert Options(repeat_penalty=1.5, repeat_last_n=0).fields()["repetition_penalty"] is None


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"mirostat": 1}, "options.mirostat"),
        ({"typical_p": 0.5}, "options.typical_p"),
        ({"repeat_penalty": 1.2, "repeat_last_n": 64}, "options.repeat_last_n"),
    ],
)
def test_options_that_would_change_an_answer_are_refused(
    options: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Options.model_validate(options).fields()
    assert caught.value.field == field


def test_results_find_their_calls_by_name_and_else_in_order() -> None:
    named = {"role": "tool", "tool_name": "b", "content": "B"}
    plain = {"role": "tool", "content": "A"}
    messages = [USER, called("a", "b"), named, plain, called("a"), plain]
    body = ChatBody.model_validate({"messages": messages})
    told = body.chat().messages
    first, second = told[1].tool_calls, told[4].tool_calls
    assert first is not None and second is not None
    assert first[0].function.arguments == '{"of": "a"}'
    assert [told[2].tool_call_id, told[3].tool_call_id] == [first[1].id, first[0].id]
    assert told[5].tool_call_id == second[0].id != first[0].id


@pytest.mark.parametrize(
    ("think", "effort", "variables"),
    [
        (None, None, None),
        (False, "none", None),
        ("high", "high", None),
        (True, None, {"enable_thinking": True}),
    ],
)
def test_thinking_is_told_to_the_template(think: Any, effort: Any, variables: Any) -> None:
    chat = ChatBody.model_validate({"messages": [USER], "think": think}).chat()
    assert (chat.reasoning_effort, chat.chat_template_kwargs) == (effort, variables)


def test_a_completion_is_as_long_as_fits_unless_told() -> None:
    assert GenerateBody(prompt="x").completion().max_tokens == UNBOUNDED
    body = GenerateBody.model_validate({"prompt": "x", "options": {"num_predict": 4}})
    assert body.completion((9,)).stop_token_ids == [9]
    assert body.completion().max_tokens == 4


@pytest.mark.parametrize("name", ["template", "context"])
def test_what_is_not_there_is_refused_by_name(name: str) -> None:
    given = {"template": "{{ .Prompt }}", "context": [1, 2]}
    with pytest.raises(InvalidRequest) as caught:
        GenerateBody.model_validate({"prompt": "x", name: given[name]}).refuse_what_is_not_there()
    assert caught.value.field == name
