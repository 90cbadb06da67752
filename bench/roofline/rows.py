"""A measured figure of a GPU run: its value, what it is held against, and whether it is enough."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, ParamSpec

P = ParamSpec("P")

Verdict = Literal["met", "missed", "error", "untimed", ""]
"""untimed: there is a target, but what ran was an interpreter; "": there is no target."""


@dataclass(frozen=True, slots=True)
class Target:
    """A lower or upper bound for a ratio."""

    bound: float
    is_least: bool

    def holds(self, ratio: float) -> bool:
        """False for NaN."""
        return ratio >= self.bound if self.is_least else ratio <= self.bound

    def __str__(self) -> str:
        return f"{'>=' if self.is_least else '<='} {self.bound:g}"


def at_least(bound: float) -> Target:
    """The ratio must reach `bound`."""
    return Target(bound, is_least=True)


def at_most(bound: float) -> Target:
    """The ratio must not exceed `bound`."""
    return Target(bound, is_least=False)


@dataclass(frozen=True, slots=True)
class Row:
    """A case of a section. `ratio` compares with `against`; `details` go into the file only."""

    case: str
    value: float | None = None  # in `unit`
    unit: str = ""
    ratio: float | None = None
    against: str = ""
    target: Target | None = None
    is_timed: bool = True  # False: a count or an error, also valid in the interpreter
    error: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    def verdict(self, is_interpreted: bool) -> Verdict:
        """Whether the target is met."""
        if self.error:
            return "error"
        if self.target is None or self.ratio is None:
            return ""
        if is_interpreted and self.is_timed:
            return "untimed"
        return "met" if self.target.holds(self.ratio) else "missed"

    def to_json(self, section: str, is_interpreted: bool) -> dict[str, Any]:
        """The form of the file."""
        return {
            "section": section,
            "case": self.case,
            "value": _finite(self.value),
            "unit": self.unit,
            "ratio": _finite(self.ratio),
            "against": self.against,
            "target": "" if self.target is None else str(self.target),
            "verdict": self.verdict(is_interpreted),
            "is_timed": self.is_timed,
            "error": self.error,
            "details": self.details,
        }


def _finite(value: float | None) -> float | None:
    """None for NaN and infinities: JSON has none."""
    return value if value is not None and math.isfinite(value) else None


def failed(case: str, error: BaseException) -> Row:
    """The row of an error, with its location."""
    text = f"{type(error).__name__}: {error}"
    trace = traceback.format_exception(error)
    return Row(case, error=text.splitlines()[0][:300], details={"trace": "".join(trace)[-4000:]})


def attempt(
    case: str, measure: Callable[P, Iterable[Row]], *args: P.args, **kwargs: P.kwargs
) -> Iterator[Row]:
    """The rows of `measure`, called with these arguments, and one for the error that ends it."""
    try:
        yield from measure(*args, **kwargs)
    except Exception as error:  # of any kind: a kernel that does not compile, memory, a fault
        yield failed(case, error)


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """The table's form of a row in JSON."""
    value = row["error"] or row["against"]
    columns = ("section", "case", "value", "unit", "ratio", "target", "verdict")
    return {**{name: row[name] for name in columns}, "against": value}
