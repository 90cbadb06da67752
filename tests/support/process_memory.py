"""Resident memory of processes, and whether it grows (Linux)."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from pathlib import Path


def rss_mb(pid: int) -> float:
    """0 for a process that has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def growth_of(sizes: Sequence[float]) -> float:
    """From the median of the first third to that of the last: a single peak is none."""
    third = max(1, len(sizes) // 3)
    return statistics.median(sizes[-third:]) - statistics.median(sizes[:third])
