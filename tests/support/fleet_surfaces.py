"""Response surfaces of engines that were never simulated."""

from __future__ import annotations

import numpy as np

from stemma.planning.surface import Point, Surface


def surface_of(limit: float = 10.0) -> Surface:
    """First tokens take 0.1 s at rest, and up to 0.5 s at the limit."""
    points = []
    for share in (0.1, 0.4, 0.7, 0.95):
        ttft_s = 0.1 + 0.4 * share**2
        times = np.array([(ttft_s * part, 0.02 + 0.02 * share) for part in (0.8, 1.0, 1.2)])
        rate = share * limit
        points.append(Point(rate, rate, times, ttft_s, 800 * share, 500 * share, share, 0.5, 200.0))
    return Surface(tuple(points), limit)
