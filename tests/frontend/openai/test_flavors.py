"""What servers of OpenAI's API do not understand, and how each is asked in its own words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai_stand_in
import pytest
from openai_stand_in import StandIn, ask, write

import stemma as st
from stemma.errors import InvalidRequest, ProgramError

REFUSED: dict[str, dict[str, Any]] = {
    "max_tokens": {"max_tokens": 0},
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
    assert caught.value.source is not None and openai_stand_in.__file__ in caught.value.source
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
        info = backend.get_server_info()
        assert (info["model"], info["base_url"]) == ("some", server.url)
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
