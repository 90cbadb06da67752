"""Forks, joins, copies, values that are not there yet, nested functions."""

from __future__ import annotations

import threading
import time

import pytest
from dsl_programs import GREEDY, deadline

import stemma as st
from stemma.errors import InvalidProgram
from stemma.frontend.backend import get_default_backend

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


# --- what the runtime knows of a program's KV -----------------------------------------------------


def test_the_first_of_several_branches_is_enough_and_the_others_are_stopped() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "q"
        forks = s.fork(3)
        forks += [st.gen("x", max_tokens=3000 if i == 1 else 2, **GREEDY) for i in range(3)]
        forks.join(st.first(2))
        s += " end " + st.gen("y", max_tokens=2, **GREEDY)

    before = num_computed()
    with deadline(120):
        state = program.run()
    assert num_computed() - before < 2500, "the long branch went on"
    assert len(state["x"]) == 2 and state["y"]
    assert state.get_meta_info("x")[0]["completion_tokens"] == 2


def test_a_branch_that_is_paused_at_the_join_has_not_ended_and_is_stopped() -> None:
    @st.function
    def program(s: st.ProgramState) -> str:
        forks = s.fork(3)
        forks += lambda i: f"{i}: "
        began, may_end, told = threading.Event(), threading.Event(), list[Exception]()

        def search() -> None:
            forks[0].call(lambda: (began.set(), may_end.wait(120)))
            try:
                forks[0] += st.gen("x", max_tokens=2, **GREEDY)
            except InvalidProgram as error:
                told.append(error)

        tool = threading.Thread(target=search)
        tool.start()
        assert began.wait(120)
        forks[1:] += st.gen("x", max_tokens=2, **GREEDY)
        with pytest.raises(InvalidProgram, match="3 branches are needed, and 1 of 3 are paused"):
            forks.join(st.first(3))
        forks.join(st.first(2))
        assert s["x"] == [forks[1]["x"], forks[2]["x"]]
        may_end.set()
        tool.join(120)
        return str(told[0])

    with deadline(120):
        assert "was joined" in program.run().ret_value


def test_a_call_that_has_ended_is_no_pause_and_a_branch_of_text_alone_counts() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        forks = s.fork(2)
        forks[0].call(len, "tool")
        forks[0] += "nothing to say"
        forks[1] += st.gen("x", max_tokens=3000, **GREEDY)
        forks.join(st.first(1))

    with deadline(120):
        assert program.run()["x"] == [None]


def test_forks_of_losers_and_of_dropped_branches_stop_and_are_no_errors() -> None:
    long = st.gen("long", max_tokens=3000, **GREEDY)

    @st.function
    def program(s: st.ProgramState) -> object:
        s += "q"
        forks = s.fork(2)
        of_loser = forks[1].fork(2)
        forks += [st.gen("x", max_tokens=2, **GREEDY), long]
        of_loser += long
        forks.join(st.first(1))
        side = s.copy()
        of_side = side.fork(2)
        of_side += long
        of_side.join()
        del side, of_side
        s += st.gen("y", max_tokens=2, **GREEDY)
        return s["y"], of_loser

    before = num_computed()
    with deadline(120):
        program.run()
    assert num_computed() - before < 2500, "a branch that nobody reads went on"


def test_a_dropped_fork_is_stopped_while_the_program_goes_on() -> None:
    @st.function
    def program(s: st.ProgramState) -> int:
        s += "q"
        side = s.copy()
        side += st.gen("long", max_tokens=3500, **GREEDY)
        s += st.gen("x", max_tokens=2, **GREEDY)
        s.sync()
        del side
        s += " and " + st.gen("y", max_tokens=2, **GREEDY)
        return num_computed()

    before = num_computed()
    with deadline(120):
        after = program.run().ret_value
    assert after - before < 2500, "the dropped fork went on"


def test_hints_and_pauses_change_no_text() -> None:
    @st.function
    def program(s: st.ProgramState, is_hinted: bool) -> None:
        s += "Once upon a time"
        if is_hinted:
            s["pinned"] = s.pin(ttl_s=5).outcome["outcome"]
            with s.pause(expected_s=0.01):
                pass
        s += st.gen("x", max_tokens=6, **GREEDY)

    hinted, plain = program.run(True), program.run(False)
    assert hinted.text() == plain.text()
    assert hinted["pinned"] in ("accepted", "clipped", "deferred", "rejected", "missing")


def num_computed() -> int:
    """Tokens that the engine has computed so far, once nothing runs any more."""
    engine = get_default_backend()
    while engine.get_server_info()["num_running"]:
        time.sleep(0.02)
    return int(engine.get_server_info()["stats"]["num_computed_tokens"])
