"""Outputs as Python values: types, checks, retries."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pydantic
import pytest
import typing_extensions
from engine_thread import Backend, engine_in_thread

import stemma as st
from stemma.frontend.dsl.expr import GenExpr
from stemma.frontend.protocol import ir


class Person(pydantic.BaseModel):
    name: str
    age: int


class Mood(enum.Enum):
    GOOD = "good"
    BAD = "bad"


@dataclass
class Point:
    x: int


class Named(typing_extensions.TypedDict):
    name: str


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (Person, '{"name":"Ada","age":34}', Person(name="Ada", age=34)),
        (Point, '{"x":1}', Point(1)),
        (Named, '{"name":"Ada"}', {"name": "Ada"}),
        (list[int], "[1,2]", [1, 2]),
        (dict[str, bool], '{"a":true}', {"a": True}),
        (int | None, "null", None),
        (Mood, "good", Mood.GOOD),
        (Literal["a", "b"], "b", "b"),
        (Literal[1, 2], "2", 2),
        (int, "7", 7),
        (float, "0.5", 0.5),
        (bool, "False", False),
        (str, '"as it is"', '"as it is"'),
    ],
)
def test_a_type_reads_the_text_that_it_allows(kind: Any, text: str, value: Any) -> None:
    made = st.gen("x", type=kind)
    assert isinstance(made, GenExpr) and made.read is not None
    assert made.read(text) == value
    assert (made.params.constraint is None) == (kind is str)


@pytest.mark.parametrize(
    "options",
    [
        {"type": Person, "regex": "a"},
        {"type": Person, "dtype": int},
        {"type": Person, "json_schema": Person},
        {"type": int, "choices": ["a"]},
        {"type": asyncio.Lock},
        {"type": "no such"},
        {"type": [int]},
        {"validate": 1},
        {"validate": asyncio.sleep},
        {"retries": -1},
        {"retries": 0.5},
        {"dtype": list},
        {"dtype": "list"},
    ],
)
def test_what_fits_no_output_is_refused_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(st.InvalidProgram):
        st.gen("x", **options)


@pytest.fixture(scope="module")
def engine() -> Any:
    with engine_in_thread(num_threads=1, max_total_tokens=4096) as engine:
        yield engine


ASKED = "Text: Ada Moor is 34 years old.\nExtract name, age as JSON."


def test_a_value_is_an_object_and_its_text_can_be_had(engine: Backend) -> None:
    @st.function
    def extract(s: st.ProgramState) -> None:
        s += st.user(ASKED) + st.assistant(st.gen("person", type=Person))
        s += st.user("Which number?") + st.assistant_begin()
        s += st.gen("numbers", type=int, n=3, max_tokens=3) + st.gen("mood", type=Mood)

    state = extract.run(backend=engine, temperature=0, seed=1)
    assert state["person"] == Person(name="Ada Moor", age=34)
    assert state["person"] is state["person"]
    assert state.text("person") == '{"name":"Ada Moor","age":34}'
    assert all(isinstance(number, int) for number in state["numbers"])
    assert state.text("numbers") == str(state["numbers"][0])
    assert state["mood"] in Mood and state.text("mood") == state["mood"].value
    assert asyncio.run(state.atext("person")) == state.text("person")

    @st.function
    def joined(s: st.ProgramState) -> None:
        s += st.user(ASKED) + st.assistant_begin()
        forks = s.fork(3)
        for number in (0, 2):
            forks[number].append(st.gen("person", type=Person))
        forks.join(mode="gather_variable")

    persons = joined.run(backend=engine, temperature=0)["person"]
    assert persons[1] is None and persons[0] == persons[2] == Person(name="Ada Moor", age=34)


def test_an_output_that_was_cut_off_says_so_where_it_is_read(engine: Backend) -> None:
    @st.function
    def extract(s: st.ProgramState) -> None:
        s += st.user(ASKED) + st.assistant(st.gen("person", type=Person, max_tokens=4))

    state = extract.run(backend=engine, temperature=0)
    with pytest.raises(st.ProgramError, match=r"person: the output .* cut off.*max_tokens") as told:
        state["person"]
    assert told.value.kind == "InvalidOutput" and "test_typed.py" in str(told.value.source)
    assert state.text("person").startswith("{")


def draws(check: Callable[[Any], Any], retries: int, **options: Any) -> st.Function:
    @st.function
    def draw(s: st.ProgramState) -> None:
        s += st.user("A number?")
        asked = st.gen("x", regex="[0-9]{8}", validate=check, retries=retries, **options)
        s += st.assistant("It is " + asked + ".")
        s += st.user("Sure?") + st.assistant(st.gen("y", max_tokens=4))

    return draw


def test_a_value_is_generated_until_it_will_do_and_only_that_one_stays(engine: Backend) -> None:
    seen: list[str] = []

    def check(text: str) -> None:
        seen.append(text)
        if len(seen) < 4:
            raise ValueError("not yet")

    state = draws(check, 5).run(backend=engine, temperature=4, seed=3)
    assert len(seen) == 4 and len(set(seen)) > 1, "each attempt draws anew"
    assert state["x"] == seen[-1] and f"It is {seen[-1]}." in state.text()
    assert state.messages()[1] == {"role": "assistant", "content": f"It is {seen[-1]}."}
    assert state.get_meta_info("x")["completion_tokens"] == 8
    last, seen[:] = seen[-1], []
    again = draws(check, 5).run(backend=engine, temperature=4, seed=3)
    assert again["x"] == last, "seeded"


def test_what_was_taken_over_is_the_same_tokens(engine: Backend) -> None:
    """As if the one attempt had been appended: the next call's prompt is cached whole."""
    plain = draws(lambda text: None, 0).run(backend=engine, temperature=0)
    meta = plain.get_meta_info("y")
    assert meta["prompt_tokens"] - meta["cached_tokens"] < 16


