"""Sampling parameters of a batch, written as one dict per row."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from stemma.kernels.sampling_rows import SamplingRows

_DEFAULTS: dict[str, tuple[Any, Any]] = {
    "temperature": (1.0, np.float64),
    "top_k": (0, np.int64),
    "top_p": (1.0, np.float64),
    "min_p": (0.0, np.float64),
    "seed": (0, np.uint64),
    "position": (0, np.int64),
}


def sampling_rows(*rows: dict[str, Any]) -> SamplingRows:
    """A parameter that a row does not name is off, or 0."""
    columns = {
        name: np.array([row.get(name, default) for row in rows], dtype=dtype)
        for name, (default, dtype) in _DEFAULTS.items()
    }
    columns["seed"] = columns["seed"].view(np.int64)
    return SamplingRows(**{name: torch.from_numpy(column) for name, column in columns.items()})
