"""GPTQ: rounds a weight input by input, and lets what is not rounded yet make up for the errors.

With G = X^T X of a linear's inputs X, the squared error of its outputs is that of (W - Q) L, where
G = L L^T with L lower triangular:

    error of a row = sum over j of (L_jj e_j + sum over i > j of L_ij e_i)^2,  e = w - q

From the last input to the first, e_j is rounded to make its own term as small as it can be. That is
GPTQ (Frantar et al. 2022, arXiv:2210.17323) in this order: it is the same as rounding after the
inverse's Cholesky factor from the first to the last (Chen et al. 2025, arXiv:2507.18553: "Babai's
nearest plane algorithm"), but takes one factorization and no inverse: n^3 / 3 operations.

The inputs with the largest G_jj come last, so they are rounded first (act-order); groups stay
those of consecutive inputs, whose scales are fixed before (static groups), so nothing has to be
reordered when the weight is used.

What is before a linear is rounded too, so it gets X where the original gets X + D, and its products
should be those of the original, (X + D) W^T. What comes nearest without rounding is

    W'^T = W^T + G^-1 X^T D W^T

and it is this weight that is rounded (as GPTAQ's asymmetric calibration: Li et al. 2025,
arXiv:2504.02692, there an input at a time).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .grids import Grid

DAMPING = 0.01  # of G's mean diagonal, added to it (the paper's, section 3.3)
_BLOCK = 128  # inputs, whose errors reach the others in one product (the paper's B)


class InputOrder:
    """G's Cholesky factor, its inputs in the order of their diagonal."""

    def __init__(self, gram: Tensor) -> None:
        """gram [in_features, in_features] float32, which is ordered and damped IN PLACE: with the
        factor there are never more than two of its size."""
        self.order = gram.diagonal().argsort(stable=True)
        torch.index_select(gram[self.order], 1, self.order, out=gram)
        diagonal = gram.diagonal()
        diagonal += (DAMPING * diagonal.mean()).clamp_(min=1e-12)
        self.factor = torch.linalg.cholesky(gram)  # [in_features, in_features], lower

    def solve(self, sums: Tensor) -> Tensor:
        """sums [in_features, any] -> (G, damped)^-1 @ sums."""
        found = torch.empty_like(sums)
        found[self.order] = torch.cholesky_solve(sums[self.order], self.factor)
        return found


def gptq_numbers(columns: Tensor, grid: Grid, inputs: InputOrder) -> Tensor:
    """columns [in_features, out_features] float32, not damaged -> numbers in the grid."""
    factor, order = inputs.factor, inputs.order
    errors = columns[order]  # becomes what is left of the weight
    groups = (order // grid.group_size).tolist()
    numbers = torch.empty_like(columns)
    places, pivots = order.tolist(), factor.diagonal().tolist()
    for end in range(len(columns), 0, -_BLOCK):
        start = max(0, end - _BLOCK)
        shifts = factor[end:, start:end].t() @ errors[end:]
        for at in range(end - 1, start - 1, -1):
            shift = shifts[at - start]
            shift += factor[at + 1 : end, at] @ errors[at + 1 : end]
            group, value = groups[at], errors[at]
            number = grid.numbers(value + shift / pivots[at], group)
            numbers[places[at]] = number
            value -= (number - grid.zeros[group]) * grid.scales[group]
    return numbers
