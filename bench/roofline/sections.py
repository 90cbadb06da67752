"""The sections of a GPU run: what each measures, and how long it may take.

A section runs in a process of its own, so that a kernel which hangs or faults, and leaves the
device unusable to its process, costs its own section alone. It is asked by a line of JSON on its
standard input, once everything is imported, and answers in lines: rows as they are measured, then
the device as it found it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from . import attention, ceilings, checks, experts, latent, serving, small_ops, steps
from .ceilings import Ceilings, device_record
from .context import Context, Section
from .rows import Row, attempt
from .sizes import SIZES


@dataclass(frozen=True, slots=True)
class Plan:
    """A section, and after how many seconds it is ended at full size."""

    measure: Section
    limit_s: float


def _ceilings(ctx: Context) -> Iterator[Row]:
    """The rates come last, for the other sections: see `ceilings_of`."""
    yield from ceilings.measure(ctx.timer, ctx.sizes, ctx.tensors, ctx.dtype)


SECTIONS: dict[str, Plan] = {
    "ceilings": Plan(_ceilings, 60),
    "checks": Plan(checks.checks, 150),
    "decode": Plan(attention.decode, 60),
    "tree": Plan(attention.tree, 60),
    "extend": Plan(attention.extend, 60),
    "small": Plan(small_ops.small_ops, 60),
    "experts": Plan(experts.experts, 60),
    "latent": Plan(latent.latent, 60),
    "step": Plan(steps.steps, 120),
    "stall": Plan(steps.stall, 90),
    "serving": Plan(serving.serving, 420),
}
BASE = "ceilings"  # of the sections: always run


def measured(
    name: str, device: str, scale: str, rates: dict[str, float], peer_python: str | None
) -> Iterator[dict[str, Any]]:
    """The section's messages, in this process."""
    ctx = Context(device, SIZES[scale], Ceilings(**rates), peer_python)
    for row in attempt(name, lambda: SECTIONS[name].measure(ctx)):
        yield {"row": row.to_json(name, not ctx.has_gpu)}
    yield {"device": device_record(ctx.tensors)}


def unknown_ceilings() -> dict[str, float]:
    """Before they are measured: ratios to them are no numbers."""
    return asdict(Ceilings(*[float("nan")] * 4))


def ceilings_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """From the rows of the first section; unknown where one has failed."""
    found = [row["details"].get("rate") for row in rows if row["section"] == BASE]
    if len(found) != 4 or None in found:
        return unknown_ceilings()
    return asdict(Ceilings(*found))


def main() -> int:
    """A section's process: flags, one line in, lines out."""
    parser = argparse.ArgumentParser(prog="section")
    for flag in ("--section", "--device", "--scale"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--peer-python")
    args = parser.parse_args()
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what anything prints is no reply
    asked = sys.stdin.readline()
    if not asked:
        return 0
    rates = json.loads(asked)
    for message in measured(args.section, args.device, args.scale, rates, args.peer_python):
        print(json.dumps(message), file=replies, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
