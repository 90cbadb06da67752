"""A layer of Llama as plain torch, whose passes follow each other as a draft's guesses do.

In the first pass all tokens are as the model had them. In pass n a token stands for the n-th guess
of a draft: what it attends to is a token of pass n - 1 right before it, one of pass n - 2 before
that, and of the first pass what is n or more before it (the training-time test of EAGLE-3, Li et
al. 2025, arXiv:2503.01840, 3.1), so that a few passes over a text compute all of its drafts.

    pass 0    0  1  2  3  4        token 4 of pass 2 sees
    pass 1    .  1  2  3  4        0 1 2 of pass 0, 3 of pass 1, itself
    pass 2    .  .  2  3  4
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NORM_EPS = 1e-5
ROPE_THETA = 10000.0


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Of a layer and what is around it."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int

    @classmethod
    def of_width(cls, hidden_size: int) -> LayerShape:
        """Heads of 64 where they fit, two of them to a head of KV."""
        head_dim = next(size for size in (64, 32, 16, hidden_size) if hidden_size % size == 0)
        num_heads = hidden_size // head_dim
        num_kv_heads = num_heads // 2 if num_heads % 2 == 0 else num_heads
        return cls(hidden_size, num_heads, num_kv_heads, head_dim, hidden_size)


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, NORM_EPS)


class Layer(nn.Module):
    """Its parameters have a checkpoint's names, of `layers.0`."""

    def __init__(self, shape: LayerShape, *, has_input_norm: bool) -> None:
        super().__init__()
        self.shape = shape
        size, dim = shape.hidden_size, shape.head_dim
        self.input_layernorm = Norm(size) if has_input_norm else None
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(size, shape.num_heads * dim, bias=False),
                "k_proj": nn.Linear(size, shape.num_kv_heads * dim, bias=False),
                "v_proj": nn.Linear(size, shape.num_kv_heads * dim, bias=False),
                "o_proj": nn.Linear(shape.num_heads * dim, size, bias=False),
            }
        )
        self.post_attention_layernorm = Norm(size)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(size, shape.intermediate_size, bias=False),
                "up_proj": nn.Linear(size, shape.intermediate_size, bias=False),
                "down_proj": nn.Linear(shape.intermediate_size, size, bias=False),
            }
        )

    def forward(self, x: Tensor, before: list[tuple[Tensor, Tensor]]) -> Tensor:
        """x [B, T, hidden_size] of a pass -> the same shape. before: keys and values of the passes
        before it, to which its own are added."""
        normed = x if self.input_layernorm is None else self.input_layernorm(x)
        x = x + self._attended(normed, before)
        normed = self.post_attention_layernorm(x)
        mlp = self.mlp
        gated = F.silu(mlp["gate_proj"](normed)) * mlp["up_proj"](normed)
        output: Tensor = x + mlp["down_proj"](gated)
        return output

    def _attended(self, x: Tensor, before: list[tuple[Tensor, Tensor]]) -> Tensor:
        shape, attention = self.shape, self.self_attn
        size, length = x.shape[:2]
        cos, sin = _rotary(length, shape.head_dim)
        group = shape.num_heads // shape.num_kv_heads
        q, k, v = (
            attention[f"{name}_proj"](x).view(size, length, -1, shape.head_dim).transpose(1, 2)
            for name in "qkv"
        )
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        before.append((k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
        num_pass = len(before) - 1
        first_k, first_v = before[0]
        order = torch.arange(length)
        is_seen = order[:, None] - num_pass >= order[None, :]
        scores = [(q @ first_k.transpose(2, 3)).masked_fill(~is_seen, -torch.inf)]
        own = before[:0:-1]  # its own pass, the one before it, ...
        for distance, (keys, _) in enumerate(own):
            near = (q * _shifted(keys, distance)).sum(-1, keepdim=True)
            scores.append(near.masked_fill(order[:, None] < distance, -torch.inf))
        weights = torch.cat(scores, -1).mul(shape.head_dim**-0.5).softmax(-1)
        attended = weights[..., :length] @ first_v
        for distance, (_, values) in enumerate(own):
            share = weights[..., length + distance : length + distance + 1]
            attended = attended + share * _shifted(values, distance)
        merged = attended.transpose(1, 2).reshape(size, length, -1)
        output: Tensor = attention["o_proj"](merged)
        return output


def _shifted(x: Tensor, distance: int) -> Tensor:
    """[..., T, D]: of each token what is so far before it, else zeros."""
    return F.pad(x, (0, 0, distance, 0))[..., : x.shape[-2], :]


def _rotary(length: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """[T, head_dim] each."""
    half = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    angles = torch.arange(length).float()[:, None] / ROPE_THETA**half
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
