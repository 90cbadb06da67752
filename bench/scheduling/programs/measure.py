"""Every way of running a work, repeat by repeat, and the rows that come of it.

Each engine has a process of its own that is kept for all repeats of a work; only one is at work at
a time. A repeat runs on all of them in turn, over token ids that no earlier repeat has had, so a
ratio is one of two runs next to each other.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ...harness.process_meter import QUIET_CORES, ProcessMeter, wait_until_idle
from .figures import Figures, clairvoyant_share, figures_of
from .record import Player, carry_out
from .scripts import Work
from .stemma_engine import StemmaEngine
from .variants import BASE, Variant
from .vllm_server import VllmServer

POOL_SHARE = 3  # the working set is this many times the pool


@dataclass(frozen=True, slots=True)
class Measured:
    """One repeat on one engine."""

    engine: str
    repeat: int
    figures: Figures
    clairvoyant_share: float | None  # of the hits that Belady's choice gets; Stemma's only
    cpu_s: float  # of this process and all engines below it
    others_cores: float  # used by all else on the machine meanwhile


Runs = dict[str, list[Measured]]  # by engine, repeat by repeat


@dataclass(frozen=True, slots=True)
class Bench:
    """What all works share; `vllm_python`: also measure vLLM, in this environment."""

    model: Path
    num_repeats: int
    wait_idle_s: float = 0.0
    vllm_python: str | None = None

    def measure(
        self, make: Callable[[int], Work], warm_up: Work, variants: Sequence[Variant]
    ) -> Runs:
        """Run `make(repeat)` on each variant that this engine supports, and on vLLM."""
        pool = make(0).working_set // POOL_SHARE
        found: Runs = {}
        with ExitStack() as stack:
            players = [
                stack.enter_context(closing(player)) for player in self._players(variants, pool)
            ]
            for player in players:
                carry_out(player, warm_up)
            for repeat in range(self.num_repeats):
                for player in players:
                    one = self._measure_one(player, make(repeat), repeat, pool)
                    found.setdefault(player.name, []).append(one)
        return found

    def _players(self, variants: Sequence[Variant], pool: int) -> Iterator[Player]:
        for variant in variants:
            reason = variant.reason_against()
            if reason is not None:
                say(f"{variant.name} is left out: {reason}")
                continue
            say(f"starting {variant.name}, {pool} tokens of KV")
            options = {**variant.options, "max_total_tokens": pool}
            yield StemmaEngine(variant.name, self.model, options)
        if self.vllm_python is not None:
            say(f"starting vLLM, {pool} tokens of KV")
            yield VllmServer(self.vllm_python, self.model, kv_tokens=pool)

    def _measure_one(self, player: Player, work: Work, repeat: int, pool: int) -> Measured:
        if self.wait_idle_s:
            wait_until_idle(os.getpid(), self.wait_idle_s)
        with ProcessMeter(os.getpid()) as meter:
            run = carry_out(player, work)
        figures = figures_of(run)
        noted = "" if meter.others_cores <= QUIET_CORES else ", disturbed"
        say(
            f"{work.name} {repeat + 1}/{self.num_repeats} {player.name}: {run.wall_s:.1f} s, "
            f"{figures.recomputed_tokens} tokens again (others {meter.others_cores:.2f} "
            f"cores{noted})"
        )
        share = None
        if isinstance(player, StemmaEngine):
            share = clairvoyant_share(run, pool + player.num_host_tokens)
        return Measured(player.name, repeat, figures, share, meter.cpu_s, meter.others_cores)


def rows_of(work: str, runs: Runs) -> list[dict[str, Any]]:
    """A row per engine: medians over its repeats; ratios of wall time, pair by pair."""
    return [_row(work, measured, runs.get(BASE)) for measured in runs.values()]


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """The table's form of a row: how long it took, and the cache's figures."""
    return {
        "work": row["work"],
        "engine": row["engine"],
        "wall s": row["wall_s"],
        "least": row["wall_min_s"],
        "ratio": row["ratio"],
        "hits": row["hit_rate"],
        "ever": row["infinite_hit_rate"],
        "Belady": row["clairvoyant_share"],
        "again": row["recomputed_tokens"],
        "quiet": row["quiet"],
    }


def shown_programs(row: dict[str, Any]) -> dict[str, Any]:
    """The same for the completion of programs and where their time went."""
    return {
        "work": row["work"],
        "engine": row["engine"],
        "mean s": row["mean_s"],
        "p50": row["p50_s"],
        "p99": row["p99_s"],
        "paused": row["paused_s"],
        "queued": row["queued_s"],
        "prefill": row["prefill_s"],
        "decode": row["decode_s"],
        "idle": row["idle_share"],
    }


def say(text: str) -> None:
    """Print progress, and what is left out, to standard error."""
    print(text, file=sys.stderr, flush=True)


def _row(
    work: str, measured: Sequence[Measured], base: Sequence[Measured] | None
) -> dict[str, Any]:
    figures = [asdict(one.figures) for one in measured]
    middle = {name: _median([one[name] for one in figures]) for name in figures[0]}
    walls = [one.figures.wall_s for one in measured]
    ratios = [a / b.figures.wall_s for a, b in zip(walls, base, strict=True)] if base else []
    return {
        "work": work,
        "engine": measured[0].engine,
        **middle,
        "wall_min_s": min(walls),
        "wall_max_s": max(walls),
        "ratio": median(ratios) if ratios else None,
        "ratio_min": min(ratios, default=None),
        "ratio_max": max(ratios, default=None),
        "clairvoyant_share": _median([one.clairvoyant_share for one in measured]),
        "cpu_s": median(one.cpu_s for one in measured),
        "quiet": f"{sum(o.others_cores <= QUIET_CORES for o in measured)}/{len(measured)}",
    }


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
