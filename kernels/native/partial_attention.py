"""Attention of runs of tokens to lists of keys that all of them see, by the compiled attention
kernels, up to its partial results: what of a sequence's KV one rank of several has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..attention_rows import IntArray
from ..model_options import AttentionOptions
from ..ops import KVLayer
from ..quantized_tensors import head_dim_of
from .paged_attention import NO_MERGES, NONE, NativeAttentionPlan, paged_attention, token_tiles


class Run(NamedTuple):
    """Tokens [first, end) of the step's token axis, which see all the keys in these slots."""

    first: int
    end: int
    slots: IntArray


class PartialAttention:
    """A step's work list, which all layers of a kind share."""

    def __init__(
        self, runs: Sequence[Run], kv_layer: KVLayer, num_heads: int, options: AttentionOptions
    ) -> None:
        """runs: at least one; each token in one at most."""
        tables, first_slot, first_partial = [], 0, 0
        for first, end, slots in runs:
            table = token_tiles(first, end)
            table[:, 2], table[:, 3], table[:, 4] = first_slot, len(slots), len(slots)
            table[:, 5] = -table[:, 1]
            table[:, 6] = first_partial + table[:, 0] - first
            tables.append(table)
            first_slot += len(slots)
            first_partial += end - first
        tokens = np.concatenate([np.arange(first, end) for first, end, _ in runs])
        self.tokens = torch.from_numpy(tokens)  # [P] int64, on the step's token axis
        slots = np.concatenate([run.slots for run in runs]).astype(np.int32, copy=False)
        self._plan = NativeAttentionPlan(np.concatenate(tables), slots, NONE, NO_MERGES, NONE)
        self._plan.set_shape(num_heads, kv_layer, options, num_partials=len(tokens))
        self._scale = self._plan.softmax_scale

    def __call__(self, q: Tensor, kv_layer: KVLayer, value_dim: int) -> Tensor:
        """q [T, num_heads, head_dim] -> [P, num_heads, value_dim + 1] float32:
        attended values of `tokens`, then the log of the sum of exponentials of their scores."""
        paged_attention(q, kv_layer, self._plan)
        sums, largest, total = self._plan.partials
        lse = largest * self._scale + total.log()
        return torch.cat((sums[..., :value_dim] / total[..., None], lse[..., None]), dim=-1)


def takes(kv_layer: KVLayer) -> bool:
    """Whether there is a compiled kernel for such keys."""
    return head_dim_of(kv_layer) % 16 == 0
