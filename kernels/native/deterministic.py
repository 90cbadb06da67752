"""Kernels by which a row's result depends on that row alone: not on its batch, on chunks of its
prompt, on what was cached or shared, or on the number of threads. For bfloat16 and float32.

    linears             the compiled ones sum each output in one order for any number of rows
    attention           a fixed plan (paged_attention.py): nothing shared, nothing split
    adapters            runs of any length by the compiled kernel
    norms and the rest  row by row in any case

What only torch's products could compute, whose order of summing depends on the number of rows, is
refused when the model is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import InvalidRequest
from ..attention_rows import AttentionRows
from ..model_options import DEFAULT_OPTIONS, AttentionOptions
from ..ops import (
    Activation,
    GatedLinearWithLora,
    HeadLinear,
    KVLayer,
    Linear,
    Lora,
    OutputLinear,
    Weight,
)
from ..quantized_tensors import QuantizedWeight, head_dim_of
from . import latent_attention, linear, paged_attention, quantized_linear
from . import lora as low_rank

SEGMENT_COST_TOKENS = 1 << 30  # no segment is used
_HEAD_DIM_STEP = 16


class FixedLinears:
    """Makes linear layers for x of one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def make_linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        self._require_packed(weight)
        return linear.make_linear(weight, bias)

    def make_output_linear(self, weight: Weight) -> OutputLinear:
        self._require_packed(weight)
        return linear.make_output_linear(weight)

    def make_gated_linear(
        self, weight: Weight, bias: Tensor | None, activation: Activation = "silu"
    ) -> Linear:
        self._require_packed(weight)
        return linear.make_gated_linear(weight, bias, activation)

    def make_gated_linear_with_lora(
        self, weight: Weight, bias: Tensor | None, activation: Activation, lora: Lora
    ) -> GatedLinearWithLora:
        self._require_packed(weight)
        return linear.make_gated_linear_with_lora(weight, bias, activation, lora)

    def make_head_linear(self, weight: Tensor) -> HeadLinear:
        heads = [self.make_linear(head.T.contiguous(), None) for head in weight]

        def head_linear(x: Tensor) -> Tensor:
            return torch.stack([run(x[:, head]) for head, run in enumerate(heads)], 1)

        return head_linear

    def _require_packed(self, weight: Weight) -> None:
        if not isinstance(weight, QuantizedWeight):
            if not linear.can_pack(weight):
                raise refusal(f"an even number of inputs a layer (here {weight.shape[1]})")
            return
        if self._dtype is not torch.bfloat16:
            raise refusal(f"dtype=bfloat16 for quantized weights (here {self._dtype})")
        if not quantized_linear.can_pack(weight):
            raise refusal(
                "quantized weights whose inputs and groups are multiples of 16 "
                f"(here {weight.in_features} and {weight.group_size})"
            )


def make_lora(a: Tensor, b: Tensor, out_features: Sequence[int]) -> Lora:
    if not low_rank.can_run(b, out_features):
        raise refusal(f"adapters of an even rank in bfloat16 (here {b.shape[2]} in {b.dtype})")
    return low_rank.make_lora(a, b, out_features)


def plan_attention(
    rows: AttentionRows,
    kv_layer: KVLayer,
    num_heads: int,
    options: AttentionOptions = DEFAULT_OPTIONS,
    padded_tokens: int | None = None,
) -> object:
    _require_head_dim("head_dim", head_dim_of(kv_layer))
    return paged_attention.plan_fixed_attention(rows, kv_layer, num_heads, options)


def plan_latent_attention(
    rows: AttentionRows,
    kv_layer: Tensor,
    num_heads: int,
    scale: float,
    padded_tokens: int | None = None,
) -> object:
    _require_head_dim("kv_lora_rank + qk_rope_head_dim", kv_layer.shape[-1])
    return latent_attention.plan_latent_attention(rows, kv_layer, num_heads, scale)


def refusal(needed: str) -> InvalidRequest:
    """The error of a model, or of a machine, that lacks what is needed."""
    return InvalidRequest.of("deterministic", True, f"only with {needed}")


def _require_head_dim(name: str, head_dim: int) -> None:
    if head_dim % _HEAD_DIM_STEP:
        raise refusal(f"{name} a multiple of {_HEAD_DIM_STEP} (here {head_dim})")
