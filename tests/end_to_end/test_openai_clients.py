"""OpenAI's API through those who use it: openai's package in all its ways, langchain, curl."""

from __future__ import annotations

import asyncio
import functools
import json
import operator
import shutil
import subprocess
from collections.abc import Iterable
from typing import Any

import httpx
import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

MODEL = "stemma-tiny"
CLOSE = 0.1  # of log probabilities in low precision, computed in other batches
HELLO: list[Any] = [{"role": "user", "content": "Hi, my name is Nora."}]
RECALL: list[Any] = [
    *HELLO,
    {"role": "assistant", "content": "Nice to meet you, Nora!"},
    {"role": "user", "content": "What is my name?"},
]
EXTRACT: list[Any] = [
    {"role": "user", "content": "Text: Ada Moor is 34 years old.\nExtract name, age as JSON."}
]


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int


@pytest.fixture
def client(served: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def chat(served: Any) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{served.url}/v1", api_key="none", model=MODEL, temperature=0, max_retries=0
    )


def post(served: Any, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{served.url}/v1/{path}", json={"model": MODEL, **body}, timeout=120)


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


# --- bodies ---------------------------------------------------------------------------------------


def test_bodies_are_valid_by_the_packages_own_types(served: Any) -> None:
    fields = {"temperature": 0, "max_tokens": 6}
    logprobs = {"logprobs": True, "top_logprobs": 2}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    for extra in ({}, logprobs):
        whole = post(served, "chat/completions", messages=RECALL, **fields, **extra).json()
        ChatCompletion.model_validate(whole)
        message = whole["choices"][0]["message"]
        assert message.keys() == {"role", "content", "refusal"} and message["refusal"] is None
        assert whole["service_tier"] == "default" and whole["system_fingerprint"][:3] == "fp_"
        stream = post(served, "chat/completions", messages=RECALL, **fields, **extra, **usage)
        *chunks, last = events(stream)
        assert all(ChatCompletionChunk.model_validate(chunk).usage is None for chunk in chunks)
        assert all("usage" in chunk and "logprobs" in chunk["choices"][0] for chunk in chunks)
        assert last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    for extra in ({}, {"logprobs": 2}):
        whole = post(served, "completions", prompt="The ", **fields, **extra).json()
        Completion.model_validate(whole)
        *chunks, last = events(
            post(served, "completions", prompt="The ", **fields, **extra, **usage)
        )
        assert {chunk["object"] for chunk in chunks} == {"text_completion"}
        assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_models_are_listed_and_retrieved(client: openai.OpenAI) -> None:
    (listed,) = client.models.list().data
    assert client.models.retrieve(MODEL) == listed
    assert (listed.id, listed.object, listed.owned_by) == (MODEL, "model", "stemma")
    with pytest.raises(openai.NotFoundError, match="other"):
        client.models.retrieve("some/other")


# --- what a stream has ----------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [None, ["Nora"], ["a!", " is"]])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_streamed_chats_logprobs_are_those_of_the_whole_answer(
    client: openai.OpenAI, stop: list[str] | None, seed: int
) -> None:
    fields: dict[str, Any] = {"messages": RECALL, "temperature": 1.5, "seed": seed, "stop": stop}
    fields |= {"max_tokens": 16, "logprobs": True, "top_logprobs": 3, "model": MODEL, "n": 2}
    whole = client.chat.completions.create(**fields)
    for choice in whole.choices:
        text, entries = "", []
        for chunk in client.chat.completions.create(**fields, stream=True):
            (part,) = chunk.choices
            if part.index == choice.index:
                text += part.delta.content or ""
                entries += (part.logprobs and part.logprobs.content) or []
                told = b"".join(bytes(entry.bytes or b"") for entry in entries)
                assert text.encode().startswith(told)  # each with its text
        assert text == choice.message.content
        assert choice.logprobs is not None
        wanted = choice.logprobs.content or []
        assert [entry.token for entry in entries] == [entry.token for entry in wanted]
        values = [entry.logprob for entry in wanted]
        assert [entry.logprob for entry in entries] == pytest.approx(values, abs=CLOSE)
        assert all(len(entry.top_logprobs) == 3 for entry in entries)


