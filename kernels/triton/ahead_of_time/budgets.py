"""The resources allowed to each kernel: a committed file, so that reviews see every change."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..language import triton
from ..multiprocessors import Multiprocessor
from .compilation import Row
from .launches import all_launches
from .resources import PRODUCTS, Resources

BUDGETS = Path(__file__).parents[3] / "tests" / "kernels" / "sm90_budgets.json"


def breaches(resources: Resources, budget: Mapping[str, Any]) -> list[str]:
    """Where a kernel exceeds its budget, or falls short of it.

    Spills are allowed only as stated by hand in its line: a few values that no inner loop touches.
    """
    spilled = resources.spilled_bytes
    found = [f"spills {spilled} bytes"] if spilled > budget.get("spilled_bytes", 0) else []
    found += [
        f"{name} {taken}, at most {budget[name]}"
        for name in ("registers", "shared_bytes", "loop_instructions")
        if (taken := getattr(resources, name)) > budget[name]
    ]
    found += [
        f"{name} {had}, at least {budget[name]}"
        for name in ("blocks_per_sm", "widest_load_bytes")
        if (had := getattr(resources, name)) < budget[name]
    ]
    if resources.is_dependent != resources.awaits_inputs:
        told = "is" if resources.is_dependent else "is not"
        found.append(f"{told} launched as dependent, but awaits_inputs: {resources.awaits_inputs}")
    if PRODUCTS.index(resources.products) < PRODUCTS.index(budget["products"]):
        found.append(f"products by {resources.products}, not {budget['products']}")
    return found


def misfits(resources: Resources, multiprocessor: Multiprocessor) -> list[str]:
    """Why a kernel does not run on a GPU that has no budgets."""
    if resources.blocks_per_sm:
        return []
    return [
        f"shared_bytes {resources.shared_bytes}, of {multiprocessor.block_shared_bytes} that a "
        f"block has ({multiprocessor.gpus}), registers {resources.registers}"
    ]


def as_budget(resources: Resources) -> dict[str, Any]:
    """The measured resources as a budget."""
    return {
        # allocated in units of eight: rounding up loses nothing
        "registers": -(-resources.registers // 8) * 8,
        "shared_bytes": resources.shared_bytes,
        "blocks_per_sm": resources.blocks_per_sm,
        "products": resources.products,
        "widest_load_bytes": resources.widest_load_bytes,
        "loop_instructions": resources.loop_instructions,
    }


def write_budgets(path: Path, rows: Iterable[Row], words: str = "") -> None:
    """One line a kernel, so that a diff shows each change, in the order of the launches.

    For launches without `words` in their names the file's lines are kept; for the others, the
    spills allowed by hand are kept.
    """
    is_rare = {launch.name: launch.is_rare for launch in all_launches()}
    old = read_budgets(path)
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


def read_budgets(path: Path) -> dict[str, dict[str, Any]]:
    """Budgets by the rows' names; empty if there is no file."""
    if not path.is_file():
        return {}
    table = json.loads(path.read_text(encoding="utf-8"))
    return {**table["test"], **table["soak"]}


def _said_of_spills(budgets: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    return {key: said for key, said in budgets.get(name, {}).items() if key == "spilled_bytes"}


def _launch_of(name: str) -> str:
    """Of a row's name."""
    return name.split(": ")[0]
