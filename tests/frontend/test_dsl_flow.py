"""Forks, joins, copies, values that are not there yet, nested functions."""

from __future__ import annotations

import pytest
from dsl_programs import GREEDY

import stemma as st

pytestmark = pytest.mark.usefixtures("default_engine", "no_test_hangs")


def test_fork_join_gathers_values_in_order() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "Topics:"
        forks = s.fork(3)
        forks += lambda index: f" {index}: "
        forks += st.gen("tip", max_tokens=3, **GREEDY)
        for index, fork in enumerate(forks):
            fork["number"] = index
        forks.join()
        s += " done " + st.gen("end", max_tokens=2, **GREEDY)

    state = program.run()
    assert state["number"] == [0, 1, 2] and len(state["tip"]) == 3
    assert state.text() == "Topics: done " + state["end"]


def test_join_can_append_what_the_branches_wrote() -> None:
    @st.function
    def program(s: st.ProgramState) -> list[str]:
        s += "root"
        forks = s.fork(2)
        for index, fork in enumerate(forks):
            fork += f" [{index}:" + st.gen("v", max_tokens=2, **GREEDY) + "]"
        forks.join("concate_and_append")
        s += st.gen("end", max_tokens=2, **GREEDY)
        return [fork["v"] for fork in forks]

    state = program.run()
    first, second = state.ret_value
    assert state.text() == f"root [0:{first}] [1:{second}]" + state["end"]


def test_a_copy_goes_on_alone_and_a_var_carries_its_value_back() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "text "
        with s.copy() as side:
            side += "aside " + st.gen("thought", max_tokens=4, **GREEDY)
            s += "because " + side.var("thought") + "."

    assert program.run().text().startswith("text because ")


def test_a_var_of_a_known_value_is_its_text_and_one_of_a_list_is_refused() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s["n"] = 7
        s += s.var("n")
        forks = s.fork(2)
        forks += st.gen("v", max_tokens=1, **GREEDY)
        forks.join()
        with pytest.raises(st.InvalidProgram, match="is a list; index it first"):
            s.var("v")

    assert program.run().text() == "7"


def test_functions_nest() -> None:
    @st.function
    def inner(s: st.ProgramState, word: str) -> str:
        s += word + st.gen("w", max_tokens=2, **GREEDY)
        return s["w"]

    @st.function
    def outer(s: st.ProgramState) -> str:
        s += "outer "
        return inner(s, "inner ")

    state = outer.run()
    assert state.text() == "outer inner " + state.ret_value == "outer inner " + state["w"]
