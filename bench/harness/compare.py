"""What changed between two runs of benchmarks: old, new and their ratio, figure by figure.

Rows are matched by their texts and, where these leave several alike, by as many of their first
whole numbers as tell them apart. A figure has changed where the ranges of its repeats do not meet
(columns such as `wall_min_s` and `wall_max_s` beside `wall_s`) or, where a report has no ranges,
where it is off by more than --threshold.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .report import print_table
from .stored_reports import Report, Row, read_reports

_THRESHOLD = 0.1  # guess
_TOLD = ("cpu", "cores", "load_1min", "python", "torch", "stemma", "commit")
_HARDWARE = ("cpu", "cores")

Key = tuple[object, ...]
Range = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Change:
    """A figure of a row in both runs; None in a run without that row or figure."""

    benchmark: str
    row: str
    figure: str
    old: float | None
    new: float | None
    ratio: float | None  # new / old
    is_outside_noise: bool


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench compare`."""
    for name in ("old", "new"):
        parser.add_argument(name, type=Path, help="a report, a folder of reports or a release's")
    parser.add_argument(
        "--threshold", type=float, default=_THRESHOLD, metavar="SHARE",
        help="what counts as noise where a report has no ranges (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--all", action="store_true", help="show what is within the noise, too")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON, no table")


def run(args: argparse.Namespace) -> int:
    """Print what changed. Raises InvalidRequest for what is no report."""
    old, new = read_reports(args.old), read_reports(args.new)
    found = list(changes(old, new, args.threshold))
    if args.json:
        print(json.dumps([asdict(change) for change in found]))
        return 0
    _print_machines(old, new)
    marked = [change for change in found if change.is_outside_noise]
    shown = found if args.all else marked
    print_table("changes", [_shown(change) for change in shown])
    print(f"{len(marked)} of {len(found)} figures are outside the noise (*)")
    return 0


def changes(
    old: Mapping[str, Report], new: Mapping[str, Report], threshold: float
) -> Iterator[Change]:
    """Every figure of both runs, in the order of the old run, then what only the new one has."""
    for benchmark in [*old, *(name for name in new if name not in old)]:
        before, after = _rows(old.get(benchmark)), _rows(new.get(benchmark))
        names = _key_columns([*before, *after], max(before, after, key=len))
        olds, news = _by_key(before, names), _by_key(after, names)
        for key in dict.fromkeys([*olds, *news]):
            row = ", ".join(str(value) for value in key)
            figures = _figures(olds.get(key, {}), news.get(key, {}), names)
            for figure, value, other, span, other_span in figures:
                found = _compared(value, other, span, other_span, threshold)
                yield Change(benchmark, row, figure, *found)


def _rows(report: Report | None) -> list[Row]:
    return [] if report is None else report.rows


def _key_columns(rows: Sequence[Row], of_one_run: Sequence[Row]) -> list[str]:
    """The columns that tell a run's rows apart."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    names = [name for name in columns if any(isinstance(row.get(name), str) for row in rows)]
    for name in columns:
        if len(_by_key(of_one_run, names)) == len(of_one_run):
            break
        if all(type(row.get(name)) is int for row in rows):
            names.append(name)
    return names


def _by_key(rows: Sequence[Row], names: Sequence[str]) -> dict[Key, Row]:
    return {tuple(row.get(name) for name in names): row for row in rows}


def _figures(
    old: Row, new: Row, keys: Sequence[str]
) -> Iterator[tuple[str, float | None, float | None, Range | None, Range | None]]:
    """Of each figure its values and their ranges."""
    bounds = {**_bounds(old), **_bounds(new)}
    used = {*keys, *(name for pair in bounds.values() for name in pair)}
    for name in dict.fromkeys([*old, *new]):
        values = _number(old.get(name)), _number(new.get(name))
        if name not in used and values != (None, None):
            yield name, *values, _range(old, bounds.get(name)), _range(new, bounds.get(name))


def _bounds(row: Row) -> dict[str, tuple[str, str]]:
    """By figure, the columns of its least and its largest value: `wall_s` has `wall_min_s` and
    `wall_max_s`, and `median` has `min` and `max`."""
    found = {}
    for name in row:
        words = name.split("_")
        if "min" in words:
            high = "_".join("max" if word == "min" else word for word in words)
            figure = "_".join(word for word in words if word != "min") or "median"
            if high in row and figure in row:
                found[figure] = name, high
    return found


def _range(row: Row, names: tuple[str, str] | None) -> Range | None:
    low, high = (_number(row.get(name)) for name in names or ("", ""))
    return None if low is None or high is None else (low, high)


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number else None  # type: ignore[return-value]


def _compared(
    old: float | None,
    new: float | None,
    old_range: Range | None,
    new_range: Range | None,
    threshold: float,
) -> tuple[float | None, float | None, float | None, bool]:
    """Old, new, ratio, and whether they differ by more than noise."""
    if old is None or new is None:
        return old, new, None, True
    ratio = new / old if old else None
    if old_range is not None and new_range is not None:
        is_apart = old_range[1] < new_range[0] or new_range[1] < old_range[0]
    elif ratio is None:
        is_apart = old != new
    else:
        is_apart = abs(ratio - 1) > threshold
    return old, new, ratio, is_apart


def _shown(change: Change) -> dict[str, Any]:
    values = asdict(change)
    values[""] = "*" if values.pop("is_outside_noise") else ""
    return values


def _print_machines(old: Mapping[str, Report], new: Mapping[str, Report]) -> None:
    for name, reports in (("old", old), ("new", new)):
        for told in dict.fromkeys(_told(report) for report in reports.values()):
            print(f"{name}: {told}")
    if _hardware(old) != _hardware(new):
        print("warning: the machines differ; so will figures in units of time", file=sys.stderr)


def _told(report: Report) -> str:
    return ", ".join(f"{name} {report.machine.get(name)}" for name in _TOLD)


def _hardware(reports: Mapping[str, Report]) -> set[Key]:
    return {tuple(report.machine.get(name) for name in _HARDWARE) for report in reports.values()}
