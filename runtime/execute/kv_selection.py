"""Chooses what is kept of a prefix's KV, and copies it to pages of its own, bit for bit.

Each KV head of each layer chooses for itself, where its policy looks at attention: a slot of the
kept prefix then has other tokens' KV in other heads. What is chosen depends on the prefix alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from ...frontend.protocol.kv_policy import KVPolicy
from ...kernels.model_options import AttentionOptions
from ...kernels.ops import KVLayer
from ...kernels.quantized_tensors import QuantizedKV
from ...kernels.reference.kv_store import dequantized, rotate, store_kv
from ...kernels.reference.observe import observe
from ..checkpoint.config.model_config import ModelConfig
from ..memory.block_copy import slots_of
from ..memory.device_pool import DeviceKVPool
from ..models.decoder import Decoder
from ..models.forward_batch import ObservedQueries
from ..models.language_model import LanguageModel
from ..schedule.plan import Row, Selection
from .inputs import PageTable, StepLayout


class KVSelector:
    """Of one pool on a CPU, of a model whose layers all have keys and values of a head."""

    def __init__(
        self, pool: DeviceKVPool, config: ModelConfig, pages: PageTable, model: LanguageModel
    ) -> None:
        self._pool = pool
        self._model = model
        self._config = config
        self._pages = pages

    def observed(self, rows: Sequence[Row], layout: StepLayout) -> ObservedQueries | None:
        """The last inputs of the rows that select, row after row; None: nobody looks at any."""
        ends = layout.query_start[1:].tolist()
        parts = [
            np.arange(end - row.selection.policy.num_observed, end)
            for row, end in zip(rows, ends, strict=True)
            if row.selection is not None and row.selection.policy.kind == "snapkv"
        ]
        return ObservedQueries(torch.from_numpy(np.concatenate(parts))) if parts else None

    def select(self, rows: Sequence[Row], observed: ObservedQueries | None) -> None:
        """Once their layers are computed."""
        first = 0
        for row in rows:
            if row.selection is None:
                continue
            slots = self._slots_of_row(row)
            size = row.selection.policy.num_observed
            for layer in range(len(self._config.attention_layers)):
                queries = None
                if row.selection.policy.kind == "snapkv":
                    assert observed is not None
                    queries = observed.of[layer][first : first + size]
                self._select(row.selection, layer, slots, queries)
            first += size if row.selection.policy.kind == "snapkv" else 0

    def _slots_of_row(self, row: Row) -> Tensor:
        """[C]: where the row's tokens are."""
        num_tokens = row.known_end
        page_size = self._pool.page_size
        pages = self._pages.entries[row.table_row, : -(-num_tokens // page_size)]
        return torch.from_numpy(slots_of(pages.tolist(), page_size)[:num_tokens])

    def _select(
        self, selection: Selection, layer: int, slots: Tensor, queries: Tensor | None
    ) -> None:
        target = torch.from_numpy(slots_of(selection.pages, self._pool.page_size))
        policy, keep = selection.policy, len(target)
        is_candidate = torch.ones(len(slots), dtype=torch.bool)
        if selection.candidates is not None:
            is_candidate[:] = False
            for first, end in selection.candidates:
                is_candidate[first:end] = True
        if queries is None:
            chosen = first_and_last(len(slots), keep, policy.sinks)[None]
        else:
            keys = _numbers(self._pool.layers[layer], 0, slots)
            kind = self._config.layer_kinds[self._config.attention_layers[layer]]
            options = self._config.attention_kinds[kind]
            assert isinstance(options, AttentionOptions)
            chosen = most_attended(observe(queries, keys, options), is_candidate, keep, policy)
        self._copy(layer, slots[chosen], target)
        if policy.kind == "streaming":
            self._turn_back(layer, target[policy.sinks :], len(slots) - keep)

    def _turn_back(self, layer: int, slots: Tensor, num_positions: int) -> None:
        """Have the keys in these slots stand so many positions earlier."""
        assert isinstance(self._model, Decoder), "its layers are alike"
        model_layer = self._config.attention_layers[layer]
        at = torch.tensor([0, num_positions])
        rotary = self._model.rotary_at(at)[model_layer]
        factor = rotary.cos[:1]  # of attention, which the keys have
        kv_layer = self._pool.layers[layer]
        keys, values = (_numbers(kv_layer, which, slots) for which in (0, 1))
        keys = keys.transpose(0, 1).contiguous()
        rotate(keys, rotary.cos[1:] / factor, -rotary.sin[1:] / factor)
        store_kv(keys, values.transpose(0, 1), kv_layer, slots)

    def _copy(self, layer: int, source: Tensor, target: Tensor) -> None:
        """source [KV heads or 1, keep], target [keep]: slots."""
        layout = self._pool.layout
        for part, tensors in zip(layout.parts, self._pool.parts, strict=True):
            if layer not in layout.layers_of(part):
                continue
            memory = tensors[layout.layers_of(part).index(layer)]
            of_vector = source.repeat(part.num_vectors // len(source), 1)  # keys', then values'
            vectors = torch.arange(part.num_vectors)[:, None]
            memory[:, target] = memory[vectors, of_vector]


def most_attended(attention: Tensor, is_candidate: Tensor, keep: int, policy: KVPolicy) -> Tensor:
    """SnapKV's choice, ascending: the last `window` tokens and those that are no candidates, and of
    the others the ones with the most attention among `pool` tokens around them; of equal ones the
    first.

    attention [num_kv_heads, C] (`observe`), is_candidate [C] bool -> [num_kv_heads, keep] int64.
    """
    num_kv_heads, num_tokens = attention.shape
    num_before = num_tokens - policy.window
    pooled = max_pool1d(attention[:, :num_before], policy.pool, stride=1, padding=policy.pool // 2)
    pooled[:, ~is_candidate[:num_before]] = torch.inf
    order = pooled.sort(dim=-1, descending=True, stable=True).indices
    chosen = order[:, : keep - policy.window].sort(dim=-1).values
    last = torch.arange(num_before, num_tokens).expand(num_kv_heads, -1)
    return torch.cat((chosen, last), dim=1)


def first_and_last(num_tokens: int, keep: int, num_first: int) -> Tensor:
    """StreamingLLM's choice, ascending: [keep] int64."""
    num_last = keep - num_first
    return torch.cat((torch.arange(num_first), torch.arange(num_tokens - num_last, num_tokens)))


def _numbers(layer: KVLayer, which: int, slots: Tensor) -> Tensor:
    """Keys (0) or values (1) in these slots: [num_kv_heads, C, head_dim]."""
    if isinstance(layer, QuantizedKV):
        return dequantized(layer.values[which][:, slots], layer.scales[which][:, slots])
    assert isinstance(layer, Tensor)
    return layer[which][:, slots]
