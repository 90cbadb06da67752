"""The layer of most families: attention and a feed-forward block, each behind a norm."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from .forward_batch import ForwardBatch
from .layers.build import ModelBuild
from .layers.norm import RMSNorm
from .layers.rotary import Rotary


class AttentionBlock(Protocol):
    def __call__(self, x: Tensor, rotary: Rotary, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size], rotary (cos, sin) each [T, 1, rotary_dim] -> [T, hidden_size]."""
        ...


class FeedForward(Protocol):
    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        ...


class PreNormLayer:
    """residual + attention(norm(residual)), and the same around the feed-forward block."""

    def __init__(
        self, build: ModelBuild, name: str, attention: AttentionBlock, feed_forward: FeedForward
    ) -> None:
        size = build.config.hidden_size
        self._input_norm = RMSNorm(build, f"{name}.input_layernorm", size)
        self._attention = attention
        self._middle_norm = RMSNorm(build, f"{name}.post_attention_layernorm", size)
        self._feed_forward = feed_forward

    def __call__(
        self, x: Tensor | None, residual: Tensor, rotary: Rotary, batch: ForwardBatch
    ) -> Tensor:
        """See `decoder.DecoderLayer`."""
        normed = self._input_norm(residual) if x is None else self._input_norm(x, residual)
        attended = self._attention(normed, rotary, batch)
        return self._feed_forward(self._middle_norm(attended, residual), batch)
