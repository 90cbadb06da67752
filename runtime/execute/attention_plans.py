"""A step's attention plans, one for each kind of attention that the model's layers have."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...kernels.attention_options import AttentionOptions, LatentOptions
from ...kernels.attention_rows import AttentionRows
from ...kernels.ops import KVLayer
from ...kernels.registry import Kernels
from ..checkpoint.config.model_config import ModelConfig


def plan_attentions(
    kernels: Kernels,
    rows: AttentionRows,
    kv_layers: Sequence[KVLayer],
    config: ModelConfig,
    padded_tokens: int | None = None,
) -> tuple[object, ...]:
    """In the order of `config.attention_kinds`; see `ops.PlanAttention`."""
    return tuple(
        _plan(
            kernels, rows, kv_layers[config.layer_kinds.index(kind)], config, options, padded_tokens
        )
        for kind, options in enumerate(config.attention_kinds)
    )


def _plan(
    kernels: Kernels,
    rows: AttentionRows,
    kv_layer: KVLayer,
    config: ModelConfig,
    options: AttentionOptions | LatentOptions,
    padded_tokens: int | None,
) -> object:
    if isinstance(options, LatentOptions):
        assert isinstance(kv_layer, Tensor), "latents are not quantized"
        return kernels.plan_latent_attention(
            rows, kv_layer, config.num_heads, options.scale, padded_tokens
        )
    return kernels.plan_attention(rows, kv_layer, config.num_heads, options, padded_tokens)
