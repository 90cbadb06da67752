"""API-speculative execution: one answer for several gens, and what happens when it does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as hyp
from openai_stand_in import StandIn

import stemma as st
from stemma.errors import ProgramError
from stemma.frontend.openai.speculation import Draft, Filled, Slot, matched
from stemma.frontend.openai.stops import Stops

CARD = "Name: Ada\nBirthday: May 1\nJob: pilot\nAge: 30\n"
WORDS = hyp.text("abc xyz", min_size=1, max_size=6)
LITERALS = hyp.text("ABC:", min_size=1, max_size=4)


# --- patterns -------------------------------------------------------------------------------------


@given(hyp.lists(hyp.tuples(LITERALS, WORDS), min_size=1, max_size=5), hyp.text(max_size=5))
def test_a_pattern_reads_back_what_an_answer_was_made_of(
    parts: list[tuple[str, str]], rest: str
) -> None:
    terms: list[str | Slot] = []
    for literal, _ in parts:
        terms += [literal, Slot(("\n",)), "\n"]
    answer = "".join(f"{literal}{value}\n" for literal, value in parts) + rest
    assert matched(terms, answer) == [Filled(value, "\n") for _, value in parts]


@given(hyp.lists(hyp.tuples(LITERALS, WORDS), min_size=1, max_size=4))
def test_without_stops_a_value_ends_where_the_next_text_begins(
    parts: list[tuple[str, str]],
) -> None:
    terms = [term for literal, _ in parts for term in (f"{literal}\n", Slot())]
    answer = "".join(f"{literal}\n{value}" for literal, value in parts)
    if any(literal + "\n" in value for _, value in parts for literal, _ in parts):
        return
    assert matched(terms, answer) == [Filled(value) for _, value in parts]


@pytest.mark.parametrize(
    ("terms", "answer"),
    [
        (["Name:", Slot(("\n",)), "\nJob:", Slot(("\n",))], "Name: Ada\nAge: 3\n"),
        (["Name:", Slot(("\n",)), "\nJob:", Slot(("\n",))], "Name: Ada"),
        (["Name:", Slot(("\n",))], "name: Ada\n"),
        ([Slot(), "!", Slot()], "no sign"),
        ([Slot(), Slot()], "two without anything between them"),
    ],
)
def test_an_answer_that_says_something_else_does_not_fit(
    terms: list[str | Slot], answer: str
) -> None:
    assert matched(terms, answer) is None


def test_text_behind_the_last_gen_need_not_be_in_the_answer() -> None:
    assert matched([Slot(("\n",)), "\nThe end."], "Ada") == [Filled("Ada")]


def test_a_draft_counts_only_as_long_as_the_program_appends_what_it_says() -> None:
    draft = Draft(" Ada\nJob: pilot", True, None)
    assert draft.take(["\n"]) == Filled(" Ada", "\n")
    rest = draft.after(" Ada")
    assert rest is not None and rest.after("\nAge:") is None
    job = rest.after("\nJob:")
    assert job is not None and job.take(["\n"]) == Filled(" pilot")
    assert Draft("cut of", False, None).take(["\n"]) is None


@given(hyp.lists(hyp.text("ab", min_size=1, max_size=4), max_size=3), hyp.text("ab", max_size=12))
def test_text_passed_on_early_is_never_taken_back(stops: list[str], text: str) -> None:
    ends = Stops(stops)
    found = ends.find(text)
    whole = text if found is None else text[: found.position]
    for end in range(len(text) + 1):
        if ends.find(text[:end]) is None:
            sent = text[: ends.num_sure(text[:end])]
            assert whole.startswith(sent)
    assert found is None or not any(stop in whole for stop in stops)


# --- programs -------------------------------------------------------------------------------------


def character(s: st.ProgramState, **options: Any) -> None:
    s += "Name:" + st.gen("name", stop="\n", **options)
    s += "\nBirthday:" + st.gen("birthday", stop="\n", **options)
    s += "\nJob:" + st.gen("job", stop="\n", **options) + "\n"


def character_text(s: st.ProgramState, **options: Any) -> None:
    s += "A character.\n"
    character(s, **options)


def character_chat(s: st.ProgramState, **options: Any) -> None:
    s += st.user("A character, please.")
    with s.assistant():
        character(s, **options)


def goes_on(body: dict[str, Any]) -> str:
    """What a model says that wants to write CARD."""
    if "messages" in body:
        return CARD
    written = body["prompt"].removeprefix("A character.\n")
    return CARD.removeprefix(written) if CARD.startswith(written) else " ?\n"


def calls_of(state: st.ProgramState) -> list[int]:
    names = ("name", "birthday", "job")
    return [state.get_meta_info(name)["num_api_calls"] for name in names]


def test_a_text_endpoint_answers_three_gens_in_one_call(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    server.answer = goes_on
    backend = connect("davinci-002")
    plain = st.function(character_text).run(backend=backend, temperature=0)
    assert (calls_of(plain), len(server.bodies)) == ([1, 1, 1], 3)
    server.bodies.clear()
    program = st.function(num_api_spec_tokens=64)(character_text)
    state = program.run(backend=backend, temperature=0)
    assert (calls_of(state), len(server.bodies)) == ([1, 0, 0], 1)
    assert server.bodies[0]["max_tokens"] == 64
    assert "stop" not in server.bodies[0]
    assert state.text() == plain.text()
    assert [state[n] for n in ("name", "birthday", "job")] == [" Ada", " May 1", " pilot"]
    assert state.get_meta_info("job")["completion_tokens"] == 0
    assert backend.token_usage.num_api_calls == 4


def test_a_text_endpoint_is_asked_again_where_the_program_says_something_else(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    server.answer = lambda body: " Ada\nAge: 3\n" if body["prompt"].endswith("Name:") else " x\n"
    program = st.function(num_api_spec_tokens=64)(character_text)
    state = program.run(backend=connect("davinci-002"))
    assert calls_of(state) == [1, 1, 1]
    assert [state[n] for n in ("name", "birthday", "job")] == [" Ada", " x", " x"]
    assert server.bodies[1]["prompt"] == "A character.\nName: Ada\nBirthday:"


def test_a_short_answer_is_asked_on_from_where_it_was_cut(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    server.answer = goes_on
    program = st.function(num_api_spec_tokens=4)(character_text)  # " Ada\nBirthday: May"
    state = program.run(backend=connect("davinci-002"))
    assert state.text() == "A character.\n" + CARD.partition("Age")[0]
    assert calls_of(state) == [1, 1, 1]


def test_a_gen_with_a_limit_of_its_own_is_asked_by_itself(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    server.answer = goes_on
    program = st.function(num_api_spec_tokens=64)(character_text)
    state = program.run(backend=connect("davinci-002"), max_tokens=9)
    assert calls_of(state) == [1, 1, 1]
    assert [body["max_tokens"] for body in server.bodies] == [9, 9, 9]


def test_a_chat_endpoint_answers_a_message_of_three_gens_in_one_call(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    server.answer = goes_on
    program = st.function(num_api_spec_tokens=64)(character_chat)
    state = program.run(backend=connect("some-chat"))
    assert [state[n] for n in ("name", "birthday", "job")] == [" Ada", " May 1", " pilot"]
    assert state.messages()[-1]["content"] == CARD.partition("Age")[0]
    assert (calls_of(state), len(server.bodies)) == ([1, 0, 0], 1)
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "A character, please."}]


def test_a_chat_endpoint_is_asked_again_until_an_answer_fits(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    server.answer = lambda body: goes_on(body) if len(server.bodies) == 3 else "I'd rather not."
    program = st.function(num_api_spec_tokens=64)(character_chat)
    state = program.run(backend=connect("some-chat"))
    assert (state["job"], calls_of(state)) == (" pilot", [3, 0, 0])
    assert len({body["seed"] for body in server.bodies}) == 3


def test_three_answers_that_do_not_fit_are_an_error_with_the_gens_line(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    server.answer = lambda body: "I'd rather not."
    program = st.function(num_api_spec_tokens=64)(character_chat)
    with pytest.raises(ProgramError, match="I'd rather not") as caught:
        program.run(backend=connect("some-chat"))
    assert (caught.value.kind, caught.value.op) == ("PatternMismatch", "name")
    assert caught.value.source is not None and __file__ in caught.value.source
    assert len(server.bodies) == 3


def test_a_message_that_is_one_gen_is_an_ordinary_call(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    @st.function(num_api_spec_tokens=64)
    def program(s: st.ProgramState) -> None:
        s += st.user("Hi") + st.assistant(st.gen("a", stop="!", n=2, max_tokens=5))
        s += st.user("Ho") + st.assistant(st.gen("b"))

    state = program.run(backend=connect("some-chat"))
    assert (state["a"], state["b"]) == (["hello", "hello"], "hello")
    assert [body["max_tokens"] for body in server.bodies] == [5, 64]
    assert server.bodies[0]["stop"] == ["!"]


def test_a_program_that_waits_within_a_message_is_answered_so_far(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    server.answer = goes_on
    seen = []

    @st.function(num_api_spec_tokens=64)
    def program(s: st.ProgramState) -> None:
        s += st.user("A character, please.")
        with s.assistant():
            s += "Name:" + st.gen("name", stop="\n")
            seen.append(s["name"])
            s += "\nBirthday:" + st.gen("birthday", stop="\n")
            s += "\nJob:" + st.gen("job", stop="\n")

    state = program.run(backend=connect("some-chat"))
    assert seen == [" Ada"]
    assert (state["birthday"], state["job"]) == (" May 1", " pilot")
    assert (calls_of(state), len(server.bodies)) == ([1, 0, 0], 1)


@pytest.mark.parametrize(
    "second", [{"temperature": 0.5}, {"max_tokens": 4}, {"n": 2}, {"json_schema": {}}]
)
def test_gens_that_cannot_share_an_answer_are_refused(
    second: dict[str, Any], server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    @st.function(num_api_spec_tokens=64)
    def program(s: st.ProgramState) -> None:
        s += st.user("Hi")
        s += st.assistant(st.gen("a", stop="\n") + "\n" + st.gen("b", **second))

    with pytest.raises(ProgramError) as caught:
        program.run(backend=connect("some-chat"))
    assert caught.value.kind == "InvalidProgram"
    assert server.bodies == []


def test_a_gen_that_was_put_off_fails_with_a_later_one(
    connect: Callable[..., st.OpenAI],
) -> None:
    @st.function(num_api_spec_tokens=64)
    def program(s: st.ProgramState) -> None:
        s += st.user("Hi")
        s += st.assistant_begin() + st.gen("a", stop="\n") + "\n" + st.gen("b", temperature=0.5)
        with pytest.raises(ProgramError, match="share one answer"):
            s["a"]

    program.run(backend=connect("some-chat"))


def test_forks_after_put_off_gens_go_on_from_their_values(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    server.answer = goes_on

    @st.function(num_api_spec_tokens=64)
    def program(s: st.ProgramState) -> None:
        s += st.user("A character, please.")
        s += st.assistant_begin() + "Name:" + st.gen("name", stop="\n")
        forks = s.fork(2)
        forks += lambda i: st.assistant_end() + st.user(f"Again {i}") + st.assistant(st.gen("x"))
        forks.join()

    state = program.run(backend=connect("some-chat"))
    assert state["x"] == [CARD, CARD]
    assert {"role": "assistant", "content": "Name: Ada"} in server.bodies[-1]["messages"]


@pytest.mark.parametrize("value", [0, -1, True, "many", 10**9])
def test_num_api_spec_tokens_is_checked(
    value: Any, server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    with pytest.raises(st.InvalidProgram, match="num_api_spec_tokens"):
        st.function(num_api_spec_tokens=value)(character_text).run(backend=connect("davinci-002"))
