"""Attention of prompts from their first token on through torch's fused kernels, where the rest of a
step goes through a backend's own.

What a sequence computes from its first token on attends to itself alone: a square below its
diagonal, which cuDNN and FlashAttention compute at their best, from keys and values that lie
together. These are gathered from the row's pages, work for n tokens beside work for n^2.

    a row of 5,000 tokens from position 0    |---------- 4,608 ----------|--- 392 ---|
                                               torch, causal               the backend's own kernel

cuDNN prepares a plan for every length that it meets, so only multiples of a unit go there, and what
is left of a row is a chunk behind them. Which tokens these are follows from the row's own lengths,
never from what else is in the step. Such steps are not captured: their lengths are no data.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from .attention_rows import AttentionRows, IntArray, no_segments
from .model_options import DEFAULT_OPTIONS, AttentionOptions
from .ops import DeviceArrays, DevicePlan, KVLayer
from .registry import KernelChoice, Kernels

log = logging.getLogger(__name__)

OP = "prefill_attention"  # as the doctor names it
UNIT_TOKENS = 512  # 64 lengths up to 32,768; what is left is at most a quarter of 2,048 (a guess)


class FusedAttention(Protocol):
    """A prompt's attention to itself, each token to those up to its own."""

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
        """q [1, num_heads, n, head_dim], keys and values [1, num_kv_heads, n, head_dim] -> as q.

        Raises RuntimeError where it refuses them.
        """
        ...


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    """Which of torch's kernels, and for which rows."""

    name: str  # "cuDNN"
    fused: FusedAttention
    min_tokens: int  # of a row
    unit_tokens: int = UNIT_TOKENS

    def beyond(self, num_tokens: int) -> PrefillChoice:
        """The same for rows of more than `num_tokens`."""
        return replace(self, min_tokens=max(self.min_tokens, num_tokens + 1))


def with_prefill_attention(kernels: Kernels, choice: PrefillChoice) -> Kernels:
    """The kernels of an accelerator, with attention that is torch's for rows of at least
    `choice.min_tokens` tokens from position 0, in layers that are plain (`is_plain`), over plain
    KV. Not for models with sink logits."""
    prefill = _PrefillAttention(kernels, choice)
    reason = f"{choice.name}, of prompts from {choice.min_tokens} tokens on"
    return replace(
        described(kernels, "torch", reason),
        plan_attention=prefill.plan,
        paged_attention=prefill.attend,
    )


def is_plain(options: AttentionOptions) -> bool:
    """Whether nothing but the diagonal hides or changes a whole prompt's scores."""
    return options.window is None and options.chunk is None and options.soft_cap is None


def described(kernels: Kernels, implementation: str, reason: str) -> Kernels:
    """The same kernels, of whose attention of prompts something else is told."""
    choices = tuple(
        KernelChoice(OP, implementation, reason) if choice.op == OP else choice
        for choice in kernels.choices
    )
    return replace(kernels, choices=choices)


@dataclass(frozen=True, slots=True)
class _Beginning:
    """A row's tokens that torch's kernel attends with, on the step's token axis."""

    first: int
    rows: AttentionRows  # they alone

    @property
    def num_tokens(self) -> int:
        return int(self.rows.seq_lens[0])

    @property
    def end(self) -> int:
        return self.first + self.num_tokens


@dataclass(frozen=True, slots=True)
class _Plan:
    """Of a step with beginnings, in the order of their tokens."""

    beginnings: tuple[_Beginning, ...]
    others: tuple[slice, ...]  # the tokens between them
    rest: object | None  # the backend's plan of these; None: there are none
    page_table: Tensor
    options: AttentionOptions


