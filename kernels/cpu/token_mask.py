"""Packed token masks with numpy: the minimum of each logit and its bit's bound, 8 tokens a lookup.

A third of the time of unpacked bits and a masked assignment, which branches on each token.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

# [256, 8]: inf if the bit allows the token, -inf if not.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_BOUNDS: dict[str, npt.NDArray[np.floating]] = {
    name: np.where(_BITS == 1, np.inf, -np.inf).astype(name) for name in ("float32", "float64")
}


def apply_token_mask(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    values, words = logits.numpy(), masks.numpy()
    bounds = _BOUNDS[values.dtype.name]
    for row, bits in zip(rows.tolist(), words.view(np.uint8)):
        bound = bounds[bits].ravel()[: values.shape[1]]
        np.fmin(values[row], bound, out=values[row])
