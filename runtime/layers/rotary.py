"""Rotary position embedding: the table of cosines and sines, looked up once a step.

The table is computed in float32 and then cast, whatever the dtype, as Hugging Face does.
"""

from __future__ import annotations

import torch
from torch import Tensor


class RotaryTable:
    """cos and sin of every position below `max_positions`, in the layout of `ops.ApplyRope`."""

    def __init__(
        self,
        head_dim: int,
        max_positions: int,
        theta: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        inverse_frequency = 1.0 / (theta**exponent)
        angle = torch.arange(max_positions).float()[:, None] * inverse_frequency
        cos, sin = angle.cos(), angle.sin()
        # [max_positions, 1, head_dim]
        self._cos = torch.cat((cos, cos), -1)[:, None].to(device, dtype)
        self._sin = torch.cat((-sin, sin), -1)[:, None].to(device, dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] int64 -> cos, sin, each [T, 1, head_dim]; sin's first half is negated."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)