class _PrefillAttention:
    """The two ops. Owns which lengths torch has refused."""

    def __init__(self, kernels: Kernels, choice: PrefillChoice) -> None:
        self._plan = kernels.plan_attention
        self._attend = kernels.paged_attention
        self._choice = choice
        # (query heads, KV heads, head_dim, tokens): from the first refusal on these are not asked
        # for again, so that every row of such a length has the same bits.
        self._refused: set[tuple[int, int, int, int]] = set()

    def plan(
        self,
        rows: AttentionRows,
        kv_layer: KVLayer,
        num_heads: int,
        options: AttentionOptions = DEFAULT_OPTIONS,
        padded_tokens: int | None = None,
    ) -> object:
        """See `ops.PlanAttention`."""
        begun = self._begun(rows, kv_layer, num_heads, options)
        if not begun.any():
            return self._plan(rows, kv_layer, num_heads, options, padded_tokens)
        beginnings = tuple(_beginnings(rows, begun))
        others = tuple(_between(beginnings, int(rows.query_start[-1])))
        inner: DevicePlan | None = None
        if others:
            inner = self._plan_of(_without(rows, begun), kv_layer, num_heads, options)

        def bind(lists: DeviceArrays, page_table: Tensor) -> _Plan:
            rest = None if inner is None else inner.bind(lists, page_table)
            return _Plan(beginnings, others, rest, page_table, options)

        return DevicePlan({} if inner is None else inner.arrays, bind, is_replayable=False)

    def attend(
        self, q: Tensor, kv_layer: KVLayer, plan: object, sink_logits: Tensor | None = None
    ) -> Tensor:
        """See `ops.PagedAttention`."""
        if not isinstance(plan, _Plan):
            return self._attend(q, kv_layer, plan, sink_logits)
        assert sink_logits is None, "torch's kernels know of none"
        assert isinstance(kv_layer, Tensor)
        if plan.rest is None and len(plan.beginnings) == 1:
            return self._attend_beginning(q, kv_layer, plan, plan.beginnings[0])
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for one in plan.beginnings:
            tokens = slice(one.first, one.end)
            out[tokens] = self._attend_beginning(q[tokens], kv_layer, plan, one)
        if plan.rest is not None:
            queries = [q[tokens] for tokens in plan.others]
            together = queries[0] if len(queries) == 1 else torch.cat(queries)
            found = self._attend(together, kv_layer, plan.rest)
            first = 0
            for tokens, own in zip(plan.others, queries, strict=True):
                out[tokens] = found[first : first + len(own)]
                first += len(own)
        return out

    def _plan_of(
        self, rows: AttentionRows, kv_layer: KVLayer, num_heads: int, options: AttentionOptions
    ) -> DevicePlan:
        """The backend's own."""
        plan = self._plan(rows, kv_layer, num_heads, options)
        assert isinstance(plan, DevicePlan), "an accelerator's"
        return plan

    def _begun(
        self, rows: AttentionRows, kv_layer: KVLayer, num_heads: int, options: AttentionOptions
    ) -> IntArray:
        """How many tokens of each row torch attends with, [num_rows]."""
        choice, begun = self._choice, np.zeros(rows.num_rows, dtype=np.int32)
        if not (is_plain(options) and isinstance(kv_layer, Tensor)):
            return begun
        lengths = rows.num_queries
        is_taken = (lengths == rows.seq_lens) & (lengths >= choice.min_tokens)
        begun[is_taken] = lengths[is_taken] // choice.unit_tokens * choice.unit_tokens
        for row in np.flatnonzero(begun):
            if self._shape_of(kv_layer, num_heads, int(begun[row])) in self._refused:
                begun[row] = 0
        return begun

    def _attend_beginning(
        self, q: Tensor, kv_layer: Tensor, plan: _Plan, one: _Beginning
    ) -> Tensor:
        """q [one.num_tokens, num_heads, head_dim] -> the same."""
        shape = self._shape_of(kv_layer, q.shape[1], one.num_tokens)
        if shape not in self._refused:
            try:
                return attend_whole(
                    q, kv_layer, plan.page_table, one.rows, self._choice.fused, plan.options.scale
                )
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as refusal:
                log.warning(
                    "%s refuses prompts of %d tokens, which are computed without it from now on: "
                    "%s", self._choice.name, one.num_tokens, str(refusal).partition("\n")[0],
                )  # fmt: skip
                self._refused.add(shape)
        own = self._plan_of(one.rows, kv_layer, q.shape[1], plan.options)
        lists = {name: torch.from_numpy(x).to(q.device) for name, x in own.arrays.items()}
        return self._attend(q, kv_layer, own.bind(lists, plan.page_table))

    def _shape_of(
        self, kv_layer: Tensor, num_heads: int, num_tokens: int
    ) -> tuple[int, int, int, int]:
        return num_heads, kv_layer.shape[1], kv_layer.shape[3], num_tokens


