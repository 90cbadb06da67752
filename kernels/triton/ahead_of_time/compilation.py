"""Compiles the ops' launches and reads the resources of each kernel."""

from __future__ import annotations

import multiprocessing
import re
import subprocess
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..language import triton
from ..multiprocessors import HOPPER
from .launches import all_launches
from .offline import offline
from .resources import Resources, resources_of


@dataclass(frozen=True, slots=True)
class Row:
    """One compiled kernel; its budget has the same name."""

    name: str  # "launch: kernel", and the constants that distinguish it within that launch
    is_rare: bool
    resources: Resources


def compile_all(
    words: str = "",
    with_rare: bool = False,
    workers: int = 1,
    folder: Path | None = None,
    capability: int = HOPPER,
) -> list[Row]:
    """Compile the launches with `words` in their names, in `workers` forked processes; the output
    is written to `folder`, if given."""
    chosen = [
        launch.name
        for launch in all_launches()
        if words in launch.name and (with_rare or not launch.is_rare) and launch.is_for(capability)
    ]
    fork = multiprocessing.get_context("fork")  # triton and torch are imported once
    with ProcessPoolExecutor(workers, mp_context=fork) as pool:
        compiled = pool.map(partial(compile_launch, folder=folder, capability=capability), chosen)
        return [row for rows in compiled for row in rows]


def compile_launch(name: str, folder: Path | None = None, capability: int = HOPPER) -> list[Row]:
    """The distinct kernels of one launch, in order."""
    launch = next(launch for launch in all_launches() if launch.name == name)
    with offline(capability) as kernels:
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


def _dump(kernel: Any, path: Path) -> None:
    """Write .ptx, .ttgir, .cubin and .sass next to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for kind in ("ptx", "ttgir"):
        path.with_name(f"{path.name}.{kind}").write_text(kernel.asm[kind], encoding="utf-8")
    cubin = path.with_name(f"{path.name}.cubin")
    cubin.write_bytes(kernel.asm["cubin"])
    with path.with_name(f"{path.name}.sass").open("w") as sass:
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(cubin)]
        subprocess.run(command, stdout=sass, check=True)


def _difference(one: Resources, made: list[Resources]) -> str:
    """What distinguishes a kernel from others of its name: " (ROWS=64)"; one parameter if it is
    enough."""
    twins = [_parameters(other) for other in made if other.kernel == one.kernel]
    own = _parameters(one)
    differ = [name for name in own if any(twin.get(name) != own[name] for twin in twins)]
    enough = [n for n in differ if len({str(twin.get(n)) for twin in twins}) == len(twins)]
    differ = enough[:1] or differ
    return f" ({' '.join(f'{name}={own[name]}' for name in differ)})" if differ else ""


def _parameters(made: Resources) -> dict[str, Any]:
    return {**made.parameters, "num_warps": made.num_warps, "num_stages": made.num_stages}
