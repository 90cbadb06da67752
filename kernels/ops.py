"""The contract of every op: what each implementation takes, returns and changes.

Ops with weights come in two parts: `make_*` prepares the weights once at load (packing, folding),
the object it returns runs every step. T is the number of tokens in the step. All tensors of a call
share one dtype (float64, float32, bfloat16 or float16) and one device unless said otherwise.

    kv_layer  [2, num_kv_heads, num_slots, head_dim]   one layer's KV; [0] keys, [1] values
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from .attention_rows import AttentionRows


class Linear(Protocol):
    """y = x @ weight.T + bias."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in_features] -> [T, out_features], a new tensor."""
        ...


class RMSNorm(Protocol):
    """y = x / sqrt(mean(x^2) + eps) * weight, the mean in float32 or better."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[T, hidden_size] -> [T, hidden_size], a new tensor; x is left as it is.

        With `residual` [T, hidden_size], adds x to it IN PLACE and returns the norm of the sum.
        """
        ...


class MakeLinear(Protocol):
    def __call__(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """weight [out_features, in_features], bias [out_features]; may keep or copy them."""
        ...


class MakeOutputLinear(Protocol):
    def __call__(self, weight: Tensor) -> Linear:
        """weight [vocab_size, hidden_size] -> a linear whose result is float32, or float64 for
        float64."""
        ...


class MakeGatedLinear(Protocol):
    def __call__(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """weight [2 * size, in_features], gates first, bias [2 * size] -> a layer
        silu(x @ gate.T) * (x @ up.T), [T, in_features] -> [T, size]."""
        ...


class MakeRMSNorm(Protocol):
    def __call__(self, weight: Tensor, eps: float) -> RMSNorm:
        """weight [hidden_size]."""
        ...


class GatherRows(Protocol):
    def __call__(self, table: Tensor, index: Tensor) -> Tensor:
        """table [N, ...] contiguous, index [T] int64 in [0, N) -> [T, ...], a new tensor."""
        ...


class RotateAndStore(Protocol):
    def __call__(
        self, heads: Tensor, cos: Tensor, sin: Tensor, kv_layer: Tensor, slots: Tensor
    ) -> None:
        """Rotate queries and keys by their positions and write keys and values to their slots.

        heads [T, num_heads + 2 * num_kv_heads, head_dim], contiguous: queries, keys, values. The
        queries are rotated IN PLACE; what becomes of the rest of `heads` is open. `slots` [T]
        int64, distinct: rows of kv_layer.

        Hugging Face's half rotation: with d = head_dim / 2, (a, b) = (head[:d], head[d:]) becomes
        (a cos - b sin, b cos + a sin). cos, sin: [T, 1, head_dim], `sin` with its first half
        NEGATED (so that a kernel is one rotate, one product and one fused product-sum).
        """
        ...


class PlanAttention(Protocol):
    def __call__(self, rows: AttentionRows, kv_layer: Tensor, num_heads: int) -> object:
        """What `paged_attention` of the same backend needs to know of a step; made once a step.

        kv_layer: any layer's, for its shape, which all layers share; num_heads of the queries.
        """
        ...


class PagedAttention(Protocol):
    def __call__(self, q: Tensor, kv_layer: Tensor, plan: object) -> Tensor:
        """q [T, num_heads, head_dim] -> [T, num_heads, head_dim], scaled by head_dim ** -0.5.

        Query head h reads KV head h // (num_heads / num_kv_heads). Softmax in float32 or better.
        The step's own KV is stored already. Slots past a row's end are never read.
        """
        ...


class ApplyTokenMask(Protocol):
    def __call__(self, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
        """Set the logits of tokens that may not be sampled to -inf, IN PLACE; other rows stay.

        logits [N, vocab_size] float32 or float64, contiguous; rows [K] int64, distinct; masks
        [K, ceil(vocab_size / 32)] int32, contiguous: bit i % 32 of word i // 32 allows token i.
        """
        ...


class Captured(Protocol):
    """A forward pass over fixed tensors, recorded once to be run again at less cost."""

    result: Tensor  # what the pass returned; overwritten by each replay

    def replay(self, plan: object) -> None:
        """Run it again; `plan` of this step, the tensors that it read hold this step's values."""
        ...


class Capture(Protocol):
    def __call__(self, run: Callable[[], Tensor]) -> tuple[Tensor, Captured | None]:
        """Run once and record; None where `run` does something that cannot be recorded."""
        ...
