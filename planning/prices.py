"""What a GPU costs an hour, in US dollars: guesses from what clouds list on demand in 2026. They
differ by a factor of two between sellers, so say your own (`stemma plan --price h200=3.2`)."""

from __future__ import annotations

from collections.abc import Mapping

GPU_HOUR: Mapping[str, float] = {
    "b200": 5.5,
    "h200": 3.6,
    "h100": 2.8,
    "a100": 1.8,
    "l40s": 1.1,
    "l4": 0.7,
    "rtx4090": 0.45,
    "rtx3090": 0.25,
}
