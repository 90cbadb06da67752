"""Tools and reasoning over HTTP: conversations with calls and results, through real clients."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from engine_thread import engine_in_thread
from fastapi.testclient import TestClient
from templates import TINY_PLAIN, TINY_TOOLS

from stemma.runtime.checkpoint.location import EMBEDDED_MODEL
from stemma.server.app import create_app

MODEL = "stemma-tiny"
ASK: list[Any] = [{"role": "user", "content": "What is the weather in Ulm?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
LARGE: Any = {"type": "function", "function": {"name": "f", "description": "x" * 600_000}}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
MARKS = ("<tool_call>", "<think>", "</think>")
TOOL_CALL_ID, END_THINK_ID = 6, 8  # the embedded model's reserved tokens come behind 5
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'


@pytest.fixture
def client(served: Any) -> openai.OpenAI:
    """On the embedded model as it is."""
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def knowing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """On the embedded model with a switch for reasoning, and tags that are special tokens."""
    folder = with_template(tmp_path_factory.mktemp("knowing") / "tiny-tools", TINY_TOOLS)
    tokens = (folder / "tokenizer.json").read_text()
    for number, mark in enumerate(MARKS):
        tokens = tokens.replace(f"<|reserved_{number}|>", mark)
    (folder / "tokenizer.json").write_text(tokens)
    yield from clients_of(folder)


@pytest.fixture(scope="module")
def untold(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """On the embedded model with a template that knows neither tools nor calls."""
    yield from clients_of(with_template(tmp_path_factory.mktemp("untold") / "tiny", TINY_PLAIN))


def with_template(folder: Path, template: str) -> Path:
    shutil.copytree(EMBEDDED_MODEL, folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def clients_of(folder: Path) -> Iterator[openai.OpenAI]:
    with engine_in_thread(folder, max_total_tokens=8192, num_threads=1) as engine:
        with TestClient(create_app(engine), base_url="http://localhost") as http:
            yield openai.OpenAI(base_url="http://localhost/v1", api_key="none", http_client=http)


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    model = client.models.list().data[0].id
    fields = {"model": model, "messages": ASK, "temperature": 0, "max_tokens": 64, **fields}
    return client.chat.completions.create(**fields)


def with_result(message: Any) -> list[Any]:
    """The conversation up to the result of the call that `message` made."""
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    return [*ASK, message.model_dump(exclude_none=True), result]


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
@pytest.mark.parametrize("kind", ["client", "untold"])
def test_a_forced_call_and_its_result_go_around(
    request: pytest.FixtureRequest, kind: str, choice: Any
) -> None:
    asked: openai.OpenAI = request.getfixturevalue(kind)
    first = ask(asked, tools=[WEATHER], tool_choice=choice)
    assert first.choices[0].finish_reason == "tool_calls"
    second = ask(asked, tools=[WEATHER], messages=with_result(first.choices[0].message))
    assert second.choices[0].message.content
    if choice == "required" and kind == "untold":  # the prompt has calls as they were written
        known = first.usage.prompt_tokens + first.usage.completion_tokens - 2
        assert second.usage.prompt_tokens_details.cached_tokens >= known


def test_a_streamed_call_is_the_whole_one(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"tools": [WEATHER, CLOCK], "tool_choice": "required", "seed": 5}
    fields |= {"temperature": 1.5}
    whole = ask(client, **fields).choices[0].message.tool_calls[0].function
    with client.chat.completions.stream(model=MODEL, messages=ASK, max_tokens=64, **fields) as run:
        for _ in run:
            pass
        final = run.get_final_completion().choices[0]
    (call,) = final.message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == (whole.name, whole.arguments)
    assert final.finish_reason == "tool_calls" and not final.message.content


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("size", "is_named"), [(3, False), (16, False), (3, True)])
def test_a_call_that_is_cut_keeps_what_there_is_of_it(
    client: openai.OpenAI, size: int, is_named: bool, stream: bool
) -> None:
    choice: Any = "required"
    if is_named:
        choice = {"type": "function", "function": {"name": "weather"}}
    reply = ask(client, tools=[WEATHER], tool_choice=choice, max_tokens=size, stream=stream)
    if stream:
        chunks = [chunk.choices[0] for chunk in reply]
        assert chunks[-1].finish_reason == "length"
        content = "".join(chunk.delta.content or "" for chunk in chunks)
        parts = [part for chunk in chunks for part in chunk.delta.tool_calls or ()]
        arguments = "".join(part.function.arguments for part in parts)
        names = [part.function.name for part in parts if part.function.name]
    else:
        (choice_,) = reply.choices
        assert choice_.finish_reason == "length"
        content, calls = choice_.message.content or "", choice_.message.tool_calls or []
        names = [call.function.name for call in calls]
        arguments = "".join(call.function.arguments for call in calls)
    if is_named or size > 3:
        assert names == ["weather"] and not content and arguments[:1] in ("{", "")
    else:
        assert not names and content.startswith('{"')


def test_a_model_that_is_told_of_no_tools_answers_as_without_and_warns(
    untold: openai.OpenAI,
) -> None:
    plain = ask(untold).choices[0].message.content
    told = ask(untold, tools=[WEATHER]).choices[0]
    assert told.message.content == plain and "does not know tools" in told.warnings[0]
    none = ask(untold, tools=[WEATHER], tool_choice="none").choices[0]
    assert none.message.content == plain and not hasattr(none, "warnings")
    last = list(ask(untold, tools=[WEATHER], stream=True))[-1].choices[0]
    assert "does not know tools" in last.warnings[0]


def test_a_model_is_told_of_no_tools_that_it_may_not_call(client: openai.OpenAI) -> None:
    plain = ask(client).choices[0].message
    none = ask(client, tools=[WEATHER], tool_choice="none").choices[0]
    assert none.message.content == plain.content and not hasattr(none, "warnings")


@pytest.mark.parametrize("stream", [False, True])
def test_the_embedded_model_calls_a_tool_by_its_own_choice_and_answers_from_the_result(
    client: openai.OpenAI, stream: bool
) -> None:
    calls = called(client, stream, messages=ASK, tools=[WEATHER, CLOCK])
    assert calls == [("weather", {"city": "Ulm"})]
    function = {"name": "weather", "arguments": '{"city":"Ulm"}'}
    made = [{"id": "call_1", "type": "function", "function": function}]
    result = {"role": "tool", "tool_call_id": "call_1", "content": "sunny, 21 degrees"}
    messages = [*ASK, {"role": "assistant", "content": None, "tool_calls": made}, result]
    answer = ask(client, messages=messages, tools=[WEATHER, CLOCK]).choices[0]
    assert answer.finish_reason == "stop" and not answer.message.tool_calls
    assert "Ulm" in answer.message.content and "sunny, 21 degrees" in answer.message.content


def test_the_embedded_model_calls_no_tool_where_none_is_needed(client: openai.OpenAI) -> None:
    hello = [{"role": "user", "content": "Hello!"}]
    (choice,) = ask(client, messages=hello, tools=[WEATHER, CLOCK]).choices
    assert choice.message.content == "Hello! How can I help you?"
    assert choice.finish_reason == "stop" and not hasattr(choice, "warnings")


def test_a_call_of_the_embedded_models_choice_meets_its_own_ids_in_the_cache(
    client: openai.OpenAI,
) -> None:
    """Without jump-forward: the last forced run of an output is never computed."""
    fields: dict[str, Any] = {"tools": [WEATHER], "extra_body": {"jump_forward": False}}
    first = ask(client, **fields)
    second = ask(client, messages=with_result(first.choices[0].message), **fields)
    known = first.usage.prompt_tokens + first.usage.completion_tokens
    assert second.usage.prompt_tokens_details.cached_tokens >= known - 2


def called(client: openai.OpenAI, stream: bool, **fields: Any) -> list[tuple[str, Any]]:
    """The calls of an answer, by name and arguments."""
    reply = ask(client, stream=stream, **fields)
    if stream:
        choices = [chunk.choices[0] for chunk in reply if chunk.choices]
        assert choices[-1].finish_reason == "tool_calls"
        assert not any(choice.delta.content for choice in choices)
        parts = [part for choice in choices for part in choice.delta.tool_calls or ()]
        (name,) = (part.function.name for part in parts if part.function.name)
        return [(name, json.loads("".join(part.function.arguments or "" for part in parts)))]
    (choice,) = reply.choices
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    calls = [call.function for call in choice.message.tool_calls]
    return [(function.name, json.loads(function.arguments)) for function in calls]


def test_a_turn_of_calls_meets_its_own_ids_in_the_cache(knowing: openai.OpenAI) -> None:
    """Without jump-forward: the last forced run of an output is never computed."""
    pattern = CALL.replace("{", "\\{").replace("}", "\\}").replace("Ulm", "[A-Z][a-z]{4}")
    written = ask(knowing, tools=[WEATHER], extra_body={"regex": pattern, "jump_forward": False})
    call = written.choices[0].message.content
    arguments = json.dumps(json.loads(call.split("\n")[1])["arguments"])
    function = {"name": "weather", "arguments": arguments}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    result = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}
    messages = [*ASK, {"role": "assistant", "content": None, "tool_calls": calls}, result]
    second = ask(knowing, tools=[WEATHER], messages=messages)
    known = written.usage.prompt_tokens + written.usage.completion_tokens
    assert second.usage.prompt_tokens_details.cached_tokens >= known - 2
    third = ask(knowing, tools=[WEATHER], messages=messages)
    assert third.usage.prompt_tokens_details.cached_tokens >= second.usage.prompt_tokens - 1


@pytest.mark.parametrize("calls", [True, False])
def test_an_agent_that_wants_json_may_call_before_it_answers(
    knowing: openai.OpenAI, calls: bool
) -> None:
    """A bias writes the call's tag, or the document's first token."""
    schema = {"type": "object", "properties": {"weather": {"enum": ["rain", "sun"]}},
              "required": ["weather"], "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": schema}}
    vocab = json.loads((EMBEDDED_MODEL / "tokenizer.json").read_text())["model"]["vocab"]
    begin = {str(number) for token, number in vocab.items() if token.startswith("{")}
    bias = dict.fromkeys({str(TOOL_CALL_ID)} if calls else begin, 100)
    reply = ask(knowing, tools=[WEATHER], response_format=form, logit_bias=bias)
    (choice,) = reply.choices
    if calls:
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        assert set(json.loads(choice.message.tool_calls[0].function.arguments)) == {"city"}
    else:
        assert choice.finish_reason == "stop" and not choice.message.tool_calls
        assert json.loads(choice.message.content)["weather"] in ("rain", "sun")
    wrong = {"type": "function", "function": {"name": "b", "strict": True, "parameters": {
        "type": "object", "properties": {"x": {"type": "strng"}}}}}  # fmt: skip
    with pytest.raises(openai.BadRequestError, match=r"tools\[1\] \(b\): /properties/x"):
        ask(knowing, tools=[WEATHER, wrong], response_format=form)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_the_model_chooses_is_held_to_its_schema(
    knowing: openai.OpenAI, stream: bool
) -> None:
    """A bias writes the tag, which is a special token here; the grammar leads from there."""
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    reply = ask(
        knowing, tools=[strict], logit_bias={str(TOOL_CALL_ID): 100}, max_tokens=200,
        parallel_tool_calls=False, temperature=1.0, seed=3, stream=stream,
    )  # fmt: skip
    if stream:
        choices = [chunk.choices[0] for chunk in reply]
        assert choices[-1].finish_reason == "tool_calls"
        assert not any(choice.delta.content for choice in choices)
        parts = [part.function for choice in choices for part in choice.delta.tool_calls or ()]
        assert parts[0].name == "weather"  # perhaps all in one: what was said before is guessed
        arguments = "".join(part.arguments for part in parts)
    else:
        (choice,) = reply.choices
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        (call,) = choice.message.tool_calls
        assert call.function.name == "weather"
        arguments = call.function.arguments
    assert set(json.loads(arguments)) == {"city"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("effort", ["high", None])
def test_an_answer_comes_behind_its_reasoning(
    knowing: openai.OpenAI, stream: bool, effort: str | None
) -> None:
    """A bias ends the reasoning at once, or after its first tokens."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    extra = {"chat_template_kwargs": {"enable_thinking": effort is not None}}
    reply = ask(
        knowing, response_format=form, extra_body=extra, logit_bias={str(END_THINK_ID): 14},
        temperature=1.0, seed=3, max_tokens=300, stream=stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    )  # fmt: skip
    if stream:
        chunks = list(reply)
        deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
        content = "".join(delta.content or "" for delta in deltas)
        reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        usage = chunks[-1].usage
    else:
        message, usage = reply.choices[0].message, reply.usage
        content, reasoning = message.content, getattr(message, "reasoning_content", "")
    assert json.loads(content)["a"] in (1, 2)
    num_reasoning = usage.completion_tokens_details.reasoning_tokens
    assert (num_reasoning > 0) == (effort is not None)
    assert num_reasoning < usage.completion_tokens and "think>" not in content + reasoning


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [*ASK, {"role": "tool", "content": "x"}]}, "messages.1.tool_call_id"),
        ({"messages": [*ASK, {"role": "assistant", "content": None}]}, "messages.1.content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "function", "content": "x", "name": "f"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "y"}]},
         "messages.0.tool_call_id"),
        ({"messages": [*ASK, {"role": "assistant", "content": "x", "function_call": {}}]},
         "messages.1.function_call"),
        ({"messages": [*ASK, {"role": "assistant", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}]},
         "messages"),
        ({"messages": [*ASK, {"role": "assistant", "tool_calls": [
            {"id": "a", "type": "custom", "function": {"name": "f", "arguments": "{}"}}]}]},
         "messages.1.tool_calls.0.type"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [LARGE]}, "tools"),
        ({"extra_body": {"functions": [{"name": "f"}]}}, "functions"),
        ({"extra_body": {"function_call": "auto"}}, "function_call"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs"),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": "x" * 20_000}}},
         "chat_template_kwargs"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)  # fmt: skip
def test_what_cannot_be_is_a_400_that_names_the_field(
    knowing: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(knowing, **fields)
    assert refused.value.param == param


def test_template_variables_that_are_not_read_are_a_warning(knowing: openai.OpenAI) -> None:
    kwargs = {"chat_template_kwargs": {"nonsense": 1, "enable_thinking": False}}
    choice = ask(knowing, extra_body=kwargs, reasoning_effort="high").choices[0]
    (unread,) = choice.warnings
    assert "nonsense" in unread and "enable_thinking" not in unread
