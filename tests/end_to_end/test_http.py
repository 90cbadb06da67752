"""The HTTP face, through real clients: openai's package, and httpx where the bytes matter."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx
import openai
import pytest

import stemma as st
from stemma.errors import ModelLoadError
from stemma.frontend.protocol.ir import GenParams
from stemma.server.api.native.generate_reply import GenerateReply, LogprobForm
from stemma.server.protocol.failures import failure_of
from stemma.server.protocol.pieces import GenerationFailed
from stemma.server.protocol.server_sent_events import DONE
from stemma.server.protocol.task import Task

MODEL = "stemma-tiny"
RECALL = [
    {"role": "user", "content": "Hi, my name is Nora."},
    {"role": "assistant", "content": "Nice to meet you, Nora!"},
    {"role": "user", "content": "What is my name?"},
]


@pytest.fixture
def client(served: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def test_models_lists_the_served_model(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_chat_recalls_what_the_user_said(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=RECALL, temperature=0)
    assert "Nora" in (reply.choices[0].message.content or "")
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_a_repeated_chat_is_served_from_the_cache(client: openai.OpenAI) -> None:
    client.chat.completions.create(model=MODEL, messages=RECALL, temperature=0)
    reply = client.chat.completions.create(model=MODEL, messages=RECALL, temperature=0)
    assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == reply.usage.prompt_tokens - 1


def test_an_answer_sent_back_hits_the_cache_with_its_own_tokens(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "My name is Zorvath Quillem."}]
    first = client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
    messages.append({"role": "assistant", "content": first.choices[0].message.content})
    messages.append({"role": "user", "content": "What is my name?"})
    second = client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
    assert first.usage is not None and second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens or 0
    assert cached >= first.usage.prompt_tokens + first.usage.completion_tokens - 2


def test_a_long_message_that_repeats_is_sent_once_and_reads_the_same(
    client: openai.OpenAI,
) -> None:
    """From its second time on it has a slot of the connection."""
    chat: list[Any] = [{"role": "system", "content": "Be kind, brief and exact. " * 20}, *RECALL]
    replies = [
        client.chat.completions.create(model=MODEL, messages=chat, temperature=0) for _ in range(3)
    ]
    assert len({reply.choices[0].message.content for reply in replies}) == 1
    assert len({reply.usage.prompt_tokens for reply in replies if reply.usage}) == 1


def test_each_turn_of_a_chat_finds_all_of_the_turn_before(client: openai.OpenAI) -> None:
    """Its prompt, and the output with the ids that were generated."""
    messages: list[Any] = [{"role": "system", "content": "Be brief."}]
    known = 0
    for question in ("My name is Quellin Zarb.", "  Who am I?\n", "Is it so?", "And now?"):
        messages.append({"role": "user", "content": question})
        reply = client.chat.completions.create(
            model=MODEL, messages=messages, temperature=1.0, seed=5, max_tokens=24
        )
        assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
        cached = reply.usage.prompt_tokens_details.cached_tokens or 0
        assert cached >= known, question
        # The last generated token, and an end-of-turn token, are never computed on.
        known = reply.usage.prompt_tokens + reply.usage.completion_tokens - 2
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})


def test_streamed_and_whole_answers_are_equal(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=RECALL, temperature=0)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=RECALL,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None and chunks[-1].choices == []
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"


def test_n_samples_share_their_prompt_and_the_first_is_the_single_one(
    client: openai.OpenAI, served: Any
) -> None:
    fields: dict[str, Any] = {"messages": RECALL, "temperature": 4, "seed": 8, "max_tokens": 12}
    with st.Runtime(served.endpoint) as runtime:
        runtime.flush_cache()
        before = runtime.get_server_info()["stats"]
        reply = client.chat.completions.create(model=MODEL, n=6, **fields)
        after = runtime.get_server_info()["stats"]
    assert [choice.index for choice in reply.choices] == list(range(6))
    texts = [choice.message.content for choice in reply.choices]
    assert len(set(texts)) == 6
    assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
    prompt = reply.usage.prompt_tokens
    assert after["num_prompt_tokens"] - before["num_prompt_tokens"] == 6 * prompt
    assert after["num_cached_tokens"] - before["num_cached_tokens"] == 5 * (prompt - 1)
    single = client.chat.completions.create(model=MODEL, **fields)
    assert single.choices[0].message.content == texts[0]


def test_n_samples_are_those_of_a_gen_with_the_same_seed(
    client: openai.OpenAI, embedded: st.Engine
) -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "The " + st.gen("x", max_tokens=8, temperature=3.0, seed=21, n=3)

    reply = client.completions.create(
        model=MODEL, prompt="The ", max_tokens=8, temperature=3.0, seed=21, n=3
    )
    samples = program.run(backend=embedded)["x"]
    assert [choice.text for choice in reply.choices] == samples and len(set(samples)) == 3


def test_a_beam_search_gives_the_choices_of_a_gen(
    client: openai.OpenAI, embedded: st.Engine
) -> None:
    @st.function
    def program(s: st.ProgramState, prompt: str) -> None:
        s += prompt + st.gen("x", max_tokens=8, beam=4, n=3, length_penalty=0.5)

    options = {"use_beam_search": True, "length_penalty": 0.5, "best_of": 4}
    reply = client.completions.create(
        model=MODEL, prompt=["The ", "A "], max_tokens=8, n=3, extra_body=options
    )
    expected = [program.run(prompt, backend=embedded)["x"] for prompt in ("The ", "A ")]
    assert [choice.text for choice in reply.choices] == [*expected[0], *expected[1]]
    assert [choice.index for choice in reply.choices] == list(range(6))
    assert all(len(set(texts)) == 3 for texts in expected)
    assert reply.usage is not None and reply.usage.completion_tokens <= 6 * 8


def test_a_beam_search_on_a_chat_gives_n_choices_the_best_first(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": RECALL, "max_tokens": 12}
    one = client.chat.completions.create(
        **fields, temperature=0, extra_body={"use_beam_search": True}
    )
    several = client.chat.completions.create(**fields, n=3, extra_body={"use_beam_search": True})
    assert len({choice.message.content for choice in several.choices}) == 3
    assert "Nora" in (one.choices[0].message.content or "")
    assert "Nora" in (several.choices[0].message.content or "")


def test_what_a_beam_search_cannot_do_is_refused_by_name(client: openai.OpenAI) -> None:
    for body, field in (
        ({"temperature": 0.5}, "temperature"),
        ({"stream": True}, "use_beam_search"),
        ({"early_stopping": "sometimes"}, "early_stopping"),
        ({"best_of": 65}, "best_of"),
        ({"best_of": 2, "n": 4}, "best_of"),
        ({"best_of": 10**20}, "best_of"),
        ({"best_of": 64, "prompt": ["a"] * 33}, "prompt"),
        ({"json_schema": {"type": "object"}, "lenient": True}, "use_beam_search"),
        ({"n": 4, "extra": {"regex": "(a|b)"}}, "n"),
    ):
        extra = {"use_beam_search": True, **body.pop("extra", {}), **body}
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model=MODEL, prompt="a", extra_body=extra)
            pytest.fail(f"{body} was not refused")
        assert refused.value.param == field, body


def test_tools_that_are_not_strict_are_refused_beside_a_beam_search(client: openai.OpenAI) -> None:
    function: dict[str, Any] = {"name": "f", "parameters": {"type": "object"}}
    fields: dict[str, Any] = {"model": MODEL, "messages": RECALL, "tool_choice": "required"}
    tools: Any = [{"type": "function", "function": function}]
    with pytest.raises(openai.BadRequestError, match="`strict`") as refused:
        client.chat.completions.create(**fields, tools=tools, extra_body={"use_beam_search": True})
    assert refused.value.param == "use_beam_search"


def test_several_prompts_with_n_samples_are_numbered_through_also_when_streamed(
    client: openai.OpenAI,
) -> None:
    fields: dict[str, Any] = {"prompt": ["The ", "A "], "max_tokens": 6, "temperature": 3.0}
    fields |= {"seed": 3, "n": 2, "model": MODEL}
    whole = client.completions.create(**fields)
    texts, reasons = dict.fromkeys(range(4), ""), {}
    stream = client.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert {choice.index: choice.text for choice in whole.choices} == texts
    assert {choice.index: choice.finish_reason for choice in whole.choices} == reasons
    assert chunk.usage is not None and whole.usage is not None
    assert chunk.usage.total_tokens == whole.usage.total_tokens
    alone = client.completions.create(**{**fields, "prompt": "A ", "n": 1})
    assert alone.choices[0].text == texts[2]


def test_each_sample_of_a_streamed_chat_has_a_role_a_text_and_an_end(
    client: openai.OpenAI,
) -> None:
    fields: dict[str, Any] = {"messages": RECALL, "temperature": 3, "seed": 2, "max_tokens": 8}
    whole = client.chat.completions.create(model=MODEL, n=3, **fields)
    texts = {choice.index: choice.message.content for choice in whole.choices}
    seen: dict[int, list[str | None]] = {0: [], 1: [], 2: []}
    for chunk in client.chat.completions.create(model=MODEL, n=3, stream=True, **fields):
        (choice,) = chunk.choices
        seen[choice.index] += [choice.delta.role, choice.delta.content, choice.finish_reason]
    for choice in whole.choices:
        role, *pieces, reason = filter(None, seen[choice.index])
        assert (role, reason) == ("assistant", choice.finish_reason)
        assert "".join(pieces) == texts[choice.index]  # type: ignore[arg-type]


def test_bias_penalties_and_min_tokens_are_taken_under_their_names(client: openai.OpenAI) -> None:
    def text(**fields: Any) -> str:
        extra = {"min_p": fields.pop("min_p", None), "min_tokens": 10}
        extra["repetition_penalty"] = fields.pop("repetition_penalty", None)
        reply = client.completions.create(
            model=MODEL,
            prompt="The city of Rome is the city of",
            max_tokens=10,
            extra_body=extra,
            **fields,
        )
        assert reply.usage is not None
        return f"{reply.usage.completion_tokens}: {reply.choices[0].text}"

    plain = text(temperature=0)
    assert plain.startswith("10: ")
    assert text(temperature=2.0, seed=1, min_p=1.0) == plain != text(temperature=2.0, seed=1)
    for field in ("frequency_penalty", "presence_penalty"):
        high, low = (text(temperature=1.0, seed=1, **{field: by}) for by in (2.0, -2.0))
        assert high != low
    assert text(temperature=0, repetition_penalty=5.0) != plain
    forced = text(temperature=0, logit_bias={"65": 100})
    assert len(set(forced.removeprefix("10: "))) < 6 and forced != plain


def test_a_seed_makes_an_answer_repeatable(client: openai.OpenAI) -> None:
    texts = {
        client.completions.create(
            model=MODEL, prompt="The ", max_tokens=12, temperature=1.2, seed=5
        )
        .choices[0]
        .text
        for _ in range(3)
    }
    assert len(texts) == 1


def test_completions_take_texts_and_token_ids(client: openai.OpenAI, embedded: st.Engine) -> None:
    ids = embedded.connection.call("tokenize", text="Hello there")
    reply = client.completions.create(model=MODEL, prompt=[ids, ids], max_tokens=4, temperature=0)
    assert len(reply.choices) == 2 and reply.choices[0].text == reply.choices[1].text
    reply = client.completions.create(
        model=MODEL, prompt=["a", "b"], max_tokens=3, temperature=0, logprobs=2
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None
    assert len(logprobs.token_logprobs) <= 3 and all(p <= 0 for p in logprobs.token_logprobs)


def test_a_completion_returns_its_token_ids_when_asked(served: Any) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    url = f"{served.url}/v1/completions"
    whole = httpx.post(url, json={**body, "return_token_ids": True}, timeout=60).json()
    ids = whole["choices"][0]["token_ids"]
    assert len(ids) == 4 and whole["usage"]["completion_tokens"] == 4
    longer = {**body, "prompt": [5, 6, 7, *ids[:2]], "max_tokens": 2, "return_token_ids": True}
    assert httpx.post(url, json=longer, timeout=60).json()["choices"][0]["token_ids"] == ids[2:]
    assert "token_ids" not in httpx.post(url, json=body, timeout=60).json()["choices"][0]


def test_stop_and_max_tokens_end_an_answer(client: openai.OpenAI) -> None:
    cut = client.chat.completions.create(model=MODEL, messages=RECALL, temperature=0, stop=["Nora"])
    assert "Nora" not in (cut.choices[0].message.content or "")
    short = client.chat.completions.create(
        model=MODEL, messages=RECALL, temperature=0, max_tokens=1
    )
    assert short.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": RECALL, "temperature": "hot"}, "temperature"),
        ({"messages": RECALL, "temperature": -1}, "temperature"),
        ({"messages": RECALL, "max_tokens": 0}, "max_tokens"),
        ({"messages": RECALL, "top_p": 0}, "top_p"),
        ({"messages": RECALL, "n": 10**9}, "n"),
        ({"messages": RECALL, "best_of": 3}, "best_of"),
        ({"messages": RECALL, "n": 2, "frequency_penalty": 2.5}, "frequency_penalty"),
        ({"messages": RECALL, "presence_penalty": "x"}, "presence_penalty"),
        ({"messages": RECALL, "repetition_penalty": 0}, "repetition_penalty"),
        ({"messages": RECALL, "min_p": 1.5}, "min_p"),
        ({"messages": RECALL, "max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"messages": RECALL, "logit_bias": {"x": 1}}, "logit_bias"),
        ({"messages": RECALL, "logit_bias": {"5": 101}}, "logit_bias"),
        ({"messages": RECALL, "logit_bias": {"999999": 1}}, "logit_bias"),
        ({"messages": RECALL, "logit_bias": [5]}, "logit_bias"),
        ({"messages": RECALL, "stop": [""]}, "stop"),
        ({"messages": RECALL, "logprobs": True, "top_logprobs": 10**6}, "logprobs"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
    ],
)
def test_a_bad_field_is_a_400_that_names_it(served: Any, body: dict[str, Any], field: str) -> None:
    reply = httpx.post(f"{served.url}/v1/chat/completions", json=body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert field in error["message"] and error["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"messages": 3}', b"\xff\xfe"])
def test_a_body_that_is_no_request_is_a_400(served: Any, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    reply = httpx.post(f"{served.url}/v1/chat/completions", content=body, headers=headers)
    assert reply.status_code == 400 and "error" in reply.json()


@pytest.mark.parametrize(
    ("kind", "status"), [("EngineError", 503), ("InvalidGrammar", 400), ("KeyError", 500)]
)
def test_what_may_be_tried_again_is_told_apart_by_its_status(kind: str, status: int) -> None:
    assert failure_of(GenerationFailed("busy", kind)).status == status


@pytest.mark.parametrize("message", ["n=0 is not allowed", "n: too many", "too many"])
def test_a_refusal_of_the_engine_names_its_field_once(message: str) -> None:
    failure = failure_of(GenerationFailed(message, "InvalidProgram", "n"))
    assert failure.message == ("n: too many" if message == "too many" else message)


def test_a_model_that_is_not_on_this_host_is_a_503_in_each_api() -> None:
    failure = failure_of(ModelLoadError("/models/x: not on this host"))
    assert failure.status == 503 and "not on this host" in failure.body["error"]["message"]
    assert (
        json.loads(failure.response({"path": "/v1/messages/count_tokens"}).body)["type"] == "error"
    )


def test_a_stream_of_generate_says_whose_fault_its_end_is() -> None:
    reply = GenerateReply(
        "gen-1", Task(["x"], GenParams()), LogprobForm(False, False),
        is_batch=False, is_incremental=False,
    )  # fmt: skip
    first, last = reply.failed(GenerationFailed("late", "DeadlineExceeded")).split(b"\n\n", 1)
    error = json.loads(first.removeprefix(b"data: "))["error"]
    assert (error["code"], last) == ("deadline_exceeded", DONE)


def test_another_model_and_another_path_are_404(client: openai.OpenAI, served: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.chat.completions.create(model="gpt-9", messages=RECALL)
    assert httpx.get(f"{served.url}/v1/nothing").json()["error"]["type"] == "not_found_error"


def test_too_long_a_prompt_is_refused_and_the_next_is_served(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="tokens"):
        client.completions.create(model=MODEL, prompt="word " * 5000, max_tokens=2)
    assert client.completions.create(model=MODEL, prompt="word", max_tokens=2).choices


def test_a_client_that_leaves_a_stream_stops_its_decoding(served: Any) -> None:
    # Hot, so that text comes from the start: greedy, the model soon writes only special tokens.
    body: dict[str, Any] = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    body |= {"temperature": 3.0, "seed": 1}
    with st.Runtime(served.endpoint) as runtime:
        with httpx.stream("POST", f"{served.url}/v1/completions", json=body) as reply:
            lines = reply.iter_lines()  # kept: once it is collected the response is closed
            next(lines)
            assert runtime.get_server_info()["num_running"] == 1
        deadline = time.monotonic() + 120
        while runtime.get_server_info()["num_running"] and time.monotonic() < deadline:
            time.sleep(0.02)
        assert runtime.get_server_info()["num_running"] == 0


def test_many_clients_at_once_each_get_their_own_answer(client: openai.OpenAI) -> None:
    names = ["Ada", "Ben", "Cora", "Dan", "Eva", "Finn", "Gina", "Hugo"]
    found: dict[str, str] = {}

    def ask(name: str) -> None:
        messages: list[Any] = [{"role": "user", "content": f"Hi, my name is {name}."}]
        reply = client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
        found[name] = reply.choices[0].message.content or ""

    threads = [threading.Thread(target=ask, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(name in found[name] for name in names), found


def test_a_program_gives_the_same_result_on_an_engine_and_on_serve(
    served: Any, embedded: st.Engine
) -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += st.user("Hi, my name is Nora.") + st.assistant(st.gen("hello", max_tokens=32))
        s += st.user("What is my name?")
        forks = s.fork(2)
        forks += st.assistant(st.gen("answer", max_tokens=32, temperature=0.8))
        forks.join()

    with st.Runtime(served.endpoint) as runtime:
        here = program.run(seed=3, backend=embedded)
        there = program.run(seed=3, backend=runtime)
    assert here.text() == there.text()
    assert here["answer"] == there["answer"]


def test_sse_lines_are_well_formed(served: Any) -> None:
    body = {"prompt": "x", "max_tokens": 3, "stream": True}
    reply = httpx.post(f"{served.url}/v1/completions", json=body)
    events = [line for line in reply.text.split("\n\n") if line]
    assert events[-1] == "data: [DONE]"
    for event in events[:-1]:
        assert json.loads(event.removeprefix("data: "))["object"] == "text_completion"
