"""Gathers the reports of a folder into one file, a release's: `bench/results/VERSION.json`.

`stemma bench compare` reads it as it reads the folder.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ... import __version__
from .report import DEFAULT_FOLDER
from .stored_reports import read_reports, stored_reports

_RESULTS = Path("bench/results")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench collect`."""
    parser.add_argument(
        "version", nargs="?", default=__version__, help="of the release (default: %(default)s)"
    )
    parser.add_argument(
        "--reports", type=Path, default=DEFAULT_FOLDER, metavar="FOLDER",
        help="where the benchmarks wrote theirs (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=_RESULTS, metavar="FOLDER",
        help="write VERSION.json there (default: %(default)s)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Write the release's file. Raises InvalidRequest where a file is no report."""
    read_reports(args.reports)
    gathered = {"stemma": args.version, "reports": stored_reports(args.reports)}
    args.out.mkdir(parents=True, exist_ok=True)
    path: Path = args.out / f"{args.version}.json"
    path.write_text(json.dumps(gathered, indent=1) + "\n")
    print(f"{len(gathered['reports'])} reports written to {path}")
    return 0
