"""AWQ: scales a linear's inputs so that those that matter most lose least when it is rounded
(Lin et al. 2023, arXiv:2306.00978, section 3.2), and SmoothQuant's scales, which make inputs easier
to round (Xiao et al. 2022, arXiv:2211.10438, section 4).

An input is divided by its scale and the weight's column multiplied with it; what computes the input
takes over the division (`folding`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..kernels.reference.quantized import round_rows
from .grids import Bits, grid_of
from .inputs import InputStatistics

Tie = Callable[[Tensor], Tensor]
"""[in_features] -> the same, alike where inputs must have one scale."""

_EXPONENTS = tuple(step / 12 for step in range(13))  # AWQ's grid has 20
_SMALLEST = 1e-5


def awq_scales(
    weights: Sequence[Tensor],
    inputs: InputStatistics,
    bits: Bits,
    group_size: int,
    tied: Tie,
) -> Tensor:
    """[in_features]: mean^a, of the a with the least squared error of products.

    weights: [out_features, in_features] float32 each, which share the inputs.
    """
    mean = tied(inputs.mean.clamp(min=_SMALLEST))
    tried = [_centered(mean**exponent) for exponent in _EXPONENTS]
    return _best(tried, weights, inputs.sample, bits, group_size, rounds_inputs=False)


def smooth_scales(
    weights: Sequence[Tensor], inputs: InputStatistics, strength: float | None, tied: Tie
) -> Tensor:
    """[in_features]: peak^strength / (the column's largest weight)^(1 - strength); strength: None:
    that with the least squared error of products whose inputs are rounded, or none at all."""
    largest = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0)
    largest = tied(largest.clamp(min=_SMALLEST))
    peak = tied(inputs.peak.clamp(min=_SMALLEST))
    if strength is not None:
        return _centered(peak**strength / largest ** (1 - strength))
    tried = [torch.ones_like(peak)]
    tried += [_centered(peak**each / largest ** (1 - each)) for each in _EXPONENTS]
    return _best(tried, weights, inputs.sample, 8, len(peak), rounds_inputs=True)


def _best(
    tried: Sequence[Tensor],
    weights: Sequence[Tensor],
    sample: Tensor,
    bits: Bits,
    group_size: int,
    *,
    rounds_inputs: bool,
) -> Tensor:
    """Of scales those with the least squared error of the weights' products with `sample`
    [tokens, in_features]."""
    exact = [sample @ weight.t() for weight in weights]
    best, least = tried[0], torch.inf
    for scales in tried:
        scaled, error = sample / scales, 0.0
        importance = (scaled * scaled).mean(0)
        if rounds_inputs:
            numbers, row_scales = round_rows(scaled)
            scaled = numbers * row_scales
        for weight, product in zip(weights, exact, strict=True):
            columns = (weight * scales).t().contiguous()
            grid = grid_of(columns, bits, group_size, importance)
            rounded = grid.values(grid.nearest(columns))
            error += float((scaled @ rounded).sub_(product).square_().sum())
        if error < least:
            best, least = scales, error
    return best


def _centered(scales: Tensor) -> Tensor:
    """With 1 between the largest and the smallest."""
    return scales / (scales.amax() * scales.amin()).sqrt()
