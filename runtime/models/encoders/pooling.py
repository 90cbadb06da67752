"""From the vectors of a text's tokens to that of the text, as sentence-transformers does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .packed import PackedTexts


def pooled(hidden: Tensor, texts: PackedTexts, chosen: Sequence[int], pooling: str) -> Tensor:
    """hidden [T, size] -> [chosen, size] float64, of the texts of these numbers."""
    starts = [texts.starts[index] for index in chosen]
    lengths = [texts.lengths[index] for index in chosen]
    if pooling == "cls":
        return _rows(hidden, starts)
    if pooling == "last":
        return _rows(hidden, [s + n - 1 for s, n in zip(starts, lengths, strict=True)])
    pool = _POOLS[pooling]
    spans = zip(starts, lengths, strict=True)
    return torch.stack([pool(hidden[start : start + length].double()) for start, length in spans])


def _rows(hidden: Tensor, rows: Sequence[int]) -> Tensor:
    return hidden.index_select(0, torch.tensor(rows, device=hidden.device)).double()


def _mean_sqrt(x: Tensor) -> Tensor:
    return x.sum(0) / math.sqrt(len(x))


def _weighted_mean(x: Tensor) -> Tensor:
    """Later tokens count for more (SGPT, Muennighoff 2022)."""
    weights = torch.arange(1, len(x) + 1, dtype=x.dtype, device=x.device)
    return (x * weights[:, None]).sum(0) / weights.sum()


_POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(0),
    "max": lambda x: x.amax(0),
    "mean_sqrt": _mean_sqrt,
    "weighted_mean": _weighted_mean,
}
