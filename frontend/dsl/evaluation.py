"""`st.evaluate`: how well a program does on cases, with intervals, and what it did where it failed.

Proportions have Wilson's interval (1927), other means the normal one, both of 95%.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from ...errors import InvalidProgram
from ..protocol.numbers import plain
from .batch_stream import BatchSummary
from .function import Function
from .result import Result

Case = Mapping[str, Any]
Score = bool | float | Mapping[str, float]
Metric = Callable[[Result, Case], Score]

_Z = 1.959964  # of 95%
MAX_FAILURES = 5  # that a table shows
MAX_TEXT_CHARS = 400


@dataclass(frozen=True, slots=True)
class Scored:
    """A case, what became of it, and how good that is: by the names of the metric's scores."""

    case: Case
    result: Result
    scores: Mapping[str, float]

    @property
    def is_perfect(self) -> bool:
        """Whether it ran and has all of each score."""
        return self.result.error() is None and all(s >= 1.0 for s in self.scores.values())


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over `num_cases`, and between what it lies with 95% confidence."""

    mean: float
    low: float
    high: float
    num_cases: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The scores of all cases in their order. Printed, it is a table and the first failures."""

    name: str
    scored: Sequence[Scored]
    summary: BatchSummary = field(default_factory=BatchSummary)

    @property
    def scores(self) -> dict[str, Interval]:
        """The mean of each score; a case that raised counts 0."""
        names = dict.fromkeys(name for each in self.scored for name in each.scores)
        return {
            name: interval_of([each.scores.get(name, 0.0) for each in self.scored])
            for name in names or {"score": None}
        }

    @property
    def score(self) -> float:
        """The mean of the first score."""
        return next(iter(self.scores.values())).mean

    @property
    def failures(self) -> list[Scored]:
        """Cases that raised or lack some of a score, the worst first."""
        failed = [each for each in self.scored if not each.is_perfect]
        return sorted(failed, key=lambda each: sum(each.scores.values()))

    def to_json(self) -> dict[str, Any]:
        """Plain data: scores with intervals, counts, and each case's scores, text and error."""
        cases = [
            {
                "case": _data(each.case),
                "scores": dict(each.scores),
                "text": _text(each.result),
                "error": _error(each.result),
            }
            for each in self.scored
        ]
        scores = {
            name: {"mean": s.mean, "low": s.low, "high": s.high, "num_cases": s.num_cases}
            for name, s in self.scores.items()
        }
        return {"name": self.name, "scores": scores, "cases": cases}

    def __str__(self) -> str:
        """The table, and what the program did in the first failures."""
        parts = [self.name]
        for name, score in self.scores.items():
            span = f"95%: {score.low:.3f} to {score.high:.3f}"
            parts.append(f"  {name:<16} {score.mean:.3f}  ({span}, {score.num_cases} cases)")
        parts.append(str(self.summary))
        failures = self.failures
        for each in failures[:MAX_FAILURES]:
            parts.append(f"\nfailed ({_scores(each)}): {_shown(each.case)}\n{_trace(each.result)}")
        if len(failures) > MAX_FAILURES:
            parts.append(f"\n... and {len(failures) - MAX_FAILURES} more, see .failures")
        return "\n".join(parts)

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{escape(name)}</td><td>{s.mean:.3f}</td><td>{s.low:.3f} to {s.high:.3f}</td>"
            f"<td>{s.num_cases}</td></tr>"
            for name, s in self.scores.items()
        )
        failed = "".join(
            f"<details><summary>{escape(_scores(each))}: {escape(_shown(each.case))}</summary>"
            f'<pre style="white-space:pre-wrap">{escape(_trace(each.result))}</pre></details>'
            for each in self.failures[: 4 * MAX_FAILURES]
        )
        head = "<tr><th>score</th><th>mean</th><th>95%</th><th>cases</th></tr>"
        told = escape(str(self.summary))
        return f"<table>{head}{rows}</table><p>{told}</p>{failed}"