def test_a_retry_draws_where_the_first_attempt_took_the_likeliest(engine: Backend) -> None:
    programs = []

    @st.function
    def draw(s: st.ProgramState, **options: Any) -> None:
        programs.append(s._program)
        s += st.gen("x", regex="[0-9]{8}", validate=lambda text: False, retries=2, **options)

    for options in ({"temperature": 0}, {"temperature": 2, "seed": 5}):
        with pytest.raises(st.ProgramError, match=r"x: validate says False of .* \(3 attempts\)"):
            draw.run(backend=engine, **options)
    params = [[op.params for _, op in p.log if isinstance(op, ir.Gen)] for p in programs]
    assert [each.temperature for each in params[0]] == [0, 0.7, 0.7]
    assert [each.temperature for each in params[1]] == [2, 2, 2]

    @st.function
    def seeded(s: st.ProgramState) -> None:
        programs.append(s._program)
        s += st.gen("x", regex="[0-9]", validate=lambda text: False, retries=2, seed=5)

    with pytest.raises(st.ProgramError):
        seeded.run(backend=engine)
    assert [op.params.seed for _, op in programs[-1].log if isinstance(op, ir.Gen)] == [5, 6, 7]


def test_a_branch_goes_on_as_if_nothing_had_been_tried(engine: Backend) -> None:
    @st.function
    def draw(s: st.ProgramState) -> None:
        s += st.user("A number?") + st.assistant_begin()
        with pytest.raises(st.ProgramError) as told:
            s += st.gen("x", regex="[0-9]", validate=lambda text: text == "a", retries=2)
        assert told.value.kind == "InvalidOutput"
        s += "none"

    state = draw.run(backend=engine)
    assert "x" not in state and state.text().endswith("none")


def test_async_functions_await_a_value_that_will_do(engine: Backend) -> None:
    @st.function
    async def draw(s: st.ProgramState) -> str:
        with pytest.raises(st.InvalidProgram, match=r"await s\.aappend"):
            s += st.gen("x", retries=1)
        await s.aappend(
            st.user("A number?")
            + st.assistant(st.gen("x", regex="[0-9]", validate=str.isdigit, retries=1))
        )
        return str(await s.aget("x"))

    assert draw.run(backend=engine).ret_value.isdigit()


def test_false_of_numpy_and_of_a_coroutine_is_no_yes(engine: Backend) -> None:
    @st.function
    def one(s: st.ProgramState, validate: Any) -> None:
        s += st.gen("x", regex="[0-9]", validate=validate)

    with pytest.raises(st.ProgramError, match="validate says False"):
        one.run(validate=lambda text: np.bool_(False), backend=engine)
    with pytest.raises(st.InvalidProgram, match="validate='an awaitable'"):
        one.run(validate=lambda text: asyncio.sleep(0), backend=engine)