@pytest.mark.parametrize("echo", [False, True])
def test_a_streamed_completions_tokens_are_those_of_the_whole_one(served: Any, echo: bool) -> None:
    body: dict[str, Any] = {"prompt": ["One, two", "The "], "max_tokens": 12, "temperature": 1.2}
    body |= {"seed": 5, "logprobs": 2, "return_token_ids": True, "n": 2, "stop": [" t", "e"]}
    body["echo"] = echo
    whole = post(served, "completions", **body).json()
    streamed: dict[int, dict[str, Any]] = {}
    for chunk in events(post(served, "completions", **body, stream=True)):
        (part,) = chunk["choices"]
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        first = {"text": "", "token_ids": [], "logprobs": {name: [] for name in names}}
        choice = streamed.setdefault(part["index"], first)
        choice["text"] += part["text"]
        choice["token_ids"] += part["token_ids"]
        choice["finish_reason"] = part["finish_reason"]
        for name in names:
            choice["logprobs"][name] += (part["logprobs"] or {}).get(name, [])
    for choice in whole["choices"]:
        told = streamed[choice["index"]]
        for name in ("text", "token_ids", "finish_reason"):
            assert told[name] == choice[name]
        for name in ("tokens", "text_offset"):
            assert told["logprobs"][name] == choice["logprobs"][name]
        values = choice["logprobs"]["token_logprobs"]
        close = [None if v is None else pytest.approx(v, abs=CLOSE) for v in values]
        assert told["logprobs"]["token_logprobs"] == close
        assert len(told["logprobs"]["top_logprobs"]) == len(values)
        shown, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
        places = list(zip(shown, offsets, strict=True))[echo:]  # a text does not show its BOS
        assert all(choice["text"].startswith(token, offset) for token, offset in places)


def test_usage_runs_along_where_asked(served: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True, "include_timing": True}
    body = {"messages": RECALL, "temperature": 0, "stream": True, "stream_options": options}
    *chunks, last = events(post(served, "chat/completions", **body))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and 0 < counts[-1] <= last["usage"]["completion_tokens"]
    final = last["usage"]
    assert {c["usage"]["prompt_tokens"] for c in chunks} == {final["prompt_tokens"]}
    cached = {c["usage"]["prompt_tokens_details"]["cached_tokens"] for c in chunks}
    assert cached == {final["prompt_tokens_details"]["cached_tokens"]}
    timing = final["timing"]
    names = {"queue_s", "prefill_s", "decode_s", "latency_s", "time_to_first_token_s"}
    assert timing.keys() == names and all(0 <= value < 60 for value in timing.values())
    assert timing["latency_s"] >= timing["time_to_first_token_s"]


# --- completions that repeat, score and choose ----------------------------------------------------


def test_echo_scores_a_prompt_as_the_model_would_write_it(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "temperature": 0, "logprobs": 2}
    written = client.completions.create(prompt="One, two,", max_tokens=6, **fields).choices[0]
    whole = "One, two," + written.text
    scored = client.completions.create(prompt=whole, max_tokens=0, echo=True, **fields)
    choice = scored.choices[0]
    assert choice.text == whole and choice.finish_reason == "length"
    assert scored.usage is not None and scored.usage.completion_tokens == 0
    assert choice.logprobs is not None and written.logprobs is not None
    tokens, logprobs = choice.logprobs.tokens or [], choice.logprobs.token_logprobs or []
    tops = choice.logprobs.top_logprobs or []
    assert logprobs[0] is None and len(tokens) == len(logprobs) == len(tops)
    count = len(written.logprobs.tokens or [])
    if tokens[-count:] == written.logprobs.tokens:  # the same ids, and so the same numbers
        wanted = pytest.approx(written.logprobs.token_logprobs, abs=0.1)
        assert logprobs[-count:] == wanted
    for token, logprob, top in list(zip(tokens, logprobs, tops, strict=True))[1:]:
        assert top[token] == pytest.approx(logprob, abs=1e-4) and 2 <= len(top) <= 3
        assert max(top.values()) >= logprob


def test_echo_repeats_prompts_of_text_and_of_ids(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 3}
    plain = client.completions.create(prompt=["One", "Two"], **fields)
    echoed = client.completions.create(prompt=["One", "Two"], echo=True, **fields)
    texts = [p + c.text for p, c in zip(("One", "Two"), plain.choices, strict=True)]
    assert [c.text for c in echoed.choices] == texts
    stream = client.completions.create(prompt="One", echo=True, stream=True, **fields)
    assert "".join(chunk.choices[0].text for chunk in stream) == texts[0]
    ids = client.completions.create(prompt=[72, 105], echo=True, **fields).choices[0].text
    assert ids.endswith(client.completions.create(prompt=[72, 105], **fields).choices[0].text)


