"""The vision towers of Qwen2.5-VL and Qwen3-VL, in plain torch.

An image is encoded in steps of whole blocks, so that an engine can compute other rows between them.
Each image is encoded alone: its features depend on nothing else.

    patches -> embed -> block 0 -> block 1 -> ... -> merge        -> features of the tokens
                            \\-> merge (deepstack)                 -> added behind decoder layer i
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from ...checkpoint.config.vision_config import VisionConfig
from ..layers.build import ModelBuild
from .geometry import Grid, learned_positions, places, rotary_angles, window_order

_EPS = 1e-6  # of all norms of both towers

Map = Callable[[Tensor], Tensor]


@dataclass(slots=True, eq=False)
class Encoding:
    """An image on its way. `next_block` blocks of it are done."""

    grid: Grid
    hidden: Tensor  # [N, C] patches, window by window where the tower has windows
    cos: Tensor  # [N, 1, head_dim]
    sin: Tensor
    order: Tensor | None  # of tokens, if not row by row
    window_lengths: Sequence[int]  # patches
    next_block: int = 0
    deepstack: list[Tensor] = field(default_factory=list)


class VisionTower:
    """Owns the tower's weights; immutable after construction."""

    def __init__(self, build: ModelBuild, config: VisionConfig) -> None:
        self.config = config
        self._dtype, self._device = build.dtype, build.device
        weights = _Weights(build, config.weight_prefix)
        is_third = config.kind == "qwen3_vl"
        size, merged = config.hidden_size, config.hidden_size * config.merge_size**2
        shape = (size, 3, config.temporal_patch_size, config.patch_size, config.patch_size)
        self._patch_weight = weights.take("patch_embed.proj.weight", shape).view(size, -1)
        self._patch_bias = weights.take("patch_embed.proj.bias", (size,)) if is_third else None
        self._positions: Tensor | None = None
        if config.positions_per_side is not None:
            positions = (config.positions_per_side**2, size)
            self._positions = weights.take("pos_embed.weight", positions)
        self._blocks = [
            _Block(weights, f"blocks.{index}.", config) for index in range(config.num_blocks)
        ]
        if is_third:
            self._merge: Map = _third_merger(weights, "merger.", config, size)
            self._deepstack = [
                _third_merger(weights, f"deepstack_merger_list.{index}.", config, merged)
                for index in range(len(config.deepstack_blocks))
            ]
        else:
            self._merge, self._deepstack = _second_merger(weights, "merger.", config), []

    def begin(self, patches: Tensor, grid: Grid) -> Encoding:
        """patches [N, patch_dim] float32, in the order of `geometry.places`."""
        config = self.config
        hidden = functional.linear(
            patches.to(self._device, self._dtype), self._patch_weight, self._patch_bias
        )
        at = places(grid, config.merge_size)
        if self._positions is not None:
            assert config.positions_per_side is not None
            side = config.positions_per_side
            hidden = hidden + learned_positions(at, grid, self._positions, side)
        order, lengths = None, [grid.num_patches]
        if config.window_size is not None:
            unit = config.merge_size**2
            window = config.window_size // config.merge_size // config.patch_size
            order, counts = window_order(grid, config.merge_size, window)
            hidden, at = _ordered(hidden, order, unit), _ordered(at, order, unit)
            lengths = [count * unit for count in counts]
        angles = rotary_angles(at, config.head_dim, config.rope_theta)
        wide = torch.promote_types(self._dtype, torch.float32)
        cos, sin = (
            turned.repeat(1, 2)[:, None].to(wide) for turned in (angles.cos(), angles.sin())
        )
        return Encoding(grid, hidden, cos, sin, order, lengths)

    def advance(self, encoding: Encoding, num_blocks: int) -> Tensor | None:
        """Compute so many blocks more; behind the last one the features, [1 + number of deepstack
        blocks, tokens, out_size]."""
        config = self.config
        end = min(encoding.next_block + num_blocks, config.num_blocks)
        for index in range(encoding.next_block, end):
            is_whole = config.window_size is None or index in config.full_attention_blocks
            lengths = [encoding.grid.num_patches] if is_whole else encoding.window_lengths
            self._blocks[index](encoding, lengths)
            if index in config.deepstack_blocks:
                place = config.deepstack_blocks.index(index)
                encoding.deepstack.append(self._deepstack[place](encoding.hidden))
        encoding.next_block = end
        if end < config.num_blocks:
            return None
        merged = self._merge(encoding.hidden)
        if encoding.order is not None:
            merged = merged[torch.argsort(encoding.order)]
        return torch.stack([merged, *encoding.deepstack])


