"""RMSNorm and LayerNorm with their weights, of a hidden state or of the heads before their
rotation."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ....kernels.ops import RMSNorm as RMSNormKernel
from ....kernels.reference.dense import placed, widen
from ...checkpoint.parts import Range
from .build import ModelBuild
from .ranks import head_share
from .rotary import halves_apart


class Norm(Protocol):
    """Of hidden states."""

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """[T, size] -> [T, size], `out` or a new tensor; `residual` [T, size] becomes residual + x,
        which is normed."""
        ...


def norm_of(build: ModelBuild, name: str, size: int) -> Norm:
    """The norm that the config names."""
    return (LayerNorm if build.config.norm == "layer" else RMSNorm)(build, name, size)


def wide_rms_norm(build: ModelBuild, name: str, size: int) -> RMSNormKernel:
    """RMSNorm by weights in float32 or better, rounded once."""
    wide = torch.promote_types(build.dtype, torch.float32)
    weight = build.source.take(f"{name}.weight", (size,), wide)
    return build.kernels.make_rms_norm(weight, build.config.rms_norm_eps)


def query_key_norm_of(
    build: ModelBuild, name: str, layer_index: int
) -> QueryKeyNorm | HeadLayerNorm | None:
    """The config's norm of queries and keys, if the layer has one; name: the attention block's."""
    kind = build.config.query_key_norm
    if kind is None or (kind == "unit" and layer_index in build.config.layers_without_rope):
        return None
    return (HeadLayerNorm if kind == "layer" else QueryKeyNorm)(build, name)


class RMSNorm:
    """x / rms(x) * weight; with a residual, adds x to it in place first."""

    def __init__(self, build: ModelBuild, name: str, size: int) -> None:
        self.weight, self.eps = _weight(build, name, size), build.config.rms_norm_eps
        self._run = build.kernels.make_rms_norm(self.weight, self.eps)

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """See `Norm`."""
        return self._run(x, residual, out)


class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * weight + bias (Ba et al. 2016); with a residual, adds x
    to it in place first."""

    def __init__(self, build: ModelBuild, name: str, size: int) -> None:
        # Of LayerNorm the sum is in the model's dtype, as in Hugging Face.
        self._weight = _weight(build, name, size).to(build.dtype)
        self._bias: Tensor | None = None
        if build.config.has_norm_bias:
            self._bias = build.source.take(f"{name}.bias", (size,))
        self._eps = build.config.rms_norm_eps
        self._add = build.kernels.add_in_place

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """See `Norm`."""
        if residual is not None:
            self._add(residual, x)
            x = residual
        y = F.layer_norm(x, x.shape[-1:], self._weight, self._bias, self._eps)
        return placed(y, out)


class HeadLayerNorm:
    """LayerNorm of each query head and each key head, with weights of its own and no bias."""

    def __init__(self, build: ModelBuild, name: str) -> None:
        """name: the attention block's."""
        config = build.config
        share = head_share(config, build.ranks)
        query, key = (f"{name}.{norm}" for norm in (config.names.query_norm, config.names.key_norm))
        weights = torch.cat(
            [
                _head_weights(build, query, config.num_heads, share.heads),
                _head_weights(build, key, config.num_kv_heads, share.kv_heads),
            ]
        )
        if config.has_interleaved_rope:  # as the heads are
            weights = weights[:, halves_apart(1, config.head_dim, config.rotary_dim)]
        self._weights = widen(weights)
        self._eps = config.rms_norm_eps

    def __call__(self, heads: Tensor) -> None:
        """heads [T, num_heads + 2 * num_kv_heads, head_dim]: queries and keys, IN PLACE."""
        normed = heads[:, : len(self._weights)]
        wide = F.layer_norm(widen(normed), normed.shape[-1:], eps=self._eps)
        normed.copy_(wide * self._weights)


class QueryKeyNorm:
    """Norms by the config's `query_key_norm`: each query head and each key head by itself, with
    or without weights, or all heads of a token as one vector."""

    def __init__(self, build: ModelBuild, name: str) -> None:
        """name: the attention block's."""
        config = build.config
        is_whole = config.query_key_norm == "whole"
        share = head_share(config, build.ranks)
        num_heads, num_kv_heads = share.num_heads, share.num_kv_heads
        sizes = (num_heads, num_kv_heads) if is_whole else (1, 1)
        parts = (config.names.query_norm, config.names.key_norm)
        if config.query_key_norm == "unit":
            ones = torch.ones(config.head_dim, dtype=build.dtype, device=build.device)
            query_weight = key_weight = ones
        else:
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


def _head_weights(build: ModelBuild, name: str, num_heads: int, share: Range) -> Tensor:
    """[those of a share, head_dim], stored so or head by head."""
    head_dim = build.config.head_dim
    if "{}" not in name:
        return build.source.take_rows(f"{name}.weight", (num_heads, head_dim), [share])
    names = [f"{name.format(head)}.weight" for head in range(*share)]
    stacked = build.source.take_stacked(names, [(head_dim,)] * len(names))
    for head in range(num_heads):
        build.source.skip(f"{name.format(head)}.weight")  # other ranks have them
    return stacked.view(-1, head_dim)


def _weight(build: ModelBuild, name: str, size: int) -> Tensor:
    """1 + weight is computed in float32: 8 bits of mantissa would lose most of a small weight
    beside the 1."""
    weight = build.source.take(f"{name}.weight", (size,))
    if not build.config.has_unit_offset_norms:
        return weight
    return weight.to(torch.promote_types(weight.dtype, torch.float32)) + 1