def evaluate(fn: Function, cases: Iterable[Case], metric: Metric, **options: Any) -> Evaluation:
    """Run `fn` on each case and score what it did.

    Args:
        fn: a function of `@st.function`.
        cases: of each the function's arguments, and what else the metric needs, such as `expected`.
        metric: `metric(result, case)` is True or False, a number in [0, 1], or several by name. It
            is not asked of runs that raised: these count 0.
        options: of `fn.stream_batch`, such as `backend`, `store`, `progress_bar`, `temperature`.

    Raises InvalidProgram for a case that lacks an argument, and what the metric raises.
    """
    if not isinstance(fn, Function):
        raise InvalidProgram.of("fn", fn, "a function of @st.function")
    known = list(cases)
    if not known:
        raise InvalidProgram.of("cases", known, "at least one case")
    inputs = [_arguments(fn, case) for case in known]
    stream = fn.stream_batch(inputs, **options)
    scored: list[Scored | None] = [None] * len(known)
    for result in stream:
        case = known[result.index]
        given = {} if result.error() is not None else _named(metric(result, case))
        scored[result.index] = Scored(case, result, given)
    return Evaluation(fn.__name__, [each for each in scored if each], stream.summary)


def interval_of(values: Sequence[float]) -> Interval:
    """The mean of values and its interval."""
    count = len(values)
    mean = math.fsum(values) / count
    if all(value in (0.0, 1.0) for value in values):
        middle, spread = mean + _Z**2 / (2 * count), mean * (1 - mean) / count
        half = _Z * math.sqrt(spread + _Z**2 / (4 * count**2))
        scale = 1 + _Z**2 / count
        return Interval(mean, max(0.0, middle - half) / scale, (middle + half) / scale, count)
    variance = math.fsum((value - mean) ** 2 for value in values) / max(1, count - 1)
    half = _Z * math.sqrt(variance / count)
    return Interval(mean, mean - half, mean + half, count)


def _arguments(fn: Function, case: Case) -> dict[str, Any]:
    if not isinstance(case, Mapping):
        raise InvalidProgram.of("case", case, f"a mapping with {list(fn.parameters)}")
    for name in fn.required:
        if name not in case:
            allowed = f"a case with {list(fn.required)}"
            raise InvalidProgram.of(name, "missing", allowed)
    return {name: case[name] for name in fn.parameters if name in case}


def _named(score: Score) -> dict[str, float]:
    named = score if isinstance(score, Mapping) else {"score": score}
    found: dict[str, float] = {}
    for name, given in named.items():
        value = plain(given)
        if not isinstance(value, bool | int | float) or not math.isfinite(value):
            raise InvalidProgram.of(f"metric: {name}", given, "True, False or a finite number")
        found[str(name)] = float(value)
    return found


def _scores(each: Scored) -> str:
    return ", ".join(f"{n} {s:g}" for n, s in each.scores.items()) or "raised"


def _shown(case: Case) -> str:
    return ", ".join(f"{name}={value!r:.80}" for name, value in case.items())


def _trace(result: Result) -> str:
    """What it wrote, or what it raised."""
    error = _error(result)
    if error is not None:
        return error
    text = _text(result) or ""
    return text if len(text) <= MAX_TEXT_CHARS else f"... {text[-MAX_TEXT_CHARS:]}"


def _text(result: Result) -> str | None:
    return None if result.error() is not None else result.text()


def _error(result: Result) -> str | None:
    error = result.error()
    return None if error is None else f"{type(error).__name__}: {error}"


def _data(case: Case) -> dict[str, Any]:
    return {str(name): _plain_data(value) for name, value in case.items()}


def _plain_data(value: object) -> Any:
    try:
        return json.loads(json.dumps(value, default=repr))
    except (TypeError, ValueError, RecursionError):  # keys that JSON has not, or a cycle
        return repr(value)
