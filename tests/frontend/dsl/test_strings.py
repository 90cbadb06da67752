"""What an f-string makes of expressions and states: a refusal that says what to write, or text."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
from dsl_programs import GREEDY

import stemma as st

pytestmark = pytest.mark.usefixtures("default_engine", "no_test_hangs")

WAYS: list[Callable[[Any], str]] = [
    lambda x: f"You said: {x}",
    lambda x: f"{x:>10}",
    lambda x: "You said: {}".format(x),  # noqa: UP032
    lambda x: "You said: %s" % x,  # noqa: UP031
    lambda x: str(x),
    lambda x: "".join(map(str, [x])),
]


@pytest.mark.parametrize("way", WAYS)
def test_no_expression_becomes_part_of_a_string(way: Callable[[Any], str]) -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "Hi" + st.gen("a", max_tokens=3, **GREEDY)
        known = s.copy()
        known["x"] = st.gen("x")
        for expression in (
            s.var("a"),
            st.gen("x"),
            st.select("x", ["a"]),
            st.user("Hi"),
            "Hi" + st.gen("x"),
            st.tokens([1]),
            known["x"],
        ):
            with pytest.raises(st.InvalidProgram, match=r's \+= "You said: " \+ s\.var\("a"\)'):
                s += way(expression)
        with pytest.raises(st.InvalidProgram, match="cannot be put into a string"):
            known.var("x")
        with pytest.raises(st.InvalidProgram, match=r"forks\[0\]\.text\(\)"):
            s += way(s.fork(2))
        s += way(s["a"])

    state = program.run()
    assert state.text() == f"Hi{state['a']}" + way(state["a"])


def test_what_python_refuses_itself_names_the_expression() -> None:
    with pytest.raises(TypeError, match="GenExpr"):
        "".join(["a", st.gen("x")])  # type: ignore[list-item]


def test_an_expression_can_be_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    expression = "a" + st.gen("name", max_tokens=3)
    assert "name" in repr(expression) and "name" in f"{expression!r}"
    logging.getLogger("mine").warning("made %r", expression)
    assert "name" in caplog.text
    with pytest.raises(AssertionError):  # pytest writes both sides
        assert expression == st.gen("other")


def test_a_state_is_formatted_as_its_text() -> None:
    texts: list[str] = []

    @st.function
    def program(s: st.ProgramState) -> None:
        s += "Hi" + st.gen("a", max_tokens=3, **GREEDY)
        texts.append(f"{s}")

    state = program.run()
    assert texts == [state.text()] == [str(state)] == [f"{state:s}"]
    assert f"{state:>40}" == f"{state.text():>40}"
    assert "ProgramState" in repr(state)
    assert "s.text()" in program.trace().to_text()


def test_an_async_function_is_told_to_await_its_text() -> None:
    @st.function
    async def program(s: st.ProgramState) -> None:
        s += "Hi" + st.gen("a", max_tokens=3, **GREEDY)
        with pytest.raises(st.InvalidProgram, match=r"s\.atext\(\)"):
            str(s)

    asyncio.run(program.arun())
