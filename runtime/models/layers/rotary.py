"""Rotary position embedding: the table of cosines and sines, looked up once a step.

The table is computed in float32 and then cast, whatever the dtype, as Hugging Face does. Scaled
frequencies: linear (kaiokendev, 2023), dynamic NTK (bloc97, emozilla, 2023), Llama 3.1's, YaRN
(Peng et al., "YaRN", 2023, section 3) and LongRoPE (Ding et al., "LongRoPE", 2024).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ....kernels.registry import Kernels
from ...checkpoint.config.model_config import QueryScaling
from ...checkpoint.config.rope_scaling import RopeKind, RopeScaling
from .build import ModelBuild

# Positions computed at a time: some megabytes of float32, however long the table is.
_BLOCK_POSITIONS = 1 << 13


class Rotary(NamedTuple):
    """A step's positions, as a layer's queries and keys take them."""

    cos: Tensor  # [T, 1, rotary_dim]; see `RotaryTable.at`
    sin: Tensor
    query_scale: Tensor | None = None  # [T, 1, 1]; rotated queries are multiplied by it


class RotaryTable:
    """cos and sin of every position below `max_positions`, laid out for `ops.RotateAndStore`."""

    def __init__(
        self,
        rotary_dim: int,
        max_positions: int,
        theta: float | None,
        scaling: RopeScaling | None = None,
        *,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """theta None: no rotation at any position."""
        self._gather = kernels.gather_rows
        inverse_frequency = inverse_frequencies(rotary_dim, theta, scaling, max_positions)
        factor = 1.0 if scaling is None else scaling.attention_factor
        shape = (max_positions, 1, rotary_dim)
        self._cos, self._sin = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        for first in range(0, max_positions, _BLOCK_POSITIONS):
            at = slice(first, min(first + _BLOCK_POSITIONS, max_positions))
            angle = torch.arange(at.start, at.stop).float()[:, None] * inverse_frequency
            cos, sin = angle.cos() * factor, angle.sin() * factor
            self._cos[at, 0] = torch.cat((cos, cos), -1)
            self._sin[at, 0] = torch.cat((-sin, sin), -1)

    @property
    def num_bytes(self) -> int:
        return self._cos.nbytes + self._sin.nbytes

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] int64 -> cos, sin, each [T, 1, rotary_dim]; sin's first half is negated."""
        return self._gather(self._cos, positions), self._gather(self._sin, positions)

    def at_axes(self, positions: Tensor, axes: Tensor) -> tuple[Tensor, Tensor]:
        """positions [3, T] int64, axes [rotary_dim] int64: which of the three turns each dimension
        -> as `at`."""
        cos, sin = (
            torch.stack([self._gather(table, each) for each in positions])
            for table in (self._cos, self._sin)
        )
        index = axes.expand(1, *cos.shape[1:])
        return cos.gather(0, index)[0], sin.gather(0, index)[0]


class LayerRotary:
    """The rotary embedding of each layer: one table, and one lookup a step, for each kind."""

    def __init__(self, build: ModelBuild) -> None:
        config = build.config
        ropes = list(zip(config.rotary_dims, config.layer_ropes, strict=True))
        distinct = list(dict.fromkeys(ropes))
        self._query_scaling, self._dtype = config.query_scaling, build.dtype
        self._axes: Tensor | None = None
        if config.rope_axes is not None:
            self._axes = torch.tensor(config.rope_axes * 2, device=build.device)
        self._table_of_layer = [distinct.index(rope) for rope in ropes]
        scaling = config.query_scaling
        is_everywhere = scaling is not None and not scaling.is_without_rope
        self._is_scaled = [is_everywhere or theta is None for _, (theta, _) in ropes]
        self.tables = [
            RotaryTable(
                rotary_dim,
                build.max_model_len,
                theta,
                scaling,
                kernels=build.kernels,
                dtype=build.dtype,
                device=build.device,
            )
            for rotary_dim, (theta, scaling) in distinct
        ]

    def at(self, positions: Tensor) -> list[Rotary]:
        """positions [T] or [3, T] int64, see `ForwardBatch` -> [num_layers]"""
        if positions.dim() == 2:
            assert self._axes is not None, "the model's positions have one axis"
            in_grid = [Rotary(*table.at_axes(positions, self._axes)) for table in self.tables]
            return [in_grid[table] for table in self._table_of_layer]
        scale = None
        if self._query_scaling is not None:
            scale = query_scale(positions, self._query_scaling).to(self._dtype)
        found = [Rotary(*table.at(positions)) for table in self.tables]
        scaled = [rotary._replace(query_scale=scale) for rotary in found]
        return [
            (scaled if is_scaled else found)[table]
            for table, is_scaled in zip(self._table_of_layer, self._is_scaled, strict=True)
        ]


