"""From sampling parameters to the arrays of `kernels.sampling_rows`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..schedule.sampling_params import MIN_TEMPERATURE, SamplingParams


def sampling_arrays(
    params: Sequence[SamplingParams], positions: npt.NDArray[np.int64]
) -> dict[str, npt.NDArray[Any]]:
    """The fields of SamplingRows by name, for N rows; positions [N]: of each row's new token."""
    num_rows = len(params)
    temperature = np.fromiter([row.temperature for row in params], np.float64, num_rows)
    temperature[temperature < MIN_TEMPERATURE] = 0.0
    return {
        "temperature": temperature,
        "top_k": np.fromiter([row.top_k or 0 for row in params], np.int64, num_rows),
        "top_p": np.fromiter([row.top_p for row in params], np.float64, num_rows),
        "min_p": np.fromiter([row.min_p for row in params], np.float64, num_rows),
        "seed": np.fromiter([row.seed for row in params], np.int64, num_rows),
        "position": positions,
    }
