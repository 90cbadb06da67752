"""Attention of texts packed end to end: each token sees its own text, or a window of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .build import EncoderBuild
from .packed import Block, PackedTexts

# Queries that look at their common window at once: scores for what no query sees stay few.
_QUERIES = 128

Rotary = tuple[Tensor, Tensor]
"""cos, sin [T, 1, head_dim]"""


class Places(NamedTuple):
    """What a layer knows of where tokens are, if not by their embeddings."""

    rotary: Rotary | None
    biases: Mapping[int, Tensor]  # of scores, [num_heads, length, length] by length; none: no bias


class SelfAttention:
    """Of one layer: its projections and, where positions are rotary, their rotation."""

    def __init__(self, build: EncoderBuild, layer: str, index: int) -> None:
        config, names = build.config, build.config.names
        size = config.hidden_size
        self._num_heads, self._head_dim = config.num_heads, config.head_dim
        self._window = config.windows[index] if config.windows else None
        modules = [f"{layer}.{name}" for name in names.queries_keys_values]
        has_bias = config.has_attention_bias
        sizes = [3 * size // len(modules)] * len(modules)
        self._project = build.linear(modules, size, sizes, has_bias=has_bias)
        output = [f"{layer}.{names.attention_output}"]
        self._output = build.linear(output, size, [size], has_bias=has_bias)

    def __call__(self, x: Tensor, texts: PackedTexts, places: Places) -> Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        heads = self._project(x).view(len(x), 3, self._num_heads, self._head_dim)
        queries, keys, values = heads.unbind(1)
        if places.rotary is not None:
            queries, keys = rotated(queries, places.rotary), rotated(keys, places.rotary)
        attended = torch.empty_like(values, memory_format=torch.contiguous_format)
        for block in texts.blocks:
            own = slice(block.start, block.end)
            seen = _attend(
                self._of_texts(queries[own], block),
                self._of_texts(keys[own], block),
                self._of_texts(values[own], block),
                self._window,
                places.biases.get(block.length),
            )
            attended[own] = seen.transpose(1, 2).reshape(-1, self._num_heads, self._head_dim)
        return self._output(attended.view(len(x), -1))

    def _of_texts(self, heads: Tensor, block: Block) -> Tensor:
        """[tokens, heads, head_dim] -> [texts, heads, length, head_dim]."""
        shape = (block.num_texts, block.length, self._num_heads, self._head_dim)
        return heads.view(shape).transpose(1, 2)


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, window: int | None, bias: Tensor | None
) -> Tensor:
    """[texts, heads, length, head_dim] each; `window`: tokens that one sees to each side, without a
    bias; `bias`: [heads, length, length]."""
    length = queries.shape[2]
    if window is None or length <= window + 1:
        return F.scaled_dot_product_attention(queries, keys, values, bias)
    parts = []
    for start in range(0, length, _QUERIES):
        end = min(start + _QUERIES, length)
        first, last = max(0, start - window), min(length, end + window)
        at = torch.arange(start, end, device=queries.device)
        near = torch.arange(first, last, device=queries.device)
        is_seen = (at[:, None] - near[None, :]).abs() <= window
        seen = slice(first, last)
        parts.append(
            F.scaled_dot_product_attention(
                queries[:, :, start:end], keys[:, :, seen], values[:, :, seen], is_seen
            )
        )
    return torch.cat(parts, dim=2)


def rotated(heads: Tensor, rotary: Rotary) -> Tensor:
    """[T, heads, head_dim], halves of a head as pairs; rounded once."""
    cos, sin = rotary
    wide = heads.to(cos.dtype)
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-second, first), dim=-1) * sin).to(heads.dtype)


def rotary_at(positions: Tensor, theta: float, head_dim: int, dtype: torch.dtype) -> Rotary:
    """positions [T]; frequencies as transformers computes them, in float32."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    angles = positions[:, None].float() / theta ** (steps / head_dim)
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    wide = torch.promote_types(dtype, torch.float32)
    return angles.cos().to(wide), angles.sin().to(wide)
