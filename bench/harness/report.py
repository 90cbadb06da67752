"""What every benchmark writes: a table for people, JSON for machines, and where it was measured."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from ... import __version__

DEFAULT_FOLDER = Path("build/bench")
MAX_CELLS = 100_000  # of a table's line: more than any has


def add_report_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of every benchmark."""
    parser.add_argument("--json", action="store_true", help="print the rows as JSON, no table")
    parser.add_argument(
        "--out", type=Path, default=DEFAULT_FOLDER, metavar="FOLDER",
        help="write NAME.json there, with machine, versions and commit (default: %(default)s)",
    )  # fmt: skip


def write_report(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    args: argparse.Namespace,
    *,
    shown: Sequence[Mapping[str, Any]] | None = None,
    printed: object = None,
    **details: Any,
) -> None:
    """Print `rows` (all with the same keys) as `args` ask and write them with the machine.

    `shown` are the table's rows where these differ, `printed` is the output of --json where it is
    not the rows; `details` go into the file only.
    """
    path = write_file(name, rows, args, **details)
    if args.json:
        print(json.dumps(list(rows) if printed is None else printed))
        return
    print_table(name, shown or rows)
    print(f"written to {path}")


def write_file(
    name: str, rows: Sequence[Mapping[str, Any]], args: argparse.Namespace, **details: Any
) -> Path:
    """Write rows, machine and details into the folder of `args`; returns the file."""
    args.out.mkdir(parents=True, exist_ok=True)
    path: Path = args.out / f"{name}.json"
    report = {"machine": machine(), "rows": list(rows), **details}
    path.write_text(json.dumps(report, indent=1) + "\n")
    return path


def print_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows with the same keys; nothing for no rows. It is as wide as it needs, wherever it
    goes: a narrow terminal breaks its lines, but nothing is cut."""
    if not rows:
        return
    first = rows[0]
    table = Table()
    for key in first:
        justify: JustifyMethod = "left" if isinstance(first[key], str) else "right"
        table.add_column(escape(key), justify=justify, no_wrap=True)
    for row in rows:
        table.add_row(*(escape(shown_value(value)) for value in row.values()))
    console = Console()
    console.print(Text(title, style="table.title"), soft_wrap=True)
    needed = Console(width=MAX_CELLS, height=1).measure(table).maximum
    console.size = (max(console.width, needed), console.height)  # a dumb terminal obeys both alone
    console.print(table)


def console_progress() -> Progress:
    """A progress bar on standard error; nothing where that is not a terminal."""
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)


def machine() -> dict[str, Any]:
    """CPU, cores, load, versions and commit."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_1min": os.getloadavg()[0],
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "stemma": __version__,
        "commit": _commit(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((s.partition(":")[2].strip() for s in lines if s.startswith("model name")), "?")


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def shown_value(value: object) -> str:
    """A cell of a table: three digits, or whole numbers from 100 on."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return str(value)


def percentile(ordered: Sequence[float], percent: int) -> float:
    """The smallest of the values, in rising order, that `percent` % of them do not exceed."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]
