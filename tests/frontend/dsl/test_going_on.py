"""A branch whose op failed goes on once the program has caught the error, and what it has then."""

from __future__ import annotations

import asyncio

import pytest
from dsl_programs import GREEDY

import stemma as st
from stemma.frontend.dsl.expr import Expr

pytestmark = pytest.mark.usefixtures("default_engine", "no_test_hangs")

BAD = st.gen("bad", max_tokens=2, temperature=-1.0)


def fine(name: str) -> Expr:
    return st.gen(name, max_tokens=3, **GREEDY)


def catch(s: st.ProgramState, name: str = "bad") -> None:
    with pytest.raises(st.ProgramError, match="temperature=-1"):
        s[name]


def test_a_branch_goes_on_from_before_the_op_that_failed() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "one " + fine("a") + " two" + BAD + " lost" + fine("lost")
        catch(s)
        s += " three" + fine("b")

    @st.function
    def without(s: st.ProgramState) -> None:
        s += "one " + fine("a") + " two three" + fine("b")

    state, expected = program.run(), without.run()
    assert state.text() == expected.text() == f"one {state['a']} two three{state['b']}"
    assert state.error() is None
    catch(state)
    catch(state, "lost")


def test_an_error_that_is_not_caught_stops_the_branch() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "one" + BAD
        s += "two" + fine("b")

    with pytest.raises(st.ProgramError, match="temperature=-1"):
        program.run()


def test_a_second_failure_of_a_branch_is_raised_like_the_first() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "one" + BAD
        catch(s)
        s += "two" + st.gen("worse", temperature=-2.0)

    with pytest.raises(st.ProgramError, match="temperature=-2"):
        program.run()


def test_a_message_that_was_closed_behind_the_failure_is_gone_with_it() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += st.user("q") + st.assistant("well, " + fine("kept") + BAD) + st.user("lost, too")
        catch(s)
        s += st.assistant(fine("a"))

    @st.function
    def without(s: st.ProgramState) -> None:
        s += st.user("q") + st.assistant(fine("a"))

    state, expected = program.run(), without.run()
    assert state.messages() == expected.messages() and state.text() == expected.text()
    assert state["a"] == expected["a"] and state["kept"]
    tokens = [s.get_meta_info("a")["prompt_tokens"] for s in (state, expected)]
    assert tokens[0] == tokens[1]


def test_a_message_that_is_still_open_goes_on() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += st.user("q")
        with s.assistant():
            s += "well, " + BAD
            catch(s)
            s += "I do not know"

    assert program.run().messages() == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "well, I do not know"},
    ]


def test_a_fork_whose_error_was_handled_can_be_joined_and_forked() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "q"
        forks = s.fork(2)
        forks[0] += fine("x")
        forks[1] += BAD
        catch(forks[1])
        with forks[1].copy() as inner:
            inner += "in" + fine("y")
        forks[1] += "stead"
        forks.join("concate_and_append")
        s += "!"

    assert program.run().text().endswith("stead!")


def test_a_join_that_failed_can_be_gone_on_from_with_what_the_others_made() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "q"
        forks = s.fork(2)
        forks[0] += fine("x")
        forks[1] += BAD
        forks.join()
        with pytest.raises(st.ProgramError, match="a joined branch failed"):
            s.sync()
        s += " " + forks[0]["x"] + fine("a")

    state = program.run()
    assert state.text().startswith("q ") and state["a"]


def test_a_value_of_a_join_that_failed_is_caught_with_the_join() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "q"
        forks = s.fork(2)
        forks += [fine("x"), st.gen("x", temperature=-1.0)]
        forks.join()
        catch(s, "x")
        s += "without" + fine("y")

    state = program.run()
    assert state.text() == "qwithout" + state["y"]


def test_an_async_function_catches_a_join_with_its_value() -> None:
    @st.function
    async def program(s: st.ProgramState) -> None:
        s += "q"
        forks = s.fork(2)
        forks += [fine("x"), st.gen("x", temperature=-1.0)]
        forks.join()
        with pytest.raises(st.ProgramError, match="temperature=-1"):
            await s.aget("x")
        s += "without" + fine("y")

    state = asyncio.run(program.arun())
    assert state.text() == "qwithout" + state["y"]


def test_a_branch_that_never_began_cannot_go_on() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += BAD
        fork = s.fork(1)[0]
        for name in ("x", "y"):
            fork += fine(name)
            catch(fork, name)
        catch(s)

    assert isinstance(program.run().error(), st.ProgramError)


def test_the_value_of_a_lost_op_is_refused_where_it_is_appended() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += BAD
        lost = s.var("bad")
        catch(s)
        s += "go" + fine("a") + lost

    with pytest.raises(st.ProgramError, match="never made: bad: temperature=-1"):
        program.run()


def test_a_text_too_long_is_lost_with_the_op_that_needed_it() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "q" + fine("a")
        s += "x" * 5_000_000 + fine("b")
        with pytest.raises(st.ProgramError, match="prompt is too long"):
            s["b"]
        s += " short" + fine("c")

    state = program.run()
    assert state.text() == f"q{state['a']} short{state['c']}"


def test_a_stream_goes_on_where_its_program_does() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "one" + BAD + "lost"
        catch(s)
        s += " two" + fine("a")

    state = program.stream()
    assert "".join(state.text_iter()) == f"one two{state['a']}" == state.text()


def test_an_async_function_goes_on() -> None:
    @st.function
    async def program(s: st.ProgramState) -> None:
        s += "one" + BAD + "lost"
        with pytest.raises(st.ProgramError):
            await s.aget("bad")
        s += " two" + fine("a")

    async def read() -> str:
        state = await program.astream()
        text = "".join([chunk async for chunk in state.text_async_iter()])
        assert text == await state.atext() == f"one two{await state.aget('a')}"
        return text

    assert asyncio.run(read()).startswith("one two")


def test_the_report_has_the_call_that_failed() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "one" + BAD
        catch(s)
        s += " two" + fine("a")

    (record,) = program.run().report().programs
    failed, went_well = record.calls
    assert record.error is None
    assert "temperature=-1" in str(failed.error) and went_well.error is None
