"""Compile every kernel for sm_90 without a GPU and hold it to its budget.

    python -m stemma.kernels.triton.ahead_of_time             the table; exit 1 on a breach
    python -m stemma.kernels.triton.ahead_of_time --update    write what was measured as the budget

The budgets are a committed file, so that a change of what a kernel takes is seen in review; see
docs/gpu-testing.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .language import triton
from .launches import all_launches
from .offline import offline, why_not_compiled
from .resources import PRODUCTS, Resources, resources_of

BUDGETS = Path(__file__).parents[2] / "tests" / "kernels" / "sm90_budgets.json"


@dataclass(frozen=True, slots=True)
class Row:
    """One compiled kernel; what was allowed to it lies in the budgets under the same name."""

    name: str  # "launch: kernel", and the constants that tell it from its twins in that launch
    is_rare: bool
    resources: Resources


def compile_all(
    words: str = "", with_rare: bool = False, workers: int = 1, folder: Path | None = None
) -> list[Row]:
    """Compile the launches with `words` in their names, on `workers` forked processes; what was
    compiled goes to `folder`, if there is one."""
    chosen = [
        launch.name
        for launch in all_launches()
        if words in launch.name and (with_rare or not launch.is_rare)
    ]
    fork = multiprocessing.get_context("fork")  # triton and torch are imported once
    with ProcessPoolExecutor(workers, mp_context=fork) as pool:
        compiled = pool.map(partial(compile_launch, folder=folder), chosen)
        return [row for rows in compiled for row in rows]


def compile_launch(name: str, folder: Path | None = None) -> list[Row]:
    """The distinct kernels of one launch, in order."""
    launch = next(launch for launch in all_launches() if launch.name == name)
    with offline() as kernels:
        launch.run()
    distinct = list({kernel.hash: kernel for kernel in kernels}.values())
    made = [resources_of(kernel) for kernel in distinct]
    rows = [
        Row(f"{name}: {one.kernel}{_difference(one, made)}", launch.is_rare, one) for one in made
    ]
    if folder is not None:
        for row, kernel in zip(rows, distinct, strict=True):
            _dump(kernel, folder / re.sub(r"[^\w=]+", "_", row.name))
    return rows


def breaches(resources: Resources, budget: Mapping[str, Any]) -> list[str]:
    """What a kernel takes beyond its budget, or lacks.

    It may spill only what its line says, by hand: a few values that no inner loop touches.
    """
    spilled = resources.spilled_bytes
    found = [f"spills {spilled} bytes"] if spilled > budget.get("spilled_bytes", 0) else []
    found += [
        f"{name} {taken}, at most {budget[name]}"
        for name in ("registers", "shared_bytes")
        if (taken := getattr(resources, name)) > budget[name]
    ]
    found += [
        f"{name} {had}, at least {budget[name]}"
        for name in ("blocks_per_sm", "widest_load_bytes")
        if (had := getattr(resources, name)) < budget[name]
    ]
    if PRODUCTS.index(resources.products) < PRODUCTS.index(budget["products"]):
        found.append(f"products by {resources.products}, not {budget['products']}")
    return found


def as_budget(resources: Resources) -> dict[str, Any]:
    """What it takes, as what it may take."""
    return {
        # given out by eights: no more is lost by rounding up
        "registers": -(-resources.registers // 8) * 8,
        "shared_bytes": resources.shared_bytes,
        "blocks_per_sm": resources.blocks_per_sm,
        "products": resources.products,
        "widest_load_bytes": resources.widest_load_bytes,
    }


def write_budgets(path: Path, rows: Iterable[Row], words: str = "") -> None:
    """One line a kernel, so that a change reads as one, in the order of the launches.

    Of launches without `words` in their names the file's own lines stay, and of the others what
    was said by hand of spills.
    """
    is_rare = {launch.name: launch.is_rare for launch in all_launches()}
    old = _budgets(path)
    kept = {name: line for name, line in old.items() if words not in _launch_of(name)}
    new = {row.name: as_budget(row.resources) | _said_of_spills(old, row.name) for row in rows}
    order = list(is_rare)
    budgets = {name: line for name, line in (kept | new).items() if _launch_of(name) in is_rare}
    names = sorted(budgets, key=lambda name: order.index(_launch_of(name)))
    parts = [f'"triton": {json.dumps(triton.__version__)}']
    for part, rare in (("test", False), ("soak", True)):
        chosen = [name for name in names if is_rare[_launch_of(name)] is rare]
        lines = ",\n    ".join(
            f"{json.dumps(name)}: {json.dumps(budgets[name])}" for name in chosen
        )
        parts.append(f'"{part}": {{\n    {lines}\n  }}')
    path.write_text("{\n  " + ",\n  ".join(parts) + "\n}\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """The command; 0 where every kernel is within its budget."""
    args = _parse(arguments)
    if refusal := why_not_compiled():
        print(refusal, file=sys.stderr)
        return 2
    rows = compile_all(args.only, args.all or args.update, args.workers, args.dump)
    if args.update:
        write_budgets(args.budgets, rows, args.only)
    budgets = _budgets(args.budgets)
    found = {row.name: _judge(row, budgets) for row in rows}
    if args.json:
        print(json.dumps([_as_data(row, found[row.name]) for row in rows]))
    else:
        _print(rows, found)
    return 1 if any(found.values()) else 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m stemma.kernels.triton.ahead_of_time")
    parser.add_argument("--only", default="", metavar="WORDS", help="launches named so")
    parser.add_argument("--all", action="store_true", help="the rare configurations as well")
    parser.add_argument("--update", action="store_true", help="write what is measured as budgets")
    parser.add_argument("--json", action="store_true", help="print it as data")
    parser.add_argument(
        "--dump", type=Path, metavar="FOLDER", help="write PTX, IR and machine code"
    )
    parser.add_argument("--budgets", type=Path, default=BUDGETS, help="the file of budgets")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args(arguments)
    if not (args.update or args.budgets.is_file()):
        parser.error(f"no budgets at {args.budgets}: they lie in the source's tests/kernels")
    return args


def _budgets(path: Path) -> dict[str, dict[str, Any]]:
    """By the rows' names; none where there is no file."""
    if not path.is_file():
        return {}
    table = json.loads(path.read_text(encoding="utf-8"))
    return {**table["test"], **table["soak"]}


