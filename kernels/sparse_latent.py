"""Latent attention of queries that attend to selected keys (DeepSeek-V3.2, section 2.1), made of
any backend's latent attention.

    whole queries    attend to all they see, as without selection
    sparse queries   attend to selected keys: each is a row of its own, whose page table is the
                     slots of its keys

A step without sparse queries is planned, and captured, as if there were no selection. The slots are
another layer's in each layer, so that a plan of a CPU is made once a layer; that of an accelerator
reads them from the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .attention_rows import AttentionRows
from .model_options import LatentOptions
from .ops import DeviceArrays, DevicePlan
from .registry import Kernels
from .sparse_rows import SomeRows, rows_of_selected, split_rows


@dataclass(slots=True)
class SparseLatentPlan:
    """A step with sparse queries, and what was selected last in it."""

    whole: object | None  # plan of `latent_attention`; None: all queries are sparse
    whole_tokens: Tensor  # [num_whole] int64, places on the token axis
    sparse_tokens: Tensor  # [num_sparse] int64
    selection: object  # plan of `select_keys` for the sparse queries
    of_slots: Callable[[Tensor], object]  # selected slots -> their plan of `latent_attention`
    selected: object | None = None  # such a plan


Queries = tuple[Tensor, Tensor]
"""q_latent and q_rope, as `ops.LatentAttention` takes them."""


def plan_latent_attention(
    kernels: Kernels,
    rows: AttentionRows,
    kv_layer: Tensor,
    num_heads: int,
    options: LatentOptions,
    padded_tokens: int | None = None,
) -> object:
    """The plan of `kernels.latent_attention`, or where some queries are sparse a SparseLatentPlan
    or a DevicePlan of one; see `ops.PlanLatentAttention`."""

    def plan(rows: AttentionRows, padded_tokens: int | None = None) -> object:
        return kernels.plan_latent_attention(
            rows, kv_layer, num_heads, options.scale, padded_tokens
        )

    if options.num_selected is None:
        return plan(rows, padded_tokens)
    whole, sparse = split_rows(rows, options.num_selected)
    if sparse is None:
        return plan(rows, padded_tokens)
    whole_plan = None if whole is None else plan(whole.rows)
    selection = kernels.plan_selection(sparse.rows, options.num_selected)
    if isinstance(selection, DevicePlan):
        unknown = np.broadcast_to(np.int32(0), (len(sparse.tokens), options.num_selected))
        selected = plan(rows_of_selected(unknown))
        return _on_device(whole, whole_plan, sparse, selection, selected)
    return SparseLatentPlan(
        whole_plan,
        torch.from_numpy(_tokens_of(whole)).to(kv_layer.device),
        torch.from_numpy(sparse.tokens).to(kv_layer.device),
        selection,
        lambda slots: plan(rows_of_selected(slots.cpu().numpy())),
    )


def latent_attention(
    kernels: Kernels,
    queries: Queries,
    kv_layer: Tensor,
    plan: object,
    select: Callable[[SparseLatentPlan], Tensor] | None = None,
) -> Tensor:
    """See `ops.LatentAttention`; select: gives the sparse queries' slots, as `ops.SelectKeys`;
    None: they are those of the call before."""
    if not isinstance(plan, SparseLatentPlan):
        return kernels.latent_attention(*queries, kv_layer, plan)
    q_latent, q_rope = queries
    out = torch.empty_like(q_latent, memory_format=torch.contiguous_format)

    def attend(tokens: Tensor, plan: object) -> None:
        own = q_latent.index_select(0, tokens), q_rope.index_select(0, tokens)
        out[tokens] = kernels.latent_attention(*own, kv_layer, plan)

    if plan.whole is not None:
        attend(plan.whole_tokens, plan.whole)
    if select is not None:
        plan.selected = plan.of_slots(select(plan))
    assert plan.selected is not None, "the first layer selects"
    attend(plan.sparse_tokens, plan.selected)
    return out


def _on_device(
    whole: SomeRows | None,
    whole_plan: object | None,
    sparse: SomeRows,
    selection: DevicePlan,
    selected: object,
) -> DevicePlan:
    parts = {"whole": whole_plan, "selection": selection, "selected": selected}
    plans = {name: plan for name, plan in parts.items() if isinstance(plan, DevicePlan)}
    arrays = {
        f"{name}.{own}": array for name, plan in plans.items() for own, array in plan.arrays.items()
    }
    arrays |= {"whole_tokens": _tokens_of(whole), "sparse_tokens": sparse.tokens}

    def bind(lists: DeviceArrays, page_table: Tensor) -> SparseLatentPlan:
        def bound(name: str, table: Tensor) -> object:
            plan = plans[name]
            return plan.bind({own: lists[f"{name}.{own}"] for own in plan.arrays}, table)

        return SparseLatentPlan(
            None if whole is None else bound("whole", page_table),
            lists["whole_tokens"],
            lists["sparse_tokens"],
            bound("selection", page_table),
            lambda slots: bound("selected", slots),
        )

    return DevicePlan(arrays, bind, is_replayable=False)


def _tokens_of(rows: SomeRows | None) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.zeros(0, dtype=np.int64) if rows is None else rows.tokens
