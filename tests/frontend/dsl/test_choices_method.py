"""Selects that a method of the author's decides, on a real engine and over HTTP's channel."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import stemma as st

CHOICES = ["north", "south east", "up"]


class Shortest(st.ChoicesSamplingMethod):
    """Takes the last choice; keeps what it was called with."""

    def __init__(self, needs_more: bool = False) -> None:
        self.given: dict[str, Any] = {}
        self._needs_more = needs_more

    @property
    def requires_unconditional_logprobs(self) -> bool:
        return self._needs_more

    def __call__(self, **given: Any) -> st.ChoicesDecision:
        self.given = given
        return st.ChoicesDecision(min(given["choices"], key=len), {"why": "short"})


@st.function
def walk(s: st.ProgramState, method: Any) -> None:
    s += "We walk " + st.select("way", CHOICES, choices_method=method) + " and then"
    s += st.gen("rest", 3, temperature=0, ignore_eos=True)


pytestmark = pytest.mark.usefixtures("default_engine", "no_test_hangs")


def test_a_method_of_ones_own_decides_by_the_log_probabilities_of_all() -> None:
    method = Shortest()
    state = walk.run(method)
    assert state["way"] == "up" and state.text().startswith("We walk up and then")
    assert len(state.get_meta_info("rest")["output_ids"]) == 3
    given = method.given
    assert given["choices"] == CHOICES and given["unconditional_token_logprobs"] is None
    assert given["output_token_logprobs"] == [[], [], []]
    meta = state.get_meta_info("way")
    assert (meta["choices_method"], meta["why"]) == ("Shortest", "short")
    by_name = walk.run("token_length_normalized").get_meta_info("way")
    assert given["normalized_prompt_logprobs"] == pytest.approx(by_name["choice_logprobs"])
    assert meta["choice_logprobs"] == pytest.approx(by_name["choice_logprobs"])
    for choice, tokens in zip(CHOICES, given["input_token_logprobs"], strict=True):
        assert [token_id for _, token_id, _ in tokens] == list(choice.encode())
    assert meta["output_ids"] == list(b"up")


def test_scores_without_the_prompt_are_there_where_they_are_required() -> None:
    method = Shortest(needs_more=True)
    assert walk.run(method)["way"] == "up"
    without = method.given["unconditional_token_logprobs"]
    assert [len(tokens) for tokens in without] == [len(choice) for choice in CHOICES]


def test_an_async_function_awaits_the_decision() -> None:
    @st.function
    async def program(s: st.ProgramState, how: str) -> None:
        s += "We walk "
        asked = st.gen("way", choices=CHOICES, choices_method=Shortest())
        if how == "aappend":
            await s.aappend(asked)
        else:
            s += asked

    assert asyncio.run(program.arun("aappend"))["way"] == "up"
    with pytest.raises(st.InvalidProgram, match="aappend"):
        asyncio.run(program.arun("append"))


def test_a_decision_that_is_none_and_an_error_of_the_method_are_raised() -> None:
    with pytest.raises(st.InvalidProgram, match="an object whose decision is one of"):
        walk.run(lambda **_: st.ChoicesDecision("west"))
    with pytest.raises(ZeroDivisionError):
        walk.run(lambda **_: 1 / 0)
    with pytest.raises(st.InvalidProgram, match="choices_method="):
        st.select("x", CHOICES, choices_method="best")  # type: ignore[arg-type]
