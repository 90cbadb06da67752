"""Errors: where they are raised, what they say, what they leave behind."""

from __future__ import annotations

import time
from typing import Any

import pytest
from dsl_programs import GREEDY, deadline, line_of, two_gens, wait_until_idle

import stemma as st
from stemma.frontend.backend import get_default_backend
from stemma.frontend.dsl.function import open_program

pytestmark = pytest.mark.usefixtures("default_engine", "no_test_hangs")


@st.function
def fails(s: st.ProgramState, temperature: float) -> str:
    s += "before"
    s += st.gen("bad", max_tokens=2, temperature=temperature)  # the bad gen
    return s["bad"]


def test_an_error_is_raised_at_the_wait_with_the_source_line_and_the_runtimes_message() -> None:
    with pytest.raises(st.ProgramError) as caught:
        fails.run(-1.0)
    assert caught.value.op == "bad" and caught.value.kind == "InvalidRequest"
    assert caught.value.source is not None and caught.value.source.endswith(
        line_of(__file__, "the bad gen")
    )
    assert "temperature=-1.0 is not allowed; allowed: a number in [0, 10000]" in str(caught.value)
    assert line_of(__file__, "the bad gen") in str(caught.value)
    assert caught.traceback[-1].name != "<module>"


def test_a_prompt_too_long_is_an_error_of_its_op() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "x" * 5000 + st.gen("y", max_tokens=1)

    with pytest.raises(st.ProgramError, match="too long: 5000 tokens > 4095 maximum") as caught:
        program.run()
    assert caught.value.kind == "PromptTooLong"


def test_an_error_in_a_fork_is_raised_at_its_wait_and_by_the_join() -> None:
    waits: list[str] = []

    @st.function
    def program(s: st.ProgramState) -> None:
        s += "q"
        forks = s.fork(2)
        forks[0] += st.gen("x", max_tokens=2, **GREEDY)
        forks[1] += st.gen("x", max_tokens=2, top_p=7.0)  # the bad fork
        forks.join()
        s += "after"
        for fork in forks:
            try:
                waits.append(fork["x"])
            except st.ProgramError as error:
                waits.append(str(error.source))
        s.sync()

    with pytest.raises(st.ProgramError, match=r"a joined branch failed: x: top_p=7\.0") as caught:
        program.run()
    assert caught.value.op == "join"
    assert waits[1].endswith(line_of(__file__, "the bad fork")) and len(waits[0]) < 20


def test_an_error_that_nobody_read_is_raised_by_run() -> None:
    @st.function
    def program(s: st.ProgramState) -> str:
        side = s.copy()
        side += "x" + st.gen("unread", max_tokens=-1)  # the unread gen
        s += "y" + st.gen("fine", max_tokens=1, **GREEDY)
        return s["fine"]

    with pytest.raises(st.ProgramError, match="max_tokens=-1") as caught:
        program.run()
    assert line_of(__file__, "the unread gen") in str(caught.value)


def test_an_error_that_was_handled_is_not_raised_again() -> None:
    @st.function
    def program(s: st.ProgramState) -> str:
        side = s.copy()
        side += "x" + st.gen("bad", max_tokens=-1)
        try:
            return str(side["bad"])
        except st.ProgramError:
            assert side.error() is not None and s.error() is None
            return "handled"

    assert program.run().ret_value == "handled"


def test_an_error_is_raised_where_a_stream_is_read() -> None:
    with pytest.raises(st.ProgramError, match="temperature") as caught:
        list(fails.stream(-1.0).text_iter())
    assert line_of(__file__, "the bad gen") in str(caught.value)


def test_the_authors_own_exception_is_raised_where_a_stream_is_read() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "some text"
        raise LookupError("the author's own")

    pieces: list[str] = []
    with pytest.raises(LookupError, match="the author's own"):
        pieces.extend(program.stream().text_iter())
    with pytest.raises(LookupError, match="the author's own"):
        program.stream()["never made"]


def test_the_authors_own_exception_cancels_the_program(engine: st.Engine) -> None:
    def num_computed() -> int:
        return int(engine.get_server_info()["stats"]["num_computed_tokens"])

    @st.function
    def program(s: st.ProgramState) -> None:
        s += "long" + st.gen("x", max_tokens=4000, **GREEDY)
        while not engine.get_server_info()["num_running"]:
            time.sleep(0.01)
        raise LookupError("the author's own")

    before = num_computed()
    with pytest.raises(LookupError, match="the author's own"):
        program.run()
    wait_until_idle(engine)
    assert num_computed() - before < 3500, "it went on"


