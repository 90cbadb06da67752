"""From measurements of several engines to rows: medians, spreads, ratios to Stemma, targets."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from ..harness.process_meter import QUIET_CORES
from .engines import EngineSpec, Measurement

BASE = "stemma"

# Wall-time ratios to reach on llama-160m.
TARGETS = {
    "vllm": {"W1": 1.2, "W2": 1.3, "W3": 1.05, "W4": 1.5, "W5": 1.5, "W6": 1.4, "D1": 1.3},
    "llama.cpp": {"W1": 8.0, "W2": 2.0, "W3": 1.8, "W4": 6.0, "D1": 1.3},
}
STARTUP_TARGET_S = 3.0
STARTUP_TARGETS = {"vllm": 10.0}
DECODE_SHARE_TARGET = 0.75  # of the read bandwidth, at batch 1


def summary(
    work: str,
    spec: EngineSpec,
    measured: Iterable[Measurement],
    fewest_s: float | None,
    floor_s: float | None = None,
) -> dict[str, Any]:
    """A row: one engine on one workload; `measured` has the repeats on all engines.

    `fewest_s`: the shortest time within the machine's limits, whoever does the work; `floor_s`:
    that of the steps which this engine made.
    """
    found = list(measured)
    own = {one.repeat: one for one in found if one.engine == spec.name}
    base = {one.repeat: one for one in found if one.engine == BASE}
    quiet = _quiet(own.values())
    walls = sorted(one.wall_s for one in quiet)
    pairs = _quiet_pairs(own, base)
    ratios = [own[repeat].wall_s / base[repeat].wall_s for repeat in pairs]
    cpu_ratios = [own[repeat].cpu_s / max(base[repeat].cpu_s, 0.01) for repeat in pairs]
    wall_s, is_base = statistics.median(walls), spec.name == BASE
    tokens = quiet[0].output_tokens
    return {
        "work": work,
        "engine": spec.name,
        "wall_s": wall_s,
        "wall_min_s": walls[0],
        "wall_max_s": walls[-1],
        "cpu_s": statistics.median(one.cpu_s for one in quiet) if spec.has_process else None,
        "tok_s": tokens / wall_s,
        "output_tokens": tokens,
        "ratio": None if is_base else statistics.median(ratios),
        "ratio_min": None if is_base else min(ratios),
        "ratio_max": None if is_base else max(ratios),
        "cpu_ratio": None if is_base or not spec.has_process else statistics.median(cpu_ratios),
        "target": _target(work, spec.name),
        "share": None if fewest_s is None else fewest_s / wall_s,
        "floor_s": floor_s,
        "floor_ratio": None if floor_s is None else wall_s / floor_s,
        "quiet": f"{sum(one.others_cores <= QUIET_CORES for one in own.values())}/{len(own)}",
        "others_cores": statistics.median(one.others_cores for one in quiet),
        "equal_outputs": sum(own[r].output_sha == base[r].output_sha for r in own),
        "peak_rss_mb": max(one.peak_rss_bytes for one in own.values()) / 2**20
        if spec.has_process
        else None,
        **_documents(quiet, wall_s),
    }


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """The table's form of a row: spreads in one cell with their median."""
    ratio = "" if row["ratio"] is None else _spread(row, "ratio", "ratio_min", "ratio_max")
    return {
        "work": row["work"],
        "engine": row["engine"],
        "wall s": _spread(row, "wall_s", "wall_min_s", "wall_max_s"),
        "CPU s": row["cpu_s"],
        "tok/s": row["tok_s"],
        "ratio": ratio,
        "target": row["target"],
        "share": row["share"],
        "floor s": row["floor_s"],
        "x floor": row["floor_ratio"],
        "quiet": row["quiet"],
    }


def shown_documents(row: dict[str, Any]) -> dict[str, Any]:
    """The table's form of a row of a workload under a schema: its outputs as documents."""
    return {
        "work": row["work"],
        "engine": row["engine"],
        "valid": f"{row['valid_documents']}/{row['documents']}",
        "s per valid": row["s_per_valid"],
        "CPU s": row["cpu_s_per_valid"],
        "tokens": f"{row['mean_tokens']:.1f}",
        "canonical": f"{row['mean_canonical_tokens']:.1f}",
        "ratio": row["ratio"],
    }


def _documents(quiet: list[Measurement], wall_s: float) -> dict[str, Any]:
    """Figures of a workload under a schema; the run with the fewest valid documents counts."""
    found = [one.documents for one in quiet if one.documents]
    names = (
        "documents", "valid_documents", "s_per_valid", "cpu_s_per_valid", "mean_tokens",
        "mean_canonical_tokens",
    )  # fmt: skip
    if not found:
        return dict.fromkeys(names)
    valid = min(one.num_valid for one in found)
    cpu_s = statistics.median(one.cpu_s for one in quiet)
    lengths = [
        statistics.median(getattr(one, name) for one in found)
        for name in ("mean_tokens", "mean_canonical_tokens")
    ]
    per_valid = (wall_s / valid, cpu_s / valid) if valid else (None, None)
    return dict(zip(names, (found[0].num, valid, *per_valid, *lengths), strict=True))


def _spread(row: dict[str, Any], *names: str) -> str:
    median, low, high = (row[name] for name in names)
    return f"{median:.2f} ({low:.2f}-{high:.2f})"


def _quiet(found: Iterable[Measurement]) -> list[Measurement]:
    """Undisturbed repeats; all, where there are none."""
    everything = list(found)
    return [one for one in everything if one.others_cores <= QUIET_CORES] or everything


def _quiet_pairs(own: dict[int, Measurement], base: dict[int, Measurement]) -> list[int]:
    """Repeats that were undisturbed on both engines; all, where there are none."""
    both = {one.repeat for one in _quiet(own.values())} & {
        one.repeat for one in _quiet(base.values())
    }
    return sorted(both or own)


def _target(work: str, engine: str) -> float | None:
    """A ratio for peers, a share of the read bandwidth for Stemma's decode."""
    if engine == BASE:
        return DECODE_SHARE_TARGET if work == "D1" else None
    return TARGETS.get(engine, {}).get(work)
