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

from .grids import Bits, grid_of

Tie = Callable[[Tensor], Tensor]
"""[in_features] -> the same, alike where inputs must have one scale."""

_STEPS = 12  # of the exponent's grid from 0 to 1; AWQ's has 20
_SMALLEST = 1e-5


def awq_scales(
    weights: Sequence[Tensor],
    mean: Tensor,
    sample: Tensor,
    bits: Bits,
    group_size: int,
    tied: Tie,
) -> Tensor:
    """[in_features]: mean^a, of the a with the least squared error of the products with `sample`.

    weights: [out_features, in_features] float32 each, which share the inputs; mean [in_features]:
    of the inputs' magnitudes; sample [tokens, in_features].
    """
    exact = [weight @ sample.t() for weight in weights]
    best, least = torch.ones_like(mean), torch.inf
    for step in range(_STEPS + 1):
        scales = _centered(tied(mean.clamp(min=_SMALLEST)) ** (step / _STEPS))
        scaled, error = sample / scales, 0.0
        for weight, product in zip(weights, exact, strict=True):
            columns = (weight * scales).t().contiguous()
            grid = grid_of(columns, bits, group_size, (scaled * scaled).mean(0))
            numbers = grid.nearest(columns)
            found = torch.empty_like(columns)
            for group in range(len(grid.scales)):
                own = slice(group * grid.group_size, (group + 1) * grid.group_size)
                found[own] = (numbers[own] - grid.zeros[group]) * grid.scales[group]
            error += float((scaled @ found - product.t()).square().sum())
        if error < least:
            best, least = scales, error
    return best


def smooth_scales(weights: Sequence[Tensor], peak: Tensor, strength: float, tied: Tie) -> Tensor:
    """[in_features]: peak^strength / (the column's largest weight)^(1 - strength). peak
    [in_features]: the inputs' largest magnitudes."""
    largest = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0)
    numerator = tied(peak.clamp(min=_SMALLEST)) ** strength
    return _centered(numerator / tied(largest.clamp(min=_SMALLEST)) ** (1 - strength))


def _centered(scales: Tensor) -> Tensor:
    """With 1 between the largest and the smallest."""
    return scales / (scales.amax() * scales.amin()).sqrt()
