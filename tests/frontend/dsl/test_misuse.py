"""What looks like a program and is none: said at once, with what to write."""

from __future__ import annotations

import asyncio
import functools
import warnings
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from dsl_programs import GREEDY

import stemma as st

pytestmark = pytest.mark.usefixtures("default_engine", "no_test_hangs")


def yields(s: st.ProgramState) -> Iterator[str]:
    s += "x"
    yield "x"


async def yields_async(s: st.ProgramState) -> AsyncIterator[str]:
    s += "x"
    yield "x"


class Yielding:
    def __call__(self, s: st.ProgramState) -> Iterator[str]:
        yield "x"


@pytest.mark.parametrize(
    "fn",
    [yields, yields_async, Yielding(), functools.partial(yields)],
    ids=["plain", "async", "object", "partial"],
)
def test_a_generator_function_is_no_program(fn: Any) -> None:
    with pytest.raises(st.InvalidProgram, match=r"`yield`.*stream\(\.\.\.\)\.text_iter\(\)"):
        st.function(fn)


@st.function
def inner(s: st.ProgramState, word: str) -> str:
    s += word + st.gen("i", max_tokens=2, **GREEDY)
    return s["i"]


def test_a_program_called_without_its_state_inside_another_is_warned_of() -> None:
    @st.function
    def outer(s: st.ProgramState) -> None:
        s += "outer"
        inner("hello")

    @st.function
    async def outer_async(s: st.ProgramState) -> None:
        s += "outer"
        await asyncio.to_thread(inner, "hello")

    with pytest.warns(UserWarning, match=r"Write inner\(s, \.\.\.\).*or inner\.run") as caught:
        outer.run()
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match=r"inner\(\) is called within outer_async\(\)"):
        outer_async.run()


def test_programs_called_as_they_should_be_are_not_warned_of() -> None:
    @st.function
    def outer(s: st.ProgramState) -> None:
        s += inner(s, "a") + inner(s=s, word="b")
        inner.run("c")
        inner.run_batch([{"word": "d"}])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outer.run()
        outer()
        inner("e")
