"""How each row of logits is sampled: one tensor a parameter, on the logits' device.

What the parameters mean, and how draws are derived: docs/how-it-works/sampling.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """N rows."""

    # [N] float64; 0: the best token; else >= 1e-100, so that a logit divided by it is finite
    temperature: Tensor
    top_k: Tensor  # [N] int64, >= 0; 0: all
    top_p: Tensor  # [N] float64, in (0, 1]
    min_p: Tensor  # [N] float64, in [0, 1]
    seed: Tensor  # [N] int64, the bits of an unsigned number
    position: Tensor  # [N] int64, of the new token in its sequence
