"""`st.OpenAI` against a scripted server: what is sent, what comes back, what goes wrong."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from openai_stand_in import StandIn, refusal, standing_in

import stemma as st
from stemma.errors import EngineError, InvalidRequest, ProgramError
from stemma.frontend.openai import http_client

CHOICES = ["yes", "no", "not at all"]


@pytest.fixture(scope="module")
def shared_server() -> Iterator[StandIn]:
    with standing_in() as state:
        yield state


@pytest.fixture
def server(shared_server: StandIn, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """The shared server as new, and no delays between attempts; it is left with nothing open."""
    fresh = StandIn(shared_server.url)
    vars(shared_server).update(vars(fresh))
    monkeypatch.setattr(http_client, "FIRST_DELAY_S", 0.001)
    yield shared_server
    wait_for(lambda: shared_server.num_open == 0)


@pytest.fixture
def connect(server: StandIn) -> Iterator[Callable[..., st.OpenAI]]:
    opened: list[st.OpenAI] = []

    def make(model: str = "some-chat", **options: Any) -> st.OpenAI:
        backend = st.OpenAI(model, base_url=server.url, **{"api_key": "key", **options})
        opened.append(backend)
        return backend

    yield make
    for backend in opened:
        backend.shutdown()


@st.function
def ask(s: st.ProgramState, **options: Any) -> None:
    s += st.system("Be brief.") + st.user("Hi")
    s += st.assistant(st.gen("a", **options))


@st.function
def write(s: st.ProgramState, **options: Any) -> None:
    s += "Once" + st.gen("a", **options)


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
    wait_for(lambda: server.num_closed_early == 1)  # all of it takes 10 s


def test_a_stop_pattern_ends_before_its_first_match(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    server.answer = lambda body: "in 1 999 days"
    state = ask.run(stop_regex=r"\d{3}", backend=connect())
    assert state["a"] == "in 1 "
    assert state.get_meta_info("a")["matched_stop"] == "999"


# --- what an endpoint does not understand ---------------------------------------------------------

REFUSED: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "min_tokens": {"min_tokens": 3},
    "stop_token_ids": {"stop_token_ids": [1]},
    "ignore_eos": {"ignore_eos": True},
    "priority": {"priority": 3},
    "logprob_start": {"logprobs": 1, "logprob_start": 0},
    "beam": {"beam": 2},
    "regex": {"regex": "[ab]"},
    "ebnf": {"ebnf": 'start: "a"'},
    "structural_tag": {"structural_tag": {"type": "structural_tag", "structures": []}},
    "lenient": {"json_schema": {"type": "object"}, "lenient": True},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_plain_openai_lacks_is_refused_by_name_before_anything_is_sent(
    name: str, server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    with pytest.raises(ProgramError, match=name) as caught:
        ask.run(**REFUSED[name], backend=connect())
    assert caught.value.kind == "InvalidProgram"
    assert caught.value.source is not None and __file__ in caught.value.source
    assert server.bodies == []


def test_what_asks_for_nothing_is_not_refused(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    ask.run(min_p=0, repetition_penalty=1, ignore_eos=False, top_k=-1, backend=connect())
    assert not {"min_p", "repetition_penalty", "ignore_eos", "top_k"} & set(server.bodies[0])


def test_a_prediction_is_left_out_where_a_server_knows_none(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    ask.run(prediction="ab", backend=connect(flavor="vllm"))
    assert "prediction" not in server.bodies[0]


@pytest.mark.parametrize(
    "options",
    [{"n": 2}, {"logprobs": 0}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}],
    ids=str,
)
def test_a_prediction_is_left_out_beside_what_openai_refuses_it_with(
    options: dict[str, Any], server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    ask.run(prediction="ab", **options, backend=connect())
    assert "prediction" not in server.bodies[0]
    ask.run(prediction="ab", **options, backend=connect(flavor="stemma"))
    assert "prediction" in server.bodies[1]


def test_a_prediction_is_left_out_for_models_of_openai_that_reason(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    ask.run(prediction="ab", backend=connect("gpt-5-mini"))
    assert "prediction" not in server.bodies[0]


@pytest.mark.parametrize(("flavor", "is_sent"), [("openai", False), ("stemma", True)])
def test_a_prediction_of_a_completion_is_sent_where_the_server_takes_one(
    flavor: str, is_sent: bool, server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    write.run(prediction="ab", backend=connect(flavor=flavor, is_chat_model=False))
    assert ("prediction" in server.bodies[0]) == is_sent


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
WORDED = [
    ("stemma", {"regex": "[ab]"}, {"regex": "[ab]"}),
    ("stemma", {"json_schema": SCHEMA, "lenient": True}, {"json_schema": SCHEMA, "lenient": True}),
    ("stemma", {"ebnf": 'start: "a"'}, {"ebnf": 'start: "a"'}),
    ("stemma", {"top_k": 3, "ignore_eos": True}, {"top_k": 3, "ignore_eos": True}),
    ("stemma", {"prediction": "ab"}, {"prediction": {"type": "content", "content": "ab"}}),
    ("openai", {"prediction": "ab"}, {"prediction": {"type": "content", "content": "ab"}}),
    ("vllm", {"regex": "[ab]"}, {"structured_outputs": {"regex": "[ab]"}}),
    ("vllm", {"json_schema": SCHEMA}, {"structured_outputs": {"json": SCHEMA}}),
    ("vllm", {"ebnf": 'start: "a"'}, {"structured_outputs": {"grammar": 'start: "a"'}}),
    ("vllm", {"stop_token_ids": [4], "min_p": 0.0}, {"stop_token_ids": [4], "min_p": 0.0}),
    ("sglang", {"regex": "[ab]"}, {"regex": "[ab]"}),
    ("sglang", {"ebnf": 'start: "a"'}, {"ebnf": 'start: "a"'}),
    (
        "openai",
        {"json_schema": SCHEMA},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "output", "schema": SCHEMA, "strict": True},
            }
        },
    ),
]


@pytest.mark.parametrize(("flavor", "options", "expected"), WORDED)
def test_each_flavor_is_asked_in_its_own_words(
    flavor: str,
    options: dict[str, Any],
    expected: dict[str, Any],
    server: StandIn,
    connect: Callable[..., st.OpenAI],
) -> None:
    ask.run(**options, backend=connect(flavor=flavor))
    assert expected.items() <= server.bodies[0].items()


@pytest.mark.parametrize(
    ("flavor", "extra"),
    [
        ("stemma", {}),
        ("vllm", {"add_generation_prompt": False, "continue_final_message": True}),
        ("sglang", {"add_generation_prompt": False, "continue_final_message": True}),
    ],
)
def test_a_begun_answer_is_gone_on_with_where_the_server_can(
    flavor: str, extra: dict[str, Any], server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    @st.function
    def begun(s: st.ProgramState) -> None:
        s += st.user("Hi") + st.assistant("I say " + st.gen("a"))

    state = begun.run(backend=connect(flavor=flavor))
    assert state.messages()[-1]["content"] == "I say hello"
    assert server.bodies[0]["messages"][-1] == {"role": "assistant", "content": "I say "}
    assert extra.items() <= server.bodies[0].items()


MISPLACED: dict[str, tuple[Callable[[Any], Any], str, dict[str, Any]]] = {
    "text_in_a_chat": (lambda s: "Hi" + st.gen("a"), "outside of a message", {}),
    "gen_in_a_user_message": (lambda s: st.user(st.gen("a")), "assistant message", {}),
    "gen_after_begun_text": (
        lambda s: st.user("Hi") + st.assistant("I say " + st.gen("a")),
        "num_api_spec_tokens",
        {},
    ),
    "gen_first": (lambda s: st.assistant(st.gen("a")), "no message yet", {}),
    "role_in_a_text": (lambda s: st.user("Hi"), "completions", {"is_chat_model": False}),
    "nothing": (lambda s: st.gen("a"), "empty", {"is_chat_model": False}),
    "token_ids": (lambda s: st.tokens([1, 2]), "token ids", {"is_chat_model": False}),
    "text_before_a_chat": (lambda s: "Hi" + st.user("Hi"), "before the first", {"flavor": "vllm"}),
}


@pytest.mark.parametrize("case", MISPLACED)
def test_what_has_no_place_in_a_request_is_refused_with_its_line(
    case: str, server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    write_it, said, options = MISPLACED[case]

    @st.function
    def program(s: st.ProgramState) -> None:
        s += write_it(s)

    with pytest.raises(ProgramError, match=said) as caught:
        program.run(backend=connect(**options))
    assert caught.value.source is not None and __file__ in caught.value.source
    assert server.bodies == []


def test_a_backend_over_http_says_what_it_cannot_show(connect: Callable[..., st.OpenAI]) -> None:
    backend = connect()
    assert backend.get_server_info()["model"] == "some-chat"
    for ask_it in (backend.flush_cache, backend.tree):
        with pytest.raises(InvalidRequest, match="over HTTP"):
            ask_it()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"base_url": "ftp://x"}, "base_url"),
        ({"base_url": "http://x", "flavor": "none"}, "flavor"),
        ({"base_url": "http://x", "chat_template": "chatml"}, "chat_template"),
        ({"base_url": "http://x", "max_concurrency": 0}, "max_concurrency"),
        ({}, "api_key"),
        ({"is_azure": True}, "azure_endpoint"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    options: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "AZURE_OPENAI_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InvalidRequest) as caught:
        st.OpenAI("gpt-4o", **options)
    assert caught.value.field == field


def test_azure_has_the_deployment_in_its_address(server: StandIn) -> None:
    host = server.url.removesuffix("/v1")
    azure = {"azure_endpoint": host, "api_version": "2024-10-21", "api_key": "key"}
    with st.OpenAI("mine", is_azure=True, **azure) as backend:  # type: ignore[arg-type]
        with pytest.raises(ProgramError, match=r"/openai/deployments/mine/chat/completions"):
            ask.run(backend=backend)  # the stand-in has no such path: 404 names it


def test_flavor_auto_asks_who_owns_the_model(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    ask.run(regex="a", backend=connect("some", flavor="auto"))
    assert server.bodies[0]["structured_outputs"] == {"regex": "a"}


def test_sglangs_name_for_a_server_finds_out_what_it_is(server: StandIn) -> None:
    with st.RuntimeEndpoint(server.url.removesuffix("/v1"), api_key="key") as backend:
        assert backend.get_server_info() == {"model": "some", "base_url": server.url}
        ask.run(regex="a", backend=backend)
    assert server.bodies[0]["structured_outputs"] == {"regex": "a"}
    assert server.headers[0]["authorization"] == "Bearer key"


def test_hints_are_rejected_where_there_is_no_kv(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    @st.function
    def pinned(s: st.ProgramState) -> None:
        s += st.user("Hi") + st.assistant(st.gen("a"))
        s["outcome"] = s.pin(ttl_s=1).outcome
        with s.pause(expected_s=0.1):
            pass
        s += st.user("Ho") + st.assistant(st.gen("b"))

    state = pinned.run(backend=connect())
    assert (state["outcome"]["outcome"], state["b"]) == ("rejected", "hello")
    assert "no KV" in state["outcome"]["reason"]
    assert len(server.bodies) == 2


# --- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_passing_failure_is_tried_again(
    status: int, server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    server.failures = [refusal(status), refusal(status)]
    state = ask.run(backend=connect())
    assert state["a"] == "hello"
    assert state.get_meta_info("a")["num_retries"] == 2
    assert len(server.bodies) == 3


def test_a_server_that_says_when_to_come_back_is_obeyed(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    server.failures = [refusal(429, **{"retry-after": "0.3"})]
    started = time.monotonic()
    assert ask.run(backend=connect())["a"] == "hello"
    assert time.monotonic() - started >= 0.3


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_refusal_is_not_tried_again_and_names_the_line(
    status: int, server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    server.failures = [refusal(status, "temperature: too hot")]
    with pytest.raises(ProgramError, match=f"HTTP {status}: temperature: too hot") as caught:
        ask.run(backend=connect())
    assert (caught.value.kind, caught.value.op) == ("InvalidRequest", "a")
    assert caught.value.source is not None and __file__ in caught.value.source
    assert len(server.bodies) == 1


def test_a_failure_that_stays_is_an_error_after_all_attempts(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    server.failures = [refusal(503, "busy") for _ in range(9)]
    with pytest.raises(ProgramError, match="HTTP 503: busy") as caught:
        ask.run(backend=connect(max_retries=2))
    assert caught.value.kind == "EngineError"
    assert len(server.bodies) == 3


def test_a_stream_that_breaks_before_it_begins_is_tried_again(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    server.failures = ["break"]
    state = ask.stream(backend=connect())
    assert "".join(state.text_iter("a")) == "hello"
    assert len(server.bodies) == 2


def test_a_silent_server_is_given_up(server: StandIn, connect: Callable[..., st.OpenAI]) -> None:
    server.delay_s = 60
    with pytest.raises(ProgramError, match="ReadTimeout"):
        ask.run(backend=connect(timeout=1.0, max_retries=1))
    assert len(server.bodies) == 2


def test_a_deadline_ends_the_call(server: StandIn, connect: Callable[..., st.OpenAI]) -> None:
    server.delay_s = 60
    with pytest.raises(ProgramError, match=r"0\.1") as caught:
        ask.run(deadline=0.1, backend=connect())
    assert caught.value.kind == "DeadlineExceeded"
    wait_for(lambda: server.num_closed_early == 1)


def test_no_server_is_an_error_with_its_address() -> None:
    with st.OpenAI("some", base_url="http://127.0.0.1:9/v1", max_retries=0) as backend:
        with pytest.raises(ProgramError, match=r"127\.0\.0\.1:9"):
            ask.run(backend=backend)
    with pytest.raises(EngineError, match="did not answer"):
        st.Runtime("http://127.0.0.1:9")


def test_an_answer_that_is_none_of_openais_is_an_error(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    from fastapi.responses import JSONResponse

    server.failures = [JSONResponse({"choices": [{"index": 7, "message": {"content": "x"}}]})]
    with pytest.raises(ProgramError, match="none of OpenAI's"):
        ask.run(backend=connect())
    message = {"role": "assistant", "content": None, "refusal": "I will not"}
    server.failures = [JSONResponse({"choices": [{"index": 0, "message": message}]})]
    with pytest.raises(ProgramError, match="the model refused: I will not"):
        ask.run(backend=connect())


def test_cancelling_closes_the_request(server: StandIn, connect: Callable[..., st.OpenAI]) -> None:
    server.delay_s = 10
    state = ask.stream(backend=connect())
    wait_for(lambda: server.num_open == 1)
    state.cancel()
    wait_for(lambda: server.num_closed_early == 1 and server.num_open == 0)


def test_shutting_down_ends_programs_and_the_thread(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    server.delay_s = 10
    backend = connect()
    state = ask.stream(backend=backend)
    wait_for(lambda: server.num_open == 1)
    backend.shutdown()
    backend.shutdown()
    with pytest.raises(EngineError, match="shut down"):
        state["a"]
    with pytest.raises(EngineError, match="shut down"):
        ask.run(backend=backend)
    assert not backend.channel._thread.is_alive()


# --- many -----------------------------------------------------------------------------------------


def test_calls_under_way_are_bounded(server: StandIn, connect: Callable[..., st.OpenAI]) -> None:
    server.delay_s = 0.02
    backend = connect(max_concurrency=4)
    states = ask.run_batch([{}] * 20, backend=backend)
    assert [state["a"] for state in states] == ["hello"] * 20
    assert 2 <= server.max_open <= 4, "as many as the machine's pace allows"
    assert max(state.get_meta_info("a")["queue_s"] for state in states) > 0.02


def test_a_loser_of_a_join_is_an_error_where_it_is_read(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    @st.function
    def race(s: st.ProgramState) -> None:
        s += st.user("Hi")
        forks = s.fork(2)
        for fork in forks:
            fork += st.assistant(st.gen("tip"))
        forks.join(st.first(1))
        assert s["tip"] == ["hello"]
        with pytest.raises(ProgramError, match="the join had enough branches"):
            forks[1]["tip"]

    server.delay_s = 0.1
    race.run(backend=connect(max_concurrency=1)).sync()


def test_programs_in_flight_need_no_threads(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    from stemma.frontend.dsl.function import open_program

    backend = connect(max_concurrency=1)
    server.delay_s = 30
    before = threading.active_count()
    states = [open_program(backend) for _ in range(1000)]
    for state in states:
        state += st.user("Hi") + st.assistant(st.gen("a"))
    wait_for(lambda: server.num_open == 1)
    assert threading.active_count() <= before + 1  # the stand-in may have started one
    for state in states:
        state.cancel()
    wait_for(lambda: server.num_open == 0)


def test_async_programs_wait_for_each_other_on_one_thread(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    server.answer = lambda body: body["messages"][-1]["content"]

    @st.function
    async def twice(s: st.ProgramState, number: int) -> None:
        s += st.user(f"first {number}") + st.assistant(st.gen("a"))
        said = await s.aget("a")
        s += st.user(f"again {said}") + st.assistant(st.gen("b"))

    states = twice.run_batch([{"number": n} for n in range(50)], backend=connect())
    assert [state["b"] for state in states] == [f"again first {n}" for n in range(50)]


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


def wait_for(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
