"""Which bar each rule says for an answer, alone and combined."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import stemma as st
from stemma.frontend.cascade.acceptance import REFUSED, TAKEN, Judge, rule_of
from stemma.frontend.cascade.engine_calls import num_kept


def bar_of(rule: Any, text: str = "yes", mean_logprob: float | None = -0.2) -> float:
    answer = st.Answer(text, "prompt", "small", "stop", 3, mean_logprob)
    return asyncio.run(rule_of(rule).bar(answer))


def test_confidence_takes_or_refuses_and_agreement_says_its_bar() -> None:
    assert bar_of(st.mean_logprob(-0.2)) == TAKEN
    assert bar_of(st.mean_logprob(-0.1)) == REFUSED
    assert bar_of(st.agree(0.25)) == 0.25


def test_either_is_the_lower_bar_and_both_the_higher_one() -> None:
    sure, unsure = st.mean_logprob(-1), st.mean_logprob(0)
    assert bar_of(sure | st.agree(0.5)) == TAKEN
    assert bar_of(unsure | st.agree(0.5)) == 0.5
    assert bar_of(sure & st.agree(0.5)) == 0.5
    assert bar_of(unsure & st.agree(0.5)) == REFUSED
    assert bar_of(st.agree(0.5) | st.agree(0.8)) == 0.5
    assert bar_of(st.agree(0.5) & st.agree(0.8)) == 0.8


def test_functions_plain_and_async_stand_on_either_side() -> None:
    async def is_short(answer: st.Answer) -> bool:
        return len(answer.text) < 5

    assert bar_of(is_short) == TAKEN
    assert bar_of(is_short, "a long answer") == REFUSED
    assert bar_of(lambda answer: is_short(answer)) == TAKEN
    assert bar_of((lambda answer: answer.text == "yes") | st.agree(0.5)) == TAKEN
    assert bar_of(st.agree(0.5) & (lambda answer: answer.prompt == "prompt")) == 0.5


def test_a_function_is_not_asked_where_the_other_rule_has_decided() -> None:
    def never(answer: st.Answer) -> bool:
        raise AssertionError("asked")

    assert bar_of(st.mean_logprob(-1) | never) == TAKEN
    assert bar_of(st.mean_logprob(0) & never) == REFUSED


def raising(error: BaseException) -> Judge:
    def judge(answer: st.Answer) -> bool:
        raise error

    return judge


def raising_later(error: BaseException) -> Judge:
    async def judge(answer: st.Answer) -> bool:
        await asyncio.sleep(0)
        raise error

    return judge


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: st.mean_logprob(0.1), "mean_logprob=0.1"),
        (lambda: st.agree(0), "agree=0"),
        (lambda: st.agree(1.5), "agree=1.5"),
        (lambda: rule_of(0.5), "accept=0.5"),
        (lambda: bar_of(lambda answer: "yes"), "accept='yes'"),
        (lambda: bar_of(lambda answer: 1 / 0), "raised ZeroDivisionError"),
        (lambda: bar_of(raising(SystemExit(3))), "raised SystemExit: 3"),
        (lambda: bar_of(raising(asyncio.CancelledError())), "raised CancelledError"),
        (lambda: bar_of(raising_later(SystemExit(3))), "raised SystemExit: 3"),
        (lambda: bar_of(raising_later(asyncio.CancelledError())), "raised CancelledError"),
    ],
)
def test_what_is_no_rule_is_refused_by_name(make: Any, said: str) -> None:
    with pytest.raises(st.InvalidProgram, match=said):
        make()


def test_tokens_are_kept_up_to_the_first_below_the_bar() -> None:
    assert num_kept([-0.1, -0.5, -2.0, -0.1], -1.0) == 2
    assert num_kept([-0.1, -1.0], -1.0) == 2  # at the bar
    assert num_kept([-2.0], -1.0) == num_kept([], -1.0) == 0
