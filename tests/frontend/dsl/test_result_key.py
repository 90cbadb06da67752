"""Keys of results: different inputs never share one, equal ones do, also in another process."""

from __future__ import annotations

import dataclasses
import decimal
import enum
import functools
import os
import re
import subprocess
import sys
import threading
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pydantic
import pytest

import stemma as st
from stemma.errors import InvalidProgram
from stemma.frontend.dsl.result_key import program_key, run_key


class Color(enum.StrEnum):
    RED = "red"


class Size(enum.IntEnum):
    S = 1


class Point(pydantic.BaseModel):
    x: int = 0
    hidden: int = pydantic.Field(0, exclude=True)


class Point3(Point):
    z: int = 0


class Held(pydantic.BaseModel):
    point: Point = Point()
    secret: pydantic.SecretStr = pydantic.SecretStr("")


Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass
class Box:
    inside: Any = None


class Plain:
    def __init__(self, *values: Any) -> None:
        self.values = values

    def shown(self) -> str:
        return str(self.values)


def closed_over(value: Any) -> Callable[[], Any]:
    def inner() -> Any:
        return value

    return inner


def local_model(kind: Any) -> type[pydantic.BaseModel]:
    return pydantic.create_model("Local", value=(kind, ...))


def key(value: Any) -> bytes:
    return run_key("program", [value], {})


SAME_LINE = lambda: 1, lambda: 2

DIFFERENT = [
    ({1: "a"}, {"1": "a"}),
    ({True: 1}, {"true": 1}),
    ({None: 1}, {"null": 1}),
    ((1, 2), [1, 2]),
    (Pair(1, 2), (1, 2)),
    (OrderedDict(a=1), {"a": 1}),
    (Color.RED, "red"),
    (Size.S, 1),
    (1, 1.0),
    (1, True),
    (0.0, -0.0),
    (b"a", "a"),
    ({1, "1"}, {"1"}),
    (PurePosixPath("a"), ["pathlib.PurePosixPath", "a"]),
    SAME_LINE,
    (closed_over(1), closed_over(2)),
    (Plain(1).shown, Plain(2).shown),
    (functools.partial(closed_over, 1), functools.partial(closed_over, 2)),
    (Held(secret=pydantic.SecretStr("a")), Held(secret=pydantic.SecretStr("b"))),
    (Held(point=Point3(z=1)), Held(point=Point3(z=2))),
    (Point(hidden=1), Point(hidden=2)),
    (Box(Point(x=1)), Box(Point(x=2))),
    (local_model(int), local_model(str)),
    (np.arange(3), np.arange(3.0)),
    (np.arange(6).reshape(2, 3), np.arange(6).reshape(3, 2)),
    (np.float32(1), np.float64(1)),
    (st.tool(closed_over(1)), st.tool(closed_over(2))),
]


@pytest.mark.parametrize("pair", DIFFERENT)
def test_different_values_never_share_a_key(pair: tuple[Any, Any]) -> None:
    assert key(pair[0]) != key(pair[1])
    assert key([Box(pair[0])]) != key([Box(pair[1])])


def _word() -> str:
    return "".join(["a", "b"])  # another object each time


def equal_values() -> list[Any]:
    cyclic: list[Any] = [1]
    cyclic.append(cyclic)
    once = _word()
    return [
        {"b": 1, 2: [1.5, None, "\ud800"], (1, 2): {3}},
        {"w", "x", "y", "z", "ab"},
        Plain({"w", "x", "y", "z"}, once, _word()),
        [Color.RED, Size.S, Pair(1, 2), decimal.Decimal("1.0"), Path("a"), float("nan")],
        [Held(), Box({"k": Point()}), frozenset({"p", "q", "r"})],
        [np.arange(6)[::2], np.ones((2, 3)), np.float32(2)],
        [closed_over({"a", "b", "c"}), Plain(1).shown, functools.partial(closed_over, 1)],
        [lambda x: x in {"a", "b", "c"}, len, "a".upper, os, np.add, re.compile("a")],
        [Point, int, list[int], local_model(int)],
        cyclic,
    ]


def test_equal_values_share_a_key_in_another_process() -> None:
    keys = [key(value).hex() for value in equal_values()]
    assert keys == [key(value).hex() for value in equal_values()]
    code = f"import {__name__} as t; print(*[t.key(v).hex() for v in t.equal_values()])"
    root = Path(__file__).parents[__name__.count(".")]
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        ran = subprocess.run(
            [sys.executable, "-c", code], cwd=root, env=env, text=True,
            stdout=subprocess.PIPE, check=True,
        )  # fmt: skip
        assert ran.stdout.split() == keys


def test_what_is_equal_but_made_otherwise_shares_a_key() -> None:
    once = _word()
    assert key(Plain(once, once)) == key(Plain(once, _word()))
    assert key(np.ones((2, 3))) == key(np.asfortranarray(np.ones((2, 3))))
    tool = st.tool(_word)
    before = key(tool)
    tool()  # takes a time, which it notes
    assert key(tool) == before


def test_a_value_with_many_paths_to_one_part_is_told_at_once() -> None:
    value: Any = ["leaf"]
    for _ in range(200):
        value = [value, value]
    assert key(value) == key(value)


NOT_TOLD = [threading.Lock(), (x for x in "a"), [{"a": threading.Event()}]]


@pytest.mark.parametrize("value", NOT_TOLD)
def test_what_no_other_process_could_have_is_refused(value: Any) -> None:
    with pytest.raises(InvalidProgram, match=r"store: arguments that cannot be compared"):
        key(value)


def _asking(style: Any, lock: Any = None) -> Callable[..., Any]:
    def ask(s: Any, question: str, also: Any = style) -> None:
        with lock:
            s += style + question

    return ask


class _Asking:
    def __init__(self, style: str) -> None:
        self.style = style

    def __call__(self, s: Any) -> None:
        s += self.style

    def ask(self, s: Any) -> None:
        s += self.style


def test_a_program_is_named_by_what_it_closes_over_and_by_its_defaults() -> None:
    made: list[Callable[[str], Callable[..., Any]]] = [
        _asking, _Asking, lambda style: _Asking(style).ask
    ]  # fmt: skip
    for make in made:
        assert program_key(make("a")) != program_key(make("b"))
        assert program_key(make("a")) == program_key(make("a"))
    with_lock = [program_key(_asking("a", threading.Lock())) for _ in range(2)]
    assert with_lock[0] == with_lock[1], "what is no data is told by its type"


def test_programs_of_one_factory_do_not_share_results(engine: st.Engine, tmp_path: Path) -> None:
    def made(style: str) -> st.Function:
        @st.function(cache=tmp_path / "kept.sqlite")
        def ask(s: st.ProgramState, question: str) -> str:
            return style + question

        return ask

    answers = [made(style).run("?", backend=engine).ret_value for style in "aba"]
    assert answers == ["a?", "b?", "a?"]
