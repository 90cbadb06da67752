"""Batches and streams."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from dsl_programs import GREEDY, two_gens
from waiting import wait_until

import stemma as st

pytestmark = pytest.mark.usefixtures("default_engine", "no_test_hangs")


def test_a_batch_equals_single_runs_in_order() -> None:
    questions = [f"number {i}" for i in range(12)]
    batch = two_gens.run_batch([{"question": q} for q in questions])
    assert [state.text() for state in batch] == [two_gens.run(q).text() for q in questions]
    assert two_gens.run_batch([]) == []


def test_a_progress_bar_counts_the_instances(capfd: pytest.CaptureFixture[str]) -> None:
    two_gens.run_batch([{"question": "a"}] * 3, progress_bar=True)
    assert "3/3" in capfd.readouterr().err


def test_more_waiting_programs_than_threads_all_end() -> None:
    @st.function
    def program(s: st.ProgramState, i: int) -> int:
        s += str(i) + st.gen("x", max_tokens=2, **GREEDY)
        return len(s["x"]) and i

    states = program.run_batch([{"i": i + 1} for i in range(8)], num_threads=2)
    assert [state.ret_value for state in states] == list(range(1, 9))


@pytest.mark.parametrize("num_threads", [0, -1, 1.5, True, None, "many"])
def test_a_number_of_threads_that_is_none_is_refused_by_name(num_threads: Any) -> None:
    with pytest.raises(st.InvalidProgram, match=r"num_threads=.* an integer >= 1"):
        st.function(lambda s: None).run_batch([], num_threads=num_threads)


def test_a_stream_yields_pieces_that_add_up() -> None:
    state = two_gens.stream("stream")
    pieces = list(state.text_iter())
    assert "".join(pieces) == state.text() == two_gens.run("stream").text()

    @st.function
    def long(s: st.ProgramState) -> None:
        s += "q" + st.gen("x", max_tokens=300, **GREEDY)

    # One by one, unless whoever reads them is kept from it for as long as all of them take.
    wait_until(lambda: len(list(long.stream().text_iter("x"))) > 4)


def test_one_value_can_be_streamed_alone() -> None:
    state = two_gens.run("value", stream=True)
    assert "".join(state.text_iter("second")) == state["second"]
    assert "".join(two_gens.run("value").text_iter("second")) == state["second"]


def test_a_value_of_a_streaming_run_can_be_read_before_its_gen_was_appended() -> None:
    go_on = threading.Event()

    @st.function
    def program(s: st.ProgramState) -> None:
        assert "x" not in s and go_on.wait(120)
        s += "late" + st.gen("x", max_tokens=3, **GREEDY)

    state = program.stream()
    threading.Timer(0.1, go_on.set).start()
    assert state["x"] == state.text().removeprefix("late")
    with pytest.raises(KeyError, match="no value called 'y'; there are"):
        state["y"]


def test_a_whole_text_of_a_streaming_run_waits_for_its_end() -> None:
    go_on = threading.Event()

    @st.function
    def program(s: st.ProgramState) -> None:
        with s.user():
            assert s.text() and go_on.wait(120)
            s += "late"

    state = program.stream()
    threading.Timer(0.1, go_on.set).start()
    assert "late" in state.text()
    assert state.messages() == [{"role": "user", "content": "late"}]


def test_text_appended_before_a_pause_is_streamed_during_it() -> None:
    go_on = threading.Event()

    @st.function
    def program(s: st.ProgramState) -> None:
        s += "early"
        assert go_on.wait(120)
        s += " late"

    pieces = program.stream().text_iter()
    assert next(pieces) == "early"
    go_on.set()
    assert "".join(pieces) == " late"
