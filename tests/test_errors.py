"""The errors of the whole package: each survives a trip to another process."""

from __future__ import annotations

import copy
import importlib
import inspect
import multiprocessing
import pickle
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest

import stemma as st
from stemma import errors
from stemma.frontend.trace.op_graph import Wait

OPTIONAL = ("ray", "xgrammar")  # packages that a module may need and the tests do not install


def modules() -> Iterator[Any]:
    for found in pkgutil.walk_packages(st.__path__, "stemma."):
        if found.name.endswith("__main__"):
            continue
        try:
            yield importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            assert error.name in OPTIONAL, found.name


def kinds() -> list[type[BaseException]]:
    """Every exception class that the package defines."""
    found = {
        value
        for module in modules()
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, BaseException)
    }
    ours = [kind for kind in found if kind.__module__.startswith("stemma")]
    return sorted(ours, key=lambda kind: (kind.__module__, kind.__qualname__))


VALUES: dict[str, Any] = {
    "str": "tëxt: 1",
    "str | None": "other",
    "int": 7,
    "bool": True,
    "float | None": 0.5,
    "Wait": Wait("s['x']", 0, "file.py:3"),
    "Mapping[int, BaseException]": {1: errors.UnsupportedSchema("/a", "format", "no")},
    "Mapping[str, str] | None": {"a": "b"},
    "Sequence[Any]": (),
    "Sequence[str]": ("search",),
}


def made(kind: type[BaseException]) -> BaseException:
    """One of this class, with a value for everything that its constructor takes."""
    if not inspect.isfunction(kind.__init__):  # it has its builtin base's
        return kind("tëxt: 1")
    positional, named = [], {}
    for parameter in inspect.signature(kind).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            named[parameter.name] = VALUES[parameter.annotation]
        elif parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            positional.append(VALUES[parameter.annotation])
    return kind(*positional or ["tëxt: 1"], **named)


def shown(error: BaseException) -> tuple[Any, ...]:
    """All of it that can be compared."""
    attributes = {
        name: {key: shown(inner) for key, inner in value.items()} if name == "errors" else value
        for name, value in vars(error).items()
    }
    return type(error), str(error), error.args, attributes


def test_every_error_of_the_package_survives_pickling() -> None:
    found = kinds()
    assert {getattr(errors, name) for name in errors.__all__} <= set(found)
    for error in map(made, found):
        for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert shown(again) == shown(error)


class Unpicklable(Exception):
    """As authors write them: the constructor takes more than it hands to its base."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")


def fails(error: BaseException) -> None:
    raise error


def test_an_error_reaches_the_parent_of_a_pool() -> None:
    batch = st.BatchError({0: Unpicklable(3, "mine")}, 2, ["failed", "fine"])
    assert batch.states == [None, "fine"]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        with pytest.raises(st.UnsupportedSchema, match=r"^/a: format cannot"):
            pool.apply_async(fails, (st.UnsupportedSchema("/a", "format", "no"),)).get(120)
        with pytest.raises(st.BatchError, match="1 of 2 instances") as caught:
            pool.apply_async(fails, (batch,)).get(120)
    assert caught.value.states == []
    assert str(caught.value.errors[0]) == "Unpicklable: 3: mine"
