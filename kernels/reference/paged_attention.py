"""Paged attention, one row after the other over all of its KV, in plain torch: the truth.

Cost O(sum over rows of queries * keys), scores of a row at once in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention_rows import AttentionRows
from ..model_options import DEFAULT_OPTIONS, AttentionOptions
from ..ops import KVLayer
from ..quantized_tensors import QuantizedKV
from .dense import widen
from .kv_store import dequantized


@dataclass(frozen=True, slots=True)
class ReferenceAttentionPlan:
    """The step's rows, unchanged."""

    rows: AttentionRows
    options: AttentionOptions


def plan_attention(
    rows: AttentionRows,
    kv_layer: KVLayer,
    num_heads: int,
    options: AttentionOptions = DEFAULT_OPTIONS,
    padded_tokens: int | None = None,
) -> ReferenceAttentionPlan:
    return ReferenceAttentionPlan(rows, options)


def paged_attention(
    q: Tensor, kv_layer: KVLayer, plan: object, sink_logits: Tensor | None = None
) -> Tensor:
    assert isinstance(plan, ReferenceAttentionPlan), "the plan comes from this backend"
    rows = plan.rows
    out = torch.empty_like(q)
    for row in range(rows.num_rows):
        tokens = slice(int(rows.query_start[row]), int(rows.query_start[row + 1]))
        slots = torch.from_numpy(rows.slots(row, 0, int(rows.seq_lens[row]))).to(q.device)
        keys, values = _gather(kv_layer, slots)
        out[tokens] = _attend(q[tokens], keys, values, plan.options, sink_logits)
    return out


def _gather(kv_layer: KVLayer, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [KV, S, D] of S slots; quantized ones are dequantized in float32."""
    if isinstance(kv_layer, Tensor):
        keys, values = widen(kv_layer.index_select(2, slots)).unbind(0)
        return keys, values
    assert isinstance(kv_layer, QuantizedKV)
    found = dequantized(kv_layer.values[:, :, slots], kv_layer.scales[:, :, slots])
    keys, values = found.unbind(0)
    return keys, values


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions, sink_logits: Tensor | None
) -> Tensor:
    """q [L, H, D] at the last L of the S positions of keys, values [KV, S, D] -> [L, H, D]."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, num_keys, _ = keys.shape
    scale = head_dim**-0.5 if options.scale is None else options.scale
    grouped = widen(q).view(num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    keys, values = keys.to(grouped.dtype), values.to(grouped.dtype)
    scores = torch.einsum("lkgd,ksd->kgls", grouped, keys) * scale
    if options.soft_cap is not None:
        scores = options.soft_cap * torch.tanh(scores / options.soft_cap)
    is_hidden = ~_is_visible(num_queries, num_keys, options, q.device)
    scores = scores.masked_fill(is_hidden, -torch.inf)
    if sink_logits is not None:
        sinks = sink_logits.to(scores.dtype).view(num_kv_heads, -1, 1, 1)
        scores = torch.cat((scores, sinks.expand(*scores.shape[:3], 1)), dim=-1)
    probs = torch.softmax(scores, dim=-1)[..., :num_keys]
    out = torch.einsum("kgls,ksd->lkgd", probs, values)
    return out.reshape(num_queries, num_heads, head_dim).to(q.dtype)


def _is_visible(
    num_queries: int, num_keys: int, options: AttentionOptions, device: torch.device
) -> Tensor:
    """[L, S], for queries at the last L positions."""
    key = torch.arange(num_keys, device=device)
    query = key[num_keys - num_queries :, None]
    is_visible = key <= query
    if options.window is not None:
        is_visible &= (key > query - options.window) | (key < options.num_sink_tokens)
    if options.chunk is not None:
        is_visible &= key // options.chunk == query // options.chunk
    return is_visible
