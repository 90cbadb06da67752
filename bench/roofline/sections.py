"""The sections of a GPU run: what each measures, and how long it may take.

A section runs in a process of its own, so that a kernel which hangs or faults, and leaves the
device unusable to its process, costs its own section alone. It imports everything while another
section measures, waits for the ceilings on its standard input, and answers in lines: rows as they
are measured, then the device as it found it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from . import (
    attention,
    ceilings,
    checks,
    dependent,
    experts,
    latent,
    peers,
    prefill,
    risks,
    scans,
    serving,
    small_ops,
    steps,
)
from .ceilings import Ceilings, device_record
from .context import Context, Section
from .rows import Row, attempt
from .sizes import FULL, SIZES


@dataclass(frozen=True, slots=True)
class Plan:
    """A section; at full size it is ended after `limit_s`, and `num_shards` processes share it."""

    measure: Section
    limit_s: float
    num_shards: int = 1


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings shared by all sections of a run."""

    device: str
    scale: str
    peer_python: str | None

    def num_shards(self, name: str) -> int:
        """Number of processes that share a section."""
        return SECTIONS[name].num_shards if self.scale == FULL.name else 1


def _ceilings(ctx: Context) -> Iterator[Row]:
    """The rates come last, for the other sections: see `ceilings_of`."""
    yield from ceilings.measure(ctx.timer, ctx.sizes, ctx.tensors, ctx.dtype)


SECTIONS: dict[str, Plan] = {
    "ceilings": Plan(_ceilings, 45),
    "risks": Plan(risks.risks, 60),  # its first row says whether kernels are right
    "prefill": Plan(prefill.prefill, 30),  # this and the next decide what an engine runs
    "dependent": Plan(dependent.dependent, 30),
    "checks": Plan(checks.checks, 150, num_shards=6),  # most of it is compiling
    "decode": Plan(attention.decode, 60),
    "step": Plan(steps.steps, 225),
    "tree": Plan(attention.tree, 60),
    "extend": Plan(attention.extend, 60),
    "peers": Plan(peers.peers, 90),
    "small": Plan(small_ops.small_ops, 60),
    "experts": Plan(experts.experts, 60),
    "latent": Plan(latent.latent, 60),
    "scans": Plan(scans.scans, 60),
    "stall": Plan(steps.stall, 90),
    "serving": Plan(serving.serving, 420),
}
# A whole run as calls of under ten minutes each.
PHASES = {
    "first": ("risks", "prefill", "dependent", "checks", "decode", "step"),
    "kernels": ("tree", "extend", "peers", "small", "experts", "latent", "scans", "stall"),
    "serving": ("serving",),
}
BASE = "ceilings"  # the section that always runs


def measured(
    name: str, setting: Setting, rates: dict[str, float], shard: tuple[int, int] = (0, 1)
) -> Iterator[dict[str, Any]]:
    """The section's messages, in this process."""
    sizes = SIZES[setting.scale]
    ctx = Context(setting.device, sizes, Ceilings(**rates), setting.peer_python, shard)
    for row in attempt(name, SECTIONS[name].measure, ctx):
        yield {"row": row.to_json(name, not ctx.has_gpu)}
    yield {"device": device_record(ctx.tensors)}


def unknown_ceilings() -> dict[str, float]:
    """Ceilings before their measurement: ratios to them are NaN."""
    return asdict(Ceilings(*[float("nan")] * 4))


def ceilings_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Ceilings from the rows of the first section; unknown where one has failed."""
    found = [row["details"].get("rate") for row in rows if row["section"] == BASE]
    if len(found) != 4 or None in found:
        return unknown_ceilings()
    return asdict(Ceilings(*found))


def main() -> int:
    """A section's process: reads two lines of JSON, what to measure and then the ceilings."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # library output must not mix with replies
    asked = json.loads(sys.stdin.readline())
    rates = sys.stdin.readline()
    if not rates:
        return 0
    setting, shard = Setting(**asked["setting"]), tuple(asked["shard"])
    for message in measured(asked["section"], setting, json.loads(rates), shard):
        print(json.dumps(message), file=replies, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