class _Weights:
    """Tensors of the tower, floating whatever the decoder's weights are."""

    def __init__(self, build: ModelBuild, prefix: str) -> None:
        self._source, self._prefix = build.source, prefix

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        return self._source.take(f"{self._prefix}{name}", shape)

    def linear(self, name: str, in_features: int, out_features: int) -> Map:
        weight = self.take(f"{name}.weight", (out_features, in_features))
        bias = self.take(f"{name}.bias", (out_features,))
        return lambda x: functional.linear(x, weight, bias)

    def rms_norm(self, name: str, size: int) -> Map:
        weight = self.take(f"{name}.weight", (size,))
        return lambda x: weight * _rms_normed(x)

    def layer_norm(self, name: str, size: int) -> Map:
        weight, bias = (self.take(f"{name}.{part}", (size,)) for part in ("weight", "bias"))
        return lambda x: functional.layer_norm(x, (size,), weight, bias, _EPS)


class _Block:
    """x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, weights: _Weights, name: str, config: VisionConfig) -> None:
        size, inner = config.hidden_size, config.intermediate_size
        self._num_heads = config.num_heads
        self._qkv = weights.linear(f"{name}attn.qkv", size, 3 * size)
        self._proj = weights.linear(f"{name}attn.proj", size, size)
        if config.kind == "qwen3_vl":
            norm = weights.layer_norm
            up = weights.linear(f"{name}mlp.linear_fc1", size, inner)
            down = weights.linear(f"{name}mlp.linear_fc2", inner, size)
            self._mlp: Map = lambda x: down(functional.gelu(up(x), approximate="tanh"))
        else:
            norm = weights.rms_norm
            gate = weights.linear(f"{name}mlp.gate_proj", size, inner)
            up = weights.linear(f"{name}mlp.up_proj", size, inner)
            down = weights.linear(f"{name}mlp.down_proj", inner, size)
            self._mlp = lambda x: down(functional.silu(gate(x)) * up(x))
        self._norm1, self._norm2 = norm(f"{name}norm1", size), norm(f"{name}norm2", size)

    def __call__(self, encoding: Encoding, lengths: Sequence[int]) -> None:
        """Change `encoding.hidden`; patches attend within runs of these lengths."""
        x = encoding.hidden
        x = x + self._proj(self._attended(self._qkv(self._norm1(x)), encoding, lengths))
        encoding.hidden = x + self._mlp(self._norm2(x))

    def _attended(self, qkv: Tensor, encoding: Encoding, lengths: Sequence[int]) -> Tensor:
        """qkv [N, 3 * C] -> [N, C]"""
        query, key, value = qkv.view(len(qkv), 3, self._num_heads, -1).unbind(1)
        query, key = (_rotated(each, encoding.cos, encoding.sin) for each in (query, key))
        output = torch.empty_like(query)
        starts = torch.tensor([0, *lengths]).cumsum(0)
        for length in sorted(set(lengths)):
            runs = [i for i, each in enumerate(lengths) if each == length]
            at = (starts[runs][:, None] + torch.arange(length)).to(qkv.device)  # [runs, length]
            q, k, v = (each[at].transpose(1, 2) for each in (query, key, value))
            output[at] = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return output.flatten(1)


def _second_merger(weights: _Weights, name: str, config: VisionConfig) -> Map:
    merged = config.hidden_size * config.merge_size**2
    norm = weights.rms_norm(f"{name}ln_q", config.hidden_size)
    up = weights.linear(f"{name}mlp.0", merged, merged)
    down = weights.linear(f"{name}mlp.2", merged, config.out_size)
    return lambda x: down(functional.gelu(up(norm(x).view(-1, merged))))


def _third_merger(weights: _Weights, name: str, config: VisionConfig, norm_size: int) -> Map:
    merged = config.hidden_size * config.merge_size**2
    norm = weights.layer_norm(f"{name}norm", norm_size)
    up = weights.linear(f"{name}linear_fc1", merged, merged)
    down = weights.linear(f"{name}linear_fc2", merged, config.out_size)
    return lambda x: down(functional.gelu(up(norm(x.view(-1, norm_size)).view(-1, merged))))


def _ordered(x: Tensor, order: Tensor, unit: int) -> Tensor:
    """Groups of `unit` rows in this order."""
    return x.view(len(order), unit, -1)[order].view(len(x), -1)


def _rms_normed(x: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPS)).to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [N, heads, head_dim]; pairs are half a head apart."""
    wide = x.to(cos.dtype)
    first, second = wide.chunk(2, -1)
    return (wide * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)