def test_a_batch_names_each_failed_instance_and_finishes_the_others() -> None:
    arguments = [{"temperature": t} for t in (0.0, -1.0, 0.0, -2.0)]
    with pytest.raises(st.BatchError, match="2 of 4 instances failed") as caught:
        fails.run_batch(arguments)
    assert sorted(caught.value.errors) == [1, 3]
    assert "temperature=-2.0" in str(caught.value)
    assert line_of(__file__, "the bad gen") in str(caught.value.errors[1])
    good = caught.value.states
    assert [state is None for state in good] == [False, True, False, True]
    states = fails.run_batch(arguments, raise_errors=False)
    assert [state.error() is None for state in states] == [True, False, True, False]
    assert states[2]["bad"] == states[0]["bad"] == good[0]["bad"] == good[2]["bad"]


def test_arguments_that_are_no_mapping_fail_that_instance(engine: st.Engine) -> None:
    with pytest.raises(st.BatchError) as caught:
        two_gens.run_batch([{"question": "a"}, None, {"queston": "b"}])  # type: ignore[list-item]
    assert sorted(caught.value.errors) == [1, 2]
    wait_until_idle(engine)


@pytest.mark.parametrize(
    "append",
    [
        lambda s: s.append("\ud800"),
        lambda s: s.append(st.gen("x", temperature=object())),  # type: ignore[arg-type]
        lambda s: s.append("x" * 17_000_000),
        lambda s: s.append(3),
    ],
    ids=["a lone surrogate", "an object", "a huge text", "a number"],
)
def test_what_cannot_be_sent_is_refused_at_once_and_appends_nothing(append: Any) -> None:
    """Nor does it harm the connection, or programs beside it."""

    @st.function
    def program(s: st.ProgramState) -> None:
        s += "a"
        with pytest.raises(st.InvalidProgram):
            append(s)
        s += "b" + st.gen("x", max_tokens=2, **GREEDY)

    state = program.run()
    assert state.text() == "ab" + state["x"]


def test_texts_larger_than_a_message_travel_in_several(engine: st.Engine) -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        for _ in range(5):
            s.copy().append("x" * 4_000_000)
        s += "q" + st.gen("x", max_tokens=1, **GREEDY)

    assert program.run().text().startswith("q")


def test_senseless_arguments_are_refused_where_they_are_given() -> None:
    for call in (
        lambda: st.gen(""),
        lambda: st.gen("n" * 2000),
        lambda: st.select("x", []),
        lambda: st.select("x", ["a", ""]),
        lambda: st.select("x", ["a"], choices_method="best"),  # type: ignore[arg-type]
        lambda: st.gen("x", choices_method="greedy_token_selection"),
        lambda: two_gens.run("q", seed=-1),
        lambda: two_gens.run("q", seed=2**63),
        lambda: two_gens.run("q", seed="one"),
        lambda: two_gens.run("q", backend="here"),
        lambda: two_gens.run_batch([{"question": "q"}], num_threads=0),
        lambda: st.user(3),  # type: ignore[arg-type]
        lambda: st.Runtime("ftp://somewhere"),
    ):
        with pytest.raises(st.InvalidRequest):
            call()


def test_wrong_use_of_a_state_is_refused_at_its_line() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        with pytest.raises(st.InvalidProgram, match="assistant message begun inside a user"):
            s += st.user_begin() + st.assistant("x")
        with pytest.raises(st.InvalidProgram, match="but the open message is user"):
            s += st.assistant_end()
        s += st.user_end()
        forks = s.fork(1)
        forks.join()
        with pytest.raises(st.InvalidProgram, match="was joined"):
            forks[0] += "x"
        with pytest.raises(st.InvalidProgram, match="size=0"):
            s.fork(0)
        with pytest.raises(st.InvalidProgram, match="cannot be replaced"):
            forks[0] = s
        with pytest.raises(st.InvalidProgram, match="mode='glue'"):
            s.fork(1).join("glue")  # type: ignore[arg-type]

    state = program.run()
    with pytest.raises(st.InvalidProgram, match="has ended"):
        state += "x"


def test_a_wait_in_a_fork_ends_when_the_runtime_refuses_the_whole_program() -> None:
    """An op that no client of ours sends: the program is refused, and no wait hangs."""
    state = open_program(get_default_backend())
    fork = state.fork(1)[0]
    fork += "q" + st.gen("x", max_tokens=2)
    state._seq += 5  # a gap in the numbers
    state += "text"
    with deadline(120), pytest.raises(st.ProgramError, match="seq"):
        fork["x"]
    state.cancel()


def test_reading_a_cancelled_program_raises() -> None:
    state = open_program(get_default_backend(), stream=True)
    state += "q" + st.gen("x", max_tokens=4000, **GREEDY)
    next(state.text_iter("x"))
    state.cancel()
    with pytest.raises(st.EngineError, match="cancelled"):
        state["x"]
