"""Where an image's patches are: their rows and columns, their windows, their learned positions.

Patches come in the order in which they are merged: the `merge_size`**2 patches of a token stand
together, tokens row by row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Grid(NamedTuple):
    """Patches of an image, both a multiple of the tower's `merge_size`."""

    height: int
    width: int

    @property
    def num_patches(self) -> int:
        return self.height * self.width


def places(grid: Grid, merge_size: int) -> Tensor:
    """[N, 2] int64: row and column of each patch."""
    rows, columns = torch.meshgrid(
        torch.arange(grid.height), torch.arange(grid.width), indexing="ij"
    )
    blocks = (grid.height // merge_size, merge_size, grid.width // merge_size, merge_size)
    both = [each.reshape(blocks).transpose(1, 2).flatten() for each in (rows, columns)]
    return torch.stack(both, dim=-1)


def rotary_angles(at: Tensor, head_dim: int, theta: float) -> Tensor:
    """[N, head_dim / 2] float32: half of the pairs turn with the row, half with the column."""
    half = head_dim // 2
    frequencies = 1.0 / theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half)
    return (at[..., None].float() * frequencies).flatten(1)


def window_order(grid: Grid, merge_size: int, window: int) -> tuple[Tensor, list[int]]:
    """The tokens window by window, [N / merge_size**2] int64, and the number of each window's, none
    of them 0. `window`: tokens, as high as wide."""
    height, width = grid.height // merge_size, grid.width // merge_size
    tokens = torch.arange(height * width).view(height, width)
    parts = [
        tokens[top : top + window, left : left + window].flatten()
        for top in range(0, height, window)
        for left in range(0, width, window)
    ]
    return torch.cat(parts), [len(part) for part in parts]


def learned_positions(at: Tensor, grid: Grid, table: Tensor, side: int) -> Tensor:
    """[N, C]: a learned square of positions, `table` [side * side, C], stretched over the grid with
    its corners on the grid's; between four of them what is read is weighted by the distances."""
    row_low, row_high, row_share = _taps(at[:, 0], grid.height, side)
    column_low, column_high, column_share = _taps(at[:, 1], grid.width, side)
    total = torch.zeros(len(at), table.shape[1], dtype=table.dtype, device=table.device)
    for row, row_weight in ((row_low, 1 - row_share), (row_high, row_share)):
        for column, weight in ((column_low, 1 - column_share), (column_high, column_share)):
            total += table[row * side + column] * (row_weight * weight)[:, None].to(table.dtype)
    return total


def _taps(at: Tensor, length: int, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """The positions below and above, and how near the upper one is."""
    place = at.float() * (side - 1) / max(1, length - 1)
    low = place.floor().long().clamp(0, side - 1)
    return low, (low + 1).clamp(max=side - 1), place - low
