"""The command: compile every kernel for sm_90 and hold it to its budget.

python -m stemma.kernels.triton.ahead_of_time             the table; exit 1 on a breach
python -m stemma.kernels.triton.ahead_of_time --update    write what was measured as the budget
python -m stemma.kernels.triton.ahead_of_time --gpu 89    for another GPU: does each kernel fit it
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ....flags import Parser
from ..multiprocessors import HOPPER, MULTIPROCESSORS
from .budgets import BUDGETS, breaches, misfits, read_budgets, write_budgets
from .compilation import Row, compile_all
from .offline import why_not_compiled


def main(arguments: list[str] | None = None) -> int:
    """The command; 0 where every kernel is within its budget."""
    args = _parse(arguments)
    if refusal := why_not_compiled():
        print(refusal, file=sys.stderr)
        return 2
    rows = compile_all(args.only, args.all or args.update, args.workers, args.dump, args.gpu)
    if args.update:
        write_budgets(args.budgets, rows, args.only)
    budgets = read_budgets(args.budgets)
    if args.gpu == HOPPER:
        found = {row.name: _judge(row, budgets) for row in rows}
    else:
        found = {row.name: misfits(row.resources, MULTIPROCESSORS[args.gpu]) for row in rows}
    if args.json:
        print(json.dumps([_as_data(row, found[row.name]) for row in rows]))
    else:
        _print(rows, found)
    return 1 if any(found.values()) else 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m stemma.kernels.triton.ahead_of_time")
    parser.add_argument("--only", default="", metavar="WORDS", help="launches named so")
    parser.add_argument("--all", action="store_true", help="the rare configurations as well")
    parser.add_argument("--update", action="store_true", help="write what is measured as budgets")
    parser.add_argument("--json", action="store_true", help="print it as data")
    parser.add_argument(
        "--dump", type=Path, metavar="FOLDER", help="write PTX, IR and machine code"
    )
    parser.add_argument(
        "--gpu", type=int, default=HOPPER, choices=MULTIPROCESSORS, metavar="CAPABILITY",
        help=f"one of {', '.join(map(str, MULTIPROCESSORS))} (default: %(default)s, whose budgets "
             "are committed)",
    )  # fmt: skip
    parser.add_argument("--budgets", type=Path, default=BUDGETS, help="the file of budgets")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args(arguments)
    if args.update and args.gpu != HOPPER:
        parser.error(f"--update with --gpu {args.gpu}: budgets are those of {HOPPER}")
    if not (args.update or args.budgets.is_file()):
        parser.error(f"no budgets at {args.budgets}: they lie in the source's tests/kernels")
    return args


def _judge(row: Row, budgets: Mapping[str, Mapping[str, Any]]) -> list[str]:
    budget = budgets.get(row.name)
    return breaches(row.resources, budget) if budget else ["has no budget"]


def _as_data(row: Row, found: list[str]) -> dict[str, Any]:
    return {"name": row.name, "breaches": found, **asdict(row.resources)}


def _print(rows: list[Row], found: Mapping[str, list[str]]) -> None:
    print(f"{'warps':>5}{'stages':>7}{'regs':>5}{'spill':>6}{'shared':>8}{'blocks':>7}"
          f"{'load':>5} {'products':9}launch: kernel")  # fmt: skip
    for row in rows:
        made = row.resources
        print(f"{made.num_warps:5}{made.num_stages:7}{made.registers:5}{made.spilled_bytes:6}"
              f"{made.shared_bytes:8}{made.blocks_per_sm:7}{made.widest_load_bytes:5} "
              f"{made.products:9}{row.name}")  # fmt: skip
        for breach in found[row.name]:
            print(f"{'':5}!! {breach}")
    over = sum(bool(found[row.name]) for row in rows)
    print(f"{len(rows)} kernels, {over} outside their budgets")


if __name__ == "__main__":
    sys.exit(main())
