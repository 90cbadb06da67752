"""`st.OpenAI` against a scripted server: what is sent of calls, and what comes back."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from openai_stand_in import StandIn, ask, write
from waiting import wait_until

import stemma as st
from stemma.errors import ProgramError

CHOICES = ["yes", "no", "not at all"]


# --- calls --------------------------------------------------------------------------------------


def test_a_chat_call_has_the_messages_and_the_value_has_counts(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    backend = connect()
    state = ask.run(backend=backend, temperature=0.5, seed=3)
    assert state["a"] == "hello"
    assert state.messages()[-1] == {"role": "assistant", "content": "hello"}
    assert state.text() == "SYSTEM:Be brief.\nUSER:Hi\nASSISTANT:hello\n"
    (body,) = server.bodies
    assert isinstance(body.pop("seed"), int)
    assert body == {
        "model": "some-chat",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
        ],
        "temperature": 0.5,
        "max_tokens": 128,
    }
    assert server.paths == ["chat/completions"]
    assert server.headers[0]["authorization"] == "Bearer key"
    meta = state.get_meta_info("a")
    assert meta["prompt_tokens"], meta["completion_tokens"] == (10, 1)
    assert (meta["finish_reason"], meta["num_api_calls"], meta["num_retries"]) == ("stop", 1, 0)
    usage = backend.token_usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.num_api_calls) == (10, 1, 1)


def test_a_text_call_goes_on_from_all_text_so_far(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    server.answer = lambda body: f" [{len(body['prompt'])}]"

    @st.function
    def twice(s: st.ProgramState) -> None:
        s += "Once" + st.gen("a") + " and " + st.gen("b", max_tokens=1)

    state = twice.run(backend=connect("gpt-3.5-turbo-instruct"))
    assert [body["prompt"] for body in server.bodies] == ["Once", "Once [4] and "]
    assert (state["a"], state["b"]) == (" [4]", " [")
    assert state.get_meta_info("b")["finish_reason"] == "length"


@pytest.mark.parametrize("model", ["o1-mini", "o3", "gpt-5", "openai/o4-mini"])
def test_models_that_think_get_their_own_field_for_max_tokens(
    model: str, server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    ask.run(max_tokens=7, backend=connect(model))
    assert server.bodies[0]["max_completion_tokens"] == 7
    assert "max_tokens" not in server.bodies[0]


def test_sampling_fields_are_sent_as_given(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    given: dict[str, Any] = {"top_p": 0.9, "frequency_penalty": 1.5, "presence_penalty": -1.0}
    ask.run(**given, logit_bias={5: -100}, seed=1, stop=["x", "y"], backend=connect())
    body = server.bodies[0]
    assert given.items() <= body.items()
    assert (body["logit_bias"], body["stop"]) == ({"5": -100}, ["x", "y"])


def test_seeds_follow_the_program_and_differ_between_forks(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    @st.function
    def forked(s: st.ProgramState) -> None:
        forks = s.fork(3)
        forks += st.user("Hi") + st.assistant(st.gen("a"))
        forks.join()

    backend = connect()
    seeds = []
    for seed in (1, 1, 2):
        forked.run(seed=seed, backend=backend)
        seeds.append({body["seed"] for body in server.bodies})
        server.bodies.clear()
    assert len(seeds[0]) == 3
    assert seeds[0] == seeds[1] != seeds[2]


def test_several_samples_are_a_list_and_the_first_has_the_counts(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    numbers = iter(range(9))
    server.answer = lambda body: f"x{next(numbers)}"
    state = ask.run(n=3, backend=connect())
    assert state["a"] == ["x0", "x1", "x2"]
    assert state.messages()[-1]["content"] == "x0"
    metas = state.get_meta_info("a")
    assert [meta["completion_tokens"] for meta in metas] == [3, 0, 0]
    assert len(server.bodies) == 1


@pytest.mark.parametrize("model", ["some-chat", "davinci-002"])
def test_logprobs_have_one_form(
    model: str, server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    server.answer, server.logprob = lambda body: " a b END c", lambda token: -float(len(token))
    program = ask if model == "some-chat" else write
    state = program.run(logprobs=1, stop_regex=["EN."], backend=connect(model))
    assert state["a"] == " a b "
    entries = state.get_meta_info("a")["logprobs"]
    assert [entry["token"] for entry in entries] == [" a", " b"]
    assert entries[1] == {
        "token": " b",
        "logprob": -2.0,
        "top": [{"token": " b", "logprob": -2.0}],
    }


# --- streams and stops --------------------------------------------------------------------------


def test_a_stream_hands_over_pieces_as_they_come(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    server.answer, server.chunk_delay_s = lambda body: "one two three", 0.1
    state = ask.stream(backend=connect())
    assert list(state.text_iter("a")) == ["one", " two", " three"]
    meta = state.get_meta_info("a")
    assert 0 < meta["time_to_first_token_s"] < meta["latency_s"]
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (10, 3)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_stops_past_the_fourth_are_found_here_and_end_the_call(
    is_streamed: bool, server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    server.answer = lambda body: "one two END " + "three " * 2000
    server.chunk_delay_s = 0.005
    stop = ["A!", "B!", "C!", "D!", " END", "F!"]
    state = ask.run(stop=stop, backend=connect(), stream=is_streamed, max_tokens=500)
    if is_streamed:
        assert "".join(state.text_iter("a")) == "one two"
    assert state["a"] == "one two"
    assert server.bodies[0]["stop"] == stop[:4]
    meta = state.get_meta_info("a")
    assert (meta["finish_reason"], meta["matched_stop"]) == ("stop", " END")
    wait_until(lambda: server.num_closed_early == 1)  # all of it takes 10 s


def test_a_stop_pattern_ends_before_its_first_match(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    server.answer = lambda body: "in 1 999 days"
    state = ask.run(stop_regex=r"\d{3}", backend=connect())
    assert state["a"] == "in 1 "
    assert state.get_meta_info("a")["matched_stop"] == "999"


# --- select ---------------------------------------------------------------------------------------


@st.function
def choose(s: st.ProgramState, method: Any = "token_length_normalized") -> None:
    s += "Is it so? I say " + st.select("a", CHOICES, choices_method=method)
    s += "."


@pytest.mark.parametrize(
    ("method", "expected"),
    [("token_length_normalized", "not at all"), ("greedy_token_selection", "yes")],
)
def test_a_text_endpoint_scores_the_choices(
    method: str, expected: str, server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    table = {" yes": -1.0, " no": -2.0, " not": -1.2, " at": -0.1, " all": -0.1}
    server.logprob = lambda token: table.get(token, -9.0)
    state = choose.run(method, backend=connect("davinci-002"))
    assert state["a"] == expected
    assert state.text() == f"Is it so? I say {expected}."
    scores = state.get_meta_info("a")["choice_logprobs"]
    assert scores == pytest.approx([-1.0, -2.0, -1.4 / 3])
    assert sorted(body["prompt"] for body in server.bodies) == sorted(
        "Is it so? I say " + choice for choice in CHOICES
    )


def test_scores_that_do_not_line_up_with_the_text_are_an_error(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    from fastapi.responses import JSONResponse

    choice = {"index": 0, "text": "x", "finish_reason": "length", "logprobs": None}
    server.failures = [JSONResponse({"choices": [choice]}) for _ in CHOICES]
    with pytest.raises(ProgramError, match="no log probabilities"):
        choose.run(backend=connect("davinci-002"))


def test_scores_without_context_are_refused(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    with pytest.raises(ProgramError, match="choices_method"):
        choose.run("unconditional_likelihood_normalized", backend=connect("babbage-002"))
    assert not [body for body in server.bodies if body["model"] == "babbage-002"]


@st.function
def choose_in_chat(s: st.ProgramState) -> None:
    s += st.user("Is it so?") + st.assistant(st.select("a", CHOICES))


@pytest.mark.parametrize(
    ("flavor", "answer", "method"),
    [
        ("openai", '{"choice": "no"}', "json_schema"),
        ("vllm", "no", "greedy_token_selection"),
        ("sglang", "no", "greedy_token_selection"),
        ("stemma", "no", "greedy_token_selection"),
    ],
)
def test_a_chat_endpoint_chooses_under_a_constraint(
    flavor: str,
    answer: str,
    method: str,
    server: StandIn,
    connect: Callable[..., st.OpenAI],
) -> None:
    server.answer = lambda body: answer
    state = choose_in_chat.run(backend=connect(flavor=flavor))
    assert state["a"] == "no"
    assert state.messages()[-1]["content"] == "no"
    assert state.get_meta_info("a")["choices_method"] == method
    (body,) = server.bodies
    assert body["temperature"] == 0
    assert all(choice in json.dumps(body).replace("\\\\ ", " ") for choice in CHOICES)


@pytest.mark.parametrize("answer", ["no", '{"choice": "perhaps"}', "[]"])
def test_an_answer_that_is_no_choice_is_an_error(
    answer: str, server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    server.answer = lambda body: answer
    with pytest.raises(ProgramError, match="none of the choices"):
        choose_in_chat.run(backend=connect())
