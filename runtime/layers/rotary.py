"""Rotary position embedding: the table of cosines and sines, looked up once a step.

The table is computed in float32 and then cast, whatever the dtype, as Hugging Face does. Scaled
frequencies: linear (kaiokendev, 2023), dynamic NTK (bloc97, emozilla, 2023), Llama 3.1's, and YaRN
(Peng et al., "YaRN", 2023, section 3).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..rope_scaling import RopeKind, RopeScaling


class RotaryTable:
    """cos and sin of every position below `max_positions`, in the layout of `ops.ApplyRope`."""

    def __init__(
        self,
        head_dim: int,
        max_positions: int,
        theta: float,
        scaling: RopeScaling | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        inverse_frequency = inverse_frequencies(head_dim, theta, scaling, max_positions)
        angle = torch.arange(max_positions).float()[:, None] * inverse_frequency
        factor = 1.0 if scaling is None else scaling.attention_factor
        cos, sin = angle.cos() * factor, angle.sin() * factor
        # [max_positions, 1, head_dim]
        self._cos = torch.cat((cos, cos), -1)[:, None].to(device, dtype)
        self._sin = torch.cat((-sin, sin), -1)[:, None].to(device, dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] int64 -> cos, sin, each [T, 1, head_dim]; sin's first half is negated."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)


def inverse_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, max_positions: int
) -> Tensor:
    """[head_dim / 2] float32, radians a position. Only the dynamic kind looks at `max_positions`.

    NOTE: dynamic NTK changes all frequencies with the length of the sequence, so that KV of a
    prefix would depend on what comes later. Here it is computed once for `max_positions` (as if
    every sequence were that long; vLLM does so too), which keeps KV shareable. Where that is not
    above the original length it is no scaling.
    """
    if scaling is None:
        return _plain(head_dim, theta)
    if scaling.kind is RopeKind.LINEAR:
        return _plain(head_dim, theta) / scaling.factor
    if scaling.kind is RopeKind.DYNAMIC:
        length = max(max_positions, scaling.original_max_positions)
        stretch = scaling.factor * length / scaling.original_max_positions - (scaling.factor - 1)
        return _plain(head_dim, theta * stretch ** (head_dim / (head_dim - 2)))
    if scaling.kind is RopeKind.LLAMA3:
        return _llama3(_plain(head_dim, theta), scaling)
    return _yarn(head_dim, theta, scaling)


def _plain(head_dim: int, theta: float) -> Tensor:
    return 1.0 / _periods(head_dim, theta)


def _periods(head_dim: int, theta: float) -> Tensor:
    """Positions a radian."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    periods: Tensor = theta**exponent
    return periods


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Long waves are divided by the factor, short ones stay, those between are blended."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / plain
    divided = plain / scaling.factor
    share = (scaling.original_max_positions / wavelength - low) / (high - low)
    blended = (1 - share) * plain / scaling.factor + share * plain
    is_long = wavelength > scaling.original_max_positions / low
    is_short = wavelength < scaling.original_max_positions / high
    return torch.where(is_long, divided, torch.where(is_short, plain, blended))


def _yarn(head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Dimensions that turn often within the original length stay, those that hardly turn are
    divided by the factor, with a ramp between ("NTK-by-parts")."""
    periods = _periods(head_dim, theta)
    first = _dimension_that_turns(scaling.beta_fast, head_dim, theta, scaling)
    last = _dimension_that_turns(scaling.beta_slow, head_dim, theta, scaling)
    if scaling.is_truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # as Hugging Face does: no division by zero
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return 1.0 / (scaling.factor * periods) * ramp + 1.0 / periods * (1 - ramp)


def _dimension_that_turns(
    num_turns: float, head_dim: int, theta: float, scaling: RopeScaling
) -> float:
    """Which dimension makes so many turns within the original length."""
    wavelength = scaling.original_max_positions / num_turns
    return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))
