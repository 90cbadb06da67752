"""Chooses what is kept of a prefix's KV, and copies it to pages of its own, bit for bit.

Each KV head of each layer chooses for itself, where its policy looks at attention: a slot of the
kept prefix then has other tokens' KV in other heads. What is chosen depends on the prefix alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from ...frontend.protocol.kv_policy import KVPolicy
from ...kernels.model_options import AttentionOptions
from ...kernels.ops import KVLayer
from ...kernels.quantized_tensors import QuantizedKV
from ...kernels.reference.kv_store import dequantized, rotate, store_kv
from ...kernels.registry import Kernels
from ..checkpoint.config.model_config import ModelConfig
from ..memory.block_copy import slots_of
from ..memory.device_pool import DeviceKVPool
from ..models.decoder import Decoder
from ..models.language_model import LanguageModel
from ..schedule.plan import Row, Selection
from .inputs import PageTable, StepLayout


class KVSelector:
    """Of one pool on a CPU, of a model whose layers all have keys and values of a head.

    Owns the attention that keys have had of a request whose queries are all looked at, from its
    first row to the one that chooses, or until its row of the page table is another's.
    """

    def __init__(
        self,
        pool: DeviceKVPool,
        config: ModelConfig,
        pages: PageTable,
        model: LanguageModel,
        kernels: Kernels,
    ) -> None:
        self._pool = pool
        self._model = model
        self._config = config
        self._pages = pages
        self._kernels = kernels
        self._received: dict[int, _Received] = {}  # by table row

    def begin(self, rows: Sequence[Row], layout: StepLayout) -> Observation | None:
        """Before the step's layers are computed; None: there is nothing to select or look at."""
        for row in rows if self._received else ():
            received = self._received.get(row.table_row)
            if received is not None and received.request_id != row.request_id:
                del self._received[row.table_row]
        parts = [
            self._part(row, row.selection, int(end))
            for row, end in zip(rows, layout.query_start[1:], strict=True)
            if row.selection is not None
        ]
        return Observation(self._pool, self._config, self._kernels, parts) if parts else None

    def select(self, observation: Observation) -> None:
        """Once the layers are computed."""
        for part in observation.parts:
            if part.received is not None:
                part.received.end = len(part.slots)
            if not part.selection.pages:
                continue
            self._received.pop(part.table_row, None)
            for layer in range(len(self._config.attention_layers)):
                self._select(part, layer)

    def _part(self, row: Row, selection: Selection, end: int) -> _Part:
        num_tokens, page_size = row.known_end, self._pool.page_size
        pages = self._pages.entries[row.table_row, : -(-num_tokens // page_size)]
        slots = torch.from_numpy(slots_of(pages.tolist(), page_size)[:num_tokens])
        part = _Part(row.table_row, selection, slots, end - len(row.input_ids), end)
        if selection.policy.kind == "snapkv":
            part.first = end - selection.policy.window
            part.received = _Received(row.request_id)
        elif selection.policy.kind == "h2o":
            part.received = self._received.get(row.table_row)
            if part.received is None or part.received.end != row.start:  # it begins, or again
                part.received = self._received[row.table_row] = _Received(row.request_id)
        return part

    def _select(self, part: _Part, layer: int) -> None:
        selection, slots = part.selection, part.slots
        target = torch.from_numpy(slots_of(selection.pages, self._pool.page_size))
        policy, keep = selection.policy, len(target)
        if part.received is None:
            chosen = first_and_last(len(slots), keep, policy.sinks)[None]
        else:
            is_candidate = torch.ones(len(slots), dtype=torch.bool)
            if selection.candidates is not None:
                is_candidate[:] = False
                for first, end in selection.candidates:
                    is_candidate[first:end] = True
            attention = part.received.of[layer]
            chosen = most_attended(attention, is_candidate, keep, policy)
        self._copy(layer, slots[chosen], target)
        if policy.kind == "streaming":  # else they stay where they were
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


@dataclass(slots=True, eq=False)
class _Received:
    """The attention that a request's keys have had so far, of its tokens before `end`."""

    request_id: int
    end: int = -1
    of: dict[int, Tensor] = field(default_factory=dict)  # by layer: [num_kv_heads, C]

    def add(self, layer: int, attention: Tensor) -> None:
        """Of more keys than before, or as many."""
        before = self.of.get(layer)
        if before is not None:
            attention[:, : before.shape[1]] += before
        self.of[layer] = attention


@dataclass(slots=True, eq=False)
class _Part:
    """What a step looks at of one row, and selects."""

    table_row: int
    selection: Selection
    slots: Tensor  # [C], where the row's tokens are
    first: int  # of its queries that are looked at, on the token axis
    end: int
    received: _Received | None = None  # None: nobody looks at any


class Observation:
    """Looks at the queries of a step's rows while its layers are computed."""

    def __init__(
        self, pool: DeviceKVPool, config: ModelConfig, kernels: Kernels, parts: Sequence[_Part]
    ) -> None:
        self._observe = kernels.observe
        self.parts = parts
        self._pool = pool
        self._config = config

    def note(self, layer: int, queries: Tensor) -> None:
        """See `Observer`."""
        kind = self._config.layer_kinds[self._config.attention_layers[layer]]
        options = self._config.attention_kinds[kind]
        assert isinstance(options, AttentionOptions)
        for part in self.parts:
            if part.received is not None:
                keys = _numbers(self._pool.layers[layer], 0, part.slots)
                observed = self._observe(queries[part.first : part.end], keys, options)
                part.received.add(layer, observed)


def most_attended(attention: Tensor, is_candidate: Tensor, keep: int, policy: KVPolicy) -> Tensor:
    """SnapKV's and H2O's choice, ascending: the last `window` tokens and those that are no
    candidates, and of the others the ones with the most attention among `num_pooled` tokens around
    them; of equal ones the first.

    attention [num_kv_heads, C] (`observe`), is_candidate [C] bool -> [num_kv_heads, keep] int64.
    """
    num_kv_heads, num_tokens = attention.shape
    num_before = num_tokens - policy.window
    num_pooled = policy.num_pooled
    pooled = max_pool1d(attention[:, :num_before], num_pooled, stride=1, padding=num_pooled // 2)
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