def test_the_best_of_several_samples_is_told(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": "The ", "temperature": 1.5, "seed": 3}
    fields |= {"max_tokens": 6, "logprobs": 0}

    def mean(choice: Any) -> float:
        logprobs = choice.logprobs.token_logprobs
        return sum(logprobs) / len(logprobs) if logprobs else 0.0

    drawn = client.completions.create(n=5, **fields)
    best = client.completions.create(n=2, best_of=5, **fields)
    wanted = sorted(drawn.choices, key=mean, reverse=True)[:2]
    assert [choice.text for choice in best.choices] == [choice.text for choice in wanted]
    assert [choice.index for choice in best.choices] == [0, 1]
    assert best.usage is not None and drawn.usage is not None
    assert best.usage.completion_tokens == drawn.usage.completion_tokens
    quiet = client.completions.create(n=1, best_of=5, **{**fields, "logprobs": None})
    assert quiet.choices[0].text == wanted[0].text and quiet.choices[0].logprobs is None


def test_prompt_logprobs_are_vllms(served: Any) -> None:
    body = {"messages": HELLO, "max_tokens": 2, "temperature": 0, "prompt_logprobs": 2}
    reply = post(served, "chat/completions", **body).json()
    first, *rest = reply["prompt_logprobs"]
    assert first is None and len(rest) == reply["usage"]["prompt_tokens"] - 1
    assert reply["choices"][0]["logprobs"] is None
    for place in rest:
        assert 2 <= len(place) <= 3
        ranked = sorted(e["logprob"] for e in place.values() if e["rank"] is not None)
        assert len(ranked) == 2 and ranked == sorted(ranked)
    scored = post(served, "completions", prompt="One", max_tokens=1, prompt_logprobs=0).json()
    assert scored["choices"][0]["prompt_logprobs"][0] is None


# --- chats ----------------------------------------------------------------------------------------


def test_a_message_is_continued_or_begun_as_asked(client: openai.OpenAI) -> None:
    begun = [*RECALL, {"role": "assistant", "content": "Your name"}]
    fields: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 12}

    def text(messages: list[Any], **extra: Any) -> str:
        reply = client.chat.completions.create(messages=messages, extra_body=extra, **fields)
        return reply.choices[0].message.content or ""

    whole, rest = text(RECALL), text(begun)
    assert "Your name" + rest == whole
    assert text(begun, continue_final_message=True, add_generation_prompt=False) == rest
    assert text(begun, continue_final_message=True, echo=True) == whole
    streamed = client.chat.completions.create(
        messages=begun, extra_body={"echo": True}, stream=True, **fields
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == whole
    assert text(begun, add_generation_prompt=True) != rest
    assert text(begun, continue_final_message=False) == text(begun, add_generation_prompt=True)


def test_the_stop_string_is_told_where_asked(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": RECALL, "temperature": 0}

    def text(stop: Any = None, **extra: Any) -> str:
        reply = client.chat.completions.create(stop=stop, extra_body=extra, **fields)
        return reply.choices[0].message.content or ""

    whole = text()
    until = whole[: whole.index("Nora")]
    assert text("Nora") == until == text(stop_regex="N[a-z]+a")
    for name in ("include_stop_str_in_output", "no_stop_trim"):
        assert text("Nora", **{name: True}) == until + "Nora"
    stream = client.chat.completions.create(
        stop="Nora", extra_body={"no_stop_trim": True}, stream=True, **fields
    )
    choices = [chunk.choices[0] for chunk in stream]
    assert "".join(choice.delta.content or "" for choice in choices) == until + "Nora"
    assert choices[-1].model_extra == {"stop_reason": "Nora"}


def test_parts_of_text_are_read_and_others_are_refused_by_name(client: openai.OpenAI) -> None:
    def ask(*parts: dict[str, Any]) -> str:
        messages: list[Any] = [*RECALL[:-1], {"role": "user", "content": list(parts)}]
        reply = client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
        return reply.choices[0].message.content or ""

    assert "Nora" in ask({"type": "text", "text": "What is "}, {"type": "text", "text": "my name?"})
    image = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    with pytest.raises(openai.BadRequestError, match="image_url") as refused:
        ask({"type": "text", "text": "What is it?"}, image)
    assert refused.value.param == "messages.2.content.1.type"


# --- fields ---------------------------------------------------------------------------------------

PREDICTED = ("accepted_prediction_tokens", "rejected_prediction_tokens")
DRAFTED = ("drafted_tokens", "accepted_tokens")


@pytest.mark.parametrize(
    "content",
    ["Your name is Nora.", [{"type": "text", "text": "Your "}, {"type": "text", "text": "n"}]],
)
def test_a_prediction_changes_no_answer_and_is_accounted_for(
    client: openai.OpenAI, content: Any
) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": RECALL, "temperature": 0, "n": 2}
    fields["tools"] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    fields |= {"tool_choice": "none", "logprobs": True}
    plain = client.chat.completions.create(**fields)
    prediction: Any = {"type": "content", "content": content}
    whole = client.chat.completions.create(**fields, prediction=prediction)
    texts = [choice.message.content for choice in plain.choices]
    assert [choice.message.content for choice in whole.choices] == texts
    assert plain.usage and whole.usage and whole.usage.completion_tokens_details
    bare, told = (
        reply.usage.completion_tokens_details.model_dump(exclude_none=True)
        for reply in (plain, whole)
    )
    assert {*DRAFTED} <= bare.keys() and not {*PREDICTED} & bare.keys()
    assert {*DRAFTED, *PREDICTED} <= told.keys() and all(told[name] >= 0 for name in PREDICTED)
    *_, last = client.chat.completions.create(
        **fields, prediction=prediction, stream=True, stream_options={"include_usage": True}
    )
    assert last.usage is not None and last.usage.completion_tokens_details is not None
    assert last.usage.completion_tokens_details.accepted_prediction_tokens is not None


@pytest.mark.parametrize(
    ("prediction", "at"),
    [
        ({"content": "x"}, "prediction.type"),
        ({"type": "contents", "content": "x"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": 3}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content"),
        ("x", "prediction"),
        ({"type": "content", "content": "x" * 100_000}, "prediction"),
    ],
    ids=str,
)
def test_a_prediction_of_another_form_is_refused_by_its_field(
    served: Any, prediction: Any, at: str
) -> None:
    reply = post(served, "chat/completions", messages=RECALL, prediction=prediction)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"].startswith(at)


HARMLESS: dict[str, Any] = {
    "user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "verbosity": "low",
    "reasoning_effort": "low", "prompt_cache_key": "k", "safety_identifier": "s", "n": None,
    "modalities": ["text"], "prediction": {"type": "content", "content": "x"}, "stop": None,
    "skip_special_tokens": True, "length_penalty": 1.0, "bad_words": [], "top_k": -1, "seed": -3,
    "stream_options": None, "max_tokens": None, "logprobs": None, "logit_bias": None,
}  # fmt: skip


def test_fields_that_change_nothing_are_taken(served: Any) -> None:
    plain = post(served, "chat/completions", messages=RECALL, temperature=0).json()
    reply = post(served, "chat/completions", messages=RECALL, temperature=0, **HARMLESS)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"] == plain["choices"]
    assert "x-stemma-warnings" not in reply.headers, "a field is not known by name"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("audio", {"voice": "alloy", "format": "wav"}), ("modalities", ["text", "audio"]),
        ("web_search_options", {}), ("functions", [{"name": "f"}]), ("n", 0), ("n", 65),
        ("skip_special_tokens", False), ("early_stopping", True), ("length_penalty", 2.0),
        ("truncate_prompt_tokens", 5), ("allowed_token_ids", [1]), ("bad_words", ["a"]),
        ("chat_template", "x"), ("lora_path", "x"), ("return_hidden_states", True),
        ("top_logprobs", 3), ("add_special_tokens", True), ("add_generation_prompt", False),
        ("continue_final_message", True), ("best_of", 2), ("prompt_logprobs", -1),
        ("priority", 10**6), ("deadline_s", 0), ("stop_regex", "("), ("seed", 2**63),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(served: Any, field: str, value: Any) -> None:
    reply = post(served, "chat/completions", messages=RECALL, **{field: value})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == field and error["type"] == "invalid_request_error", error
    assert field in error["message"]


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("suffix", {"suffix": "."}), ("best_of", {"best_of": 2, "n": 3}),
        ("best_of", {"best_of": 2, "stream": True}), ("best_of", {"best_of": 100}),
        ("prompt", {"prompt": ["x"] * 2049}), ("prompt", {"prompt": []}),
        ("prompt_logprobs", {"prompt_logprobs": 1, "stream": True}),
        ("max_tokens", {"max_tokens": -1}), ("prompt_embeds", {"prompt_embeds": "x"}),
        ("add_special_tokens", {"add_special_tokens": False}),
    ],
)  # fmt: skip
def test_what_a_completion_cannot_have_is_refused_by_name(
    served: Any, field: str, body: dict[str, Any]
) -> None:
    reply = post(served, "completions", **{"prompt": "x", **body})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == field, reply.text


# --- clients --------------------------------------------------------------------------------------


def test_parse_and_stream_helpers_give_pydantic_models(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": EXTRACT, "temperature": 0}
    parsed = client.chat.completions.parse(response_format=Person, **fields)
    assert parsed.choices[0].message.parsed == Person(name="Ada Moor", age=34)
    with client.chat.completions.stream(response_format=Person, **fields) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == Person(name="Ada Moor", age=34)
    assert {"chunk", "content.delta", "content.done"} <= kinds
    with client.chat.completions.stream(
        model=MODEL, messages=RECALL, temperature=0, logprobs=True
    ) as plain:
        assert "logprobs.content.delta" in {event.type for event in plain}


def test_tools_of_pydantic_models_are_called_with_their_fields(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": EXTRACT, "temperature": 0}
    fields |= {"tools": [openai.pydantic_function_tool(Person)], "tool_choice": "required"}
    choice = client.chat.completions.parse(**fields).choices[0]
    (call,) = choice.message.tool_calls or ()
    assert choice.finish_reason == "tool_calls" and call.function.name == "Person"
    assert isinstance(call.function.parsed_arguments, Person)
    with client.chat.completions.stream(**fields) as stream:
        kinds = {event.type for event in stream}
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert "tool_calls.function.arguments.done" in kinds
    assert streamed.function.parsed_arguments == call.function.parsed_arguments


def test_the_async_client_serves_many_at_once(served: Any) -> None:
    async def ask(client: openai.AsyncOpenAI, name: str) -> str:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": f"Hi, my name is {name}."}],
            temperature=0,
            stream=True,
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(ask(client, name) for name in ("Ada", "Ben", "Cora")))

    for name, text in zip(("Ada", "Ben", "Cora"), asyncio.run(ask_all()), strict=True):
        assert name in text


def test_errors_are_the_packages_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as invalid:
        client.chat.completions.create(model=MODEL, messages=RECALL, temperature=-1)
    assert invalid.value.param == "temperature" and invalid.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-none", messages=RECALL)
    with pytest.raises(openai.BadRequestError, match="tokens"):
        client.completions.create(model=MODEL, prompt="word " * 5000, stream=True)


def test_langchain_invokes_streams_and_reads_structures(chat: ChatOpenAI) -> None:
    reply = chat.invoke(HELLO)
    assert isinstance(reply, AIMessage) and "Nora" in reply.text
    assert reply.usage_metadata is not None and reply.usage_metadata["output_tokens"] > 0
    assert reply.response_metadata["finish_reason"] == "stop"
    chunks = list(chat.stream(HELLO, stream_usage=True))
    assert "".join(chunk.text for chunk in chunks) == reply.text
    assert any(chunk.usage_metadata for chunk in chunks)
    person = chat.with_structured_output(Person, method="json_schema").invoke(EXTRACT)
    assert person == Person(name="Ada Moor", age=34)


def test_langchain_binds_tools(chat: ChatOpenAI) -> None:
    for choice in ("Person", "required"):
        reply = chat.bind_tools([Person], tool_choice=choice).invoke(EXTRACT)
        (call,) = reply.tool_calls
        assert call["name"] == "Person" and Person.model_validate(call["args"])


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return f"sunny in {city}"


def test_langchains_tools_are_called_by_the_models_choice(chat: ChatOpenAI) -> None:
    agent = chat.bind_tools([multiply, get_weather])
    asked = HumanMessage("What is 12 times 7?")
    reply = agent.invoke([asked])
    (call,) = reply.tool_calls
    assert (call["name"], call["args"]) == ("multiply", {"a": 12, "b": 7})
    final = agent.invoke([asked, reply, multiply.invoke(call)])
    assert not final.tool_calls and "84" in final.text
    (streamed,) = sum_of(agent.stream("What is the weather in Rome?")).tool_calls
    assert (streamed["name"], streamed["args"]) == ("get_weather", {"city": "Rome"})


def sum_of(chunks: Iterable[Any]) -> Any:
    return functools.reduce(operator.add, chunks)


def test_curl_gets_an_answer_and_a_stream(served: Any) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("no curl here")
    body = json.dumps({"model": MODEL, "messages": HELLO, "temperature": 0, "stream": True})
    url = f"{served.url}/v1/chat/completions"
    command = [curl, "-sN", url, "-H", "content-type: application/json", "-d", body]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    lines = [line for line in ran.stdout.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert "Nora" in text
