"""Reads what benchmarks have written: a report, a folder of reports, or a release's file of all.

A report is what `report.write_file` writes. A release's file, of `stemma bench collect`, is
{"stemma": version, "reports": {benchmark: report}}.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import InvalidRequest

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Report:
    """A benchmark's rows, and the machine that they were measured on (`report.machine`)."""

    machine: Mapping[str, Any]
    rows: list[Row]


def read_reports(path: Path) -> dict[str, Report]:
    """By benchmark. Raises InvalidRequest for a path without reports."""
    found = stored_reports(path)
    try:
        return {name: Report(one["machine"], one["rows"]) for name, one in found.items()}
    except (KeyError, TypeError):
        raise _no_report(path) from None


def stored_reports(path: Path) -> dict[str, dict[str, Any]]:
    """The reports as they were written, by benchmark. Raises InvalidRequest."""
    if path.is_dir():
        found = {file.stem: _read(file) for file in sorted(path.glob("*.json"))}
    else:
        read = _read(path)
        found = read.get("reports", {path.stem: read})
    if not found:
        raise _no_report(path)
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        raise _no_report(path) from None
    if not isinstance(read, dict):
        raise _no_report(path)
    return read


def _no_report(path: Path) -> InvalidRequest:
    allowed = "a report that `stemma bench NAME` wrote, a folder of them, or a file of"
    return InvalidRequest.of("reports", str(path), f"{allowed} `stemma bench collect`")
