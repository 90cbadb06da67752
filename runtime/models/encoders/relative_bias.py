"""What attention adds to a score by how far the two tokens are apart: a number for each head and
bucket of distances, whose buckets grow with the distance (T5, Raffel et al. 2020)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_FARTHEST = 128  # tokens: all beyond share a bucket


class RelativeBias:
    """Owns the table, [num_buckets, num_heads]."""

    def __init__(self, table: Tensor) -> None:
        self._table = table

    def of(self, length: int) -> Tensor:
        """[num_heads, length, length]: what each query adds to each key's score."""
        at = torch.arange(length, device=self._table.device)
        buckets = _buckets(at[None, :] - at[:, None], len(self._table))
        return self._table[buckets].permute(2, 0, 1).contiguous()


def _buckets(distances: Tensor, num_buckets: int) -> Tensor:
    """One half is for tokens behind the query; of each, one half is for a distance each."""
    half = num_buckets // 2
    exact = half // 2
    apart = distances.abs()
    share = torch.log(apart.float() / exact) / math.log(_FARTHEST / exact)
    far = (exact + (share * (half - exact)).long()).clamp(max=half - 1)
    return (distances > 0) * half + torch.where(apart < exact, apart, far)