def turned(heads: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool) -> Tensor:
    """heads [T, N, rotary_dim] -> their rotation, a new tensor, its halves apart.

    With interleaved pairs (a0, b0, a1, b1, ...) it is (a0, a1, ..., b0, b1, ...) that is rotated,
    of queries and keys alike, so that their products stay the same.
    """
    half = heads.shape[-1] // 2
    if is_interleaved:
        pairs = heads.reshape(*heads.shape[:2], half, 2)
        heads = pairs.transpose(-1, -2).flatten(-2)
    return torch.addcmul(heads * cos, heads.roll(half, -1), sin)


def query_scale(positions: Tensor, scaling: QueryScaling) -> Tensor:
    """positions [T] int64 -> [T, 1, 1] float32; 1 within the length of training."""
    lengths = torch.floor((positions + scaling.offset) / scaling.length)
    return (1 + scaling.beta * torch.log(1 + lengths))[:, None, None]


def halves_apart(num_heads: int, head_dim: int, rotary_dim: int) -> Tensor:
    """[num_heads * head_dim] int64: which of a checkpoint's outputs each output of the projection
    to these heads is, if the checkpoint has its rotated pairs side by side: the first halves of
    the pairs, then the second, then what is not rotated.

    Products of queries and keys stay the same if both are ordered so.
    """
    pairs = torch.arange(rotary_dim).view(-1, 2).T.flatten()
    head = torch.cat((pairs, torch.arange(rotary_dim, head_dim)))
    return (torch.arange(num_heads)[:, None] * head_dim + head).flatten()


def inverse_frequencies(
    rotary_dim: int, theta: float | None, scaling: RopeScaling | None, max_positions: int
) -> Tensor:
    """[rotary_dim / 2] float32, radians a position. Only dynamic NTK and LongRoPE use
    `max_positions`.

    NOTE: these two change all frequencies with the length of the sequence, so that KV of a prefix
    would depend on later tokens. Here they are computed once for `max_positions` (as if every
    sequence were that long; vLLM does so too), which keeps KV shareable. If that does not exceed
    the original length, dynamic NTK is no scaling, and LongRoPE takes its short factors.
    """
    if theta is None:
        return torch.zeros(rotary_dim // 2)
    if scaling is None:
        return _plain(rotary_dim, theta)
    if scaling.kind is RopeKind.PROPORTIONAL:
        frequencies = _plain(rotary_dim, theta) / scaling.factor
        frequencies[int(scaling.rotated_share * rotary_dim // 2) :] = 0.0
        return frequencies
    if scaling.kind is RopeKind.LINEAR:
        return _plain(rotary_dim, theta) / scaling.factor
    if scaling.kind is RopeKind.DYNAMIC:
        length = max(max_positions, scaling.original_max_positions)
        stretch = scaling.factor * length / scaling.original_max_positions - (scaling.factor - 1)
        return _plain(rotary_dim, theta * stretch ** (rotary_dim / (rotary_dim - 2)))
    if scaling.kind is RopeKind.LONGROPE:
        is_long = max_positions > scaling.original_max_positions
        factors = scaling.long_factors if is_long else scaling.short_factors
        return 1.0 / (torch.tensor(factors) * _periods(rotary_dim, theta))
    if scaling.kind is RopeKind.LLAMA3:
        return _llama3(_plain(rotary_dim, theta), scaling)
    return _yarn(rotary_dim, theta, scaling)


def _plain(rotary_dim: int, theta: float) -> Tensor:
    return 1.0 / _periods(rotary_dim, theta)


def _periods(rotary_dim: int, theta: float) -> Tensor:
    """Positions a radian."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    periods: Tensor = theta**exponent
    return periods


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Divides long waves by the factor, keeps short ones, and blends those between."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / plain
    divided = plain / scaling.factor
    share = (scaling.original_max_positions / wavelength - low) / (high - low)
    blended = (1 - share) * plain / scaling.factor + share * plain
    is_long = wavelength > scaling.original_max_positions / low
    is_short = wavelength < scaling.original_max_positions / high
    return torch.where(is_long, divided, torch.where(is_short, plain, blended))


def _yarn(rotary_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Keeps dimensions that turn often within the original length, divides those that hardly turn
    by the factor, with a ramp between ("NTK-by-parts")."""
    periods = _periods(rotary_dim, theta)
    first = _dimension_that_turns(scaling.beta_fast, rotary_dim, theta, scaling)
    last = _dimension_that_turns(scaling.beta_slow, rotary_dim, theta, scaling)
    if scaling.is_truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    if first == last:
        last += 0.001  # as Hugging Face does: no division by zero
    ramp = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(
        0, 1
    )
    return 1.0 / (scaling.factor * periods) * ramp + 1.0 / periods * (1 - ramp)


def _dimension_that_turns(
    num_turns: float, rotary_dim: int, theta: float, scaling: RopeScaling
) -> float:
    """The dimension that makes this many turns within the original length."""
    wavelength = scaling.original_max_positions / num_turns
    return rotary_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))