def _said_of_spills(budgets: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    return {key: said for key, said in budgets.get(name, {}).items() if key == "spilled_bytes"}


def _launch_of(name: str) -> str:
    """Of a row's name."""
    return name.split(": ")[0]


def _judge(row: Row, budgets: Mapping[str, Mapping[str, Any]]) -> list[str]:
    budget = budgets.get(row.name)
    return breaches(row.resources, budget) if budget else ["has no budget"]


def _as_data(row: Row, found: list[str]) -> dict[str, Any]:
    return {"name": row.name, "breaches": found, **asdict(row.resources)}


def _dump(kernel: Any, path: Path) -> None:
    """Next to `path`: .ptx, .ttgir, .cubin and .sass."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for kind in ("ptx", "ttgir"):
        path.with_name(f"{path.name}.{kind}").write_text(kernel.asm[kind], encoding="utf-8")
    cubin = path.with_name(f"{path.name}.cubin")
    cubin.write_bytes(kernel.asm["cubin"])
    with path.with_name(f"{path.name}.sass").open("w") as sass:
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(cubin)]
        subprocess.run(command, stdout=sass, check=True)


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


def _difference(one: Resources, made: list[Resources]) -> str:
    """What tells a kernel from others of its name: " (ROWS=64)"; one parameter if one is enough."""
    twins = [_parameters(other) for other in made if other.kernel == one.kernel]
    own = _parameters(one)
    differ = [name for name in own if any(twin.get(name) != own[name] for twin in twins)]
    enough = [n for n in differ if len({str(twin.get(n)) for twin in twins}) == len(twins)]
    differ = enough[:1] or differ
    return f" ({' '.join(f'{name}={own[name]}' for name in differ)})" if differ else ""


def _parameters(made: Resources) -> dict[str, Any]:
    return {**made.parameters, "num_warps": made.num_warps, "num_stages": made.num_stages}


if __name__ == "__main__":
    sys.exit(main())
