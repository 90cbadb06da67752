"""Percentiles of measured values, by the nearest rank: always one that was found."""

from __future__ import annotations

from collections.abc import Sequence


def percentile(ordered: Sequence[float], percent: int) -> float:
    """The smallest of the values, in rising order, that `percent` % of them do not exceed."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]
