"""RMSNorm with its weight, of a hidden state or of the heads before their rotation."""

from __future__ import annotations

import torch
from torch import Tensor

from .build import ModelBuild


class RMSNorm:
    """x / rms(x) * weight; with a residual, adds x to it in place first."""

    def __init__(self, build: ModelBuild, name: str, size: int) -> None:
        self._run = build.kernels.make_rms_norm(
            _weight(build, name, size), build.config.rms_norm_eps
        )

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[T, size] -> [T, size]; `residual` [T, size] becomes residual + x."""
        return self._run(x, residual)


class QueryKeyNorm:
    """Norms by the config's `query_key_norm`: each query head and each key head by itself, or
    all heads of a token as one vector."""

    def __init__(self, build: ModelBuild, name: str) -> None:
        """name: the attention block's."""
        config = build.config
        is_whole = config.query_key_norm == "whole"
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        sizes = (num_heads, num_kv_heads) if is_whole else (1, 1)
        parts = (config.names.query_norm, config.names.key_norm)
        query_weight, key_weight = (
            _weight(build, f"{name}.{part}", size * config.head_dim)
            for part, size in zip(parts, sizes, strict=True)
        )
        self._run = build.kernels.make_query_key_norm(
            query_weight, key_weight, num_heads, num_kv_heads, config.rms_norm_eps
        )

    def __call__(self, heads: Tensor) -> None:
        """heads [T, num_heads + 2 * num_kv_heads, head_dim]: queries and keys, IN PLACE."""
        self._run(heads)


def _weight(build: ModelBuild, name: str, size: int) -> Tensor:
    """1 + weight is computed in float32: 8 bits of mantissa would lose most of a small weight
    beside the 1."""
    weight = build.source.take(f"{name}.weight", (size,))
    if not build.config.has_unit_offset_norms:
        return weight
    return weight.to(torch.promote_types(weight.dtype, torch.float32)) + 1