def attend_whole(
    q: Tensor,
    kv_layer: Tensor,
    page_table: Tensor,
    rows: AttentionRows,
    fused: FusedAttention,
    scale: float | None = None,
) -> Tensor:
    """q [n, num_heads, head_dim] of the one row, whose n tokens are all that it sees -> the same.

    Raises RuntimeError where the kernel refuses it.
    """
    _, num_kv_heads, num_slots, head_dim = kv_layer.shape
    page_size = rows.page_size
    pages = page_table[int(rows.table_rows[0]), : -(-len(q) // page_size)]
    by_page = kv_layer.view(2, num_kv_heads, num_slots // page_size, page_size * head_dim)
    gathered = by_page.index_select(2, pages).view(2, 1, num_kv_heads, -1, head_dim)
    keys, values = gathered[:, :, :, : len(q)].unbind(0)
    out = fused(q.transpose(0, 1)[None], keys, values, scale)
    return out[0].transpose(0, 1).contiguous()  # as a rule it is


# NOTE: what torch's public function calls, since which kernel that takes is a setting of the whole
# process: other threads' attention (an encoder's, on a CPU) would fail while it is changed.
def cudnn_attention(q: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
    """`FusedAttention` by cuDNN."""
    _require(torch.backends.cuda.can_use_cudnn_attention, q, keys, values)
    run = torch.ops.aten._scaled_dot_product_cudnn_attention
    out: Tensor = run(q, keys, values, None, False, is_causal=True, scale=scale)[0]
    return out


def flash_attention(q: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
    """`FusedAttention` by torch's flash attention."""
    _require(torch.backends.cuda.can_use_flash_attention, q, keys, values)
    run = torch.ops.aten._scaled_dot_product_flash_attention
    out: Tensor = run(q, keys, values, is_causal=True, scale=scale)[0]
    return out


def _require(
    can_use: Callable[[torch.backends.cuda.SDPAParams, bool], bool],
    q: Tensor,
    keys: Tensor,
    values: Tensor,
) -> None:
    """Raises RuntimeError unless it says so; torch's own lines on stderr have the reasons."""
    has_groups = q.shape[1] != keys.shape[1]
    params = torch.backends.cuda.SDPAParams(q, keys, values, None, 0.0, True, has_groups)
    if not can_use(params, False):
        can_use(params, True)
        raise RuntimeError("torch does not allow it here, for the reasons above, if it gave any")


def _beginnings(rows: AttentionRows, begun: IntArray) -> Iterator[_Beginning]:
    for row in np.flatnonzero(begun):
        num_tokens = begun[row]
        alone = replace(
            rows,
            query_start=np.array([0, num_tokens], dtype=np.int32),
            seq_lens=np.array([num_tokens], dtype=np.int32),
            table_rows=rows.table_rows[row : row + 1],
            segments=no_segments(),
        )
        yield _Beginning(int(rows.query_start[row]), alone)


def _between(beginnings: tuple[_Beginning, ...], num_tokens: int) -> Iterator[slice]:
    """The tokens of a step that are in none of them."""
    first = 0
    for start, end in [(one.first, one.end) for one in beginnings] + [(num_tokens, num_tokens)]:
        if start > first:
            yield slice(first, start)
        first = end


def _without(rows: AttentionRows, begun: IntArray) -> AttentionRows:
    """The rows without their first `begun` [num_rows] tokens, whose KV the others see; those that
    have none left are not among them. Rows that begin are in no segment: nothing is before them."""
    left = rows.num_queries - begun
    is_left = left > 0
    num_before = np.concatenate([[0], np.cumsum(is_left)]).astype(np.int32)
    segments = rows.segments.copy()
    segments[:, 2:] = num_before[segments[:, 2:]]
    return replace(
        rows,
        query_start=np.concatenate([[0], np.cumsum(left[is_left])]).astype(np.int32),
        seq_lens=rows.seq_lens[is_left],
        table_rows=rows.table_rows[is_left],
        segments=segments,
    )
