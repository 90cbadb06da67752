"""Layers whose memory of earlier tokens is a state, in place of attention over their KV."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ....kernels.reference.dense import sigmoid, silu, softplus, widen
from ...checkpoint.config.model_config import GatedDeltaConfig, Mamba2Config, ShortConvConfig
from ..forward_batch import ForwardBatch
from .build import ModelBuild
from .linear import LinearLayer


class RecurrentLayer(Protocol):
    """Reads and writes the states of the step's rows in its own layer of the pool."""

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        ...


def recurrent_layer(build: ModelBuild, name: str, layer_index: int) -> RecurrentLayer:
    """The layer that the config specifies; name: its name in checkpoints."""
    recurrent = build.config.recurrent
    assert recurrent is not None, "the config says which layers have a state"
    place = recurrent.layers.index(layer_index)
    if isinstance(recurrent.mixer, ShortConvConfig):
        return ShortConvLayer(build, name, place, recurrent.mixer)
    if isinstance(recurrent.mixer, Mamba2Config):
        return Mamba2Layer(build, name, place, recurrent.mixer)
    if recurrent.mixer.has_channel_decays:
        return KimiDeltaLayer(build, name, place, recurrent.mixer)
    return GatedDeltaNet(build, name, place, recurrent.mixer)


class ShortConvLayer:
    """LFM2's: a gate, a convolution over a few tokens, and another gate."""

    def __init__(
        self, build: ModelBuild, name: str, state_index: int, config: ShortConvConfig
    ) -> None:
        size = build.config.hidden_size
        self._state_index = state_index
        self._convolve = build.kernels.recurrence.short_convolution
        self._input = LinearLayer(
            build, [f"{name}.in_proj"], in_features=size, out_features=[3 * size],
            bias=config.has_bias,
        )  # fmt: skip
        self._taps = _taps(build, f"{name}.conv", size, config.kernel_size)
        self._bias = build.source.take(f"{name}.conv.bias", (size,)) if config.has_bias else None
        self._output = LinearLayer(
            build, [f"{name}.out_proj"], in_features=size, out_features=[size],
            bias=config.has_bias,
        )  # fmt: skip

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """See `RecurrentLayer`."""
        before, behind, inner = self._input(x, batch).chunk(3, -1)
        tails = batch.states[self._state_index].tails
        mixed = self._convolve(before * inner, self._taps, self._bias, tails, batch.recurrence)
        return self._output(behind * mixed, batch)


class GatedDeltaNet:
    """Qwen3-Next's and Qwen3.5's: convolution, gated delta rule, norm and gate."""

    def __init__(
        self, build: ModelBuild, name: str, state_index: int, config: GatedDeltaConfig
    ) -> None:
        hidden_size, heads = build.config.hidden_size, config.num_value_heads
        self._config = config
        self._state_index = state_index
        self._kernels = build.kernels.recurrence
        self._value_size = value_size = heads * config.value_dim
        parts = [
            (["qkv", "z"], [config.num_channels, value_size]),
            (["b", "a"], [heads, heads]),
        ]
        if config.is_fused:
            parts = [(["".join(names)], [sum(sizes)]) for names, sizes in parts]
        self._heads, self._rates = (
            LinearLayer(
                build, [f"{name}.in_proj_{each}" for each in names], in_features=hidden_size,
                out_features=sizes,
            )
            for names, sizes in parts
        )  # fmt: skip
        self._taps = _taps(build, f"{name}.conv1d", config.num_channels, config.kernel_size)
        wide = torch.promote_types(build.dtype, torch.float32)
        self._decay = -build.source.take(f"{name}.A_log", (heads,), wide).exp()
        self._step_bias = build.source.take(f"{name}.dt_bias", (heads,), wide)
        weight = build.source.take(f"{name}.norm.weight", (config.value_dim,))
        self._norm = build.kernels.make_rms_norm(weight, build.config.rms_norm_eps)
        self._output = LinearLayer(
            build, [f"{name}.out_proj"], in_features=value_size, out_features=[hidden_size]
        )

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """See `RecurrentLayer`."""
        config, state = self._config, batch.states[self._state_index]
        assert state.matrices is not None, "its states are matrices"
        mixed, gate = self._projected(self._heads(x, batch))
        rates, steps = self._split_rates(self._rates(x, batch))
        mixed = self._kernels.short_convolution(
            mixed, self._taps, None, state.tails, batch.recurrence, has_silu=True
        )
        key_size = config.num_key_heads * config.key_dim
        q, k, v = torch.split(mixed, [key_size, key_size, self._value_size], -1)
        keys_shape = (len(x), config.num_key_heads, config.key_dim)
        attended = self._kernels.gated_delta_rule(
            q.view(keys_shape),
            k.view(keys_shape),
            v.view(len(x), config.num_value_heads, config.value_dim),
            self._decay * softplus(widen(steps) + self._step_bias),
            sigmoid(widen(rates)),
            state.matrices,
            batch.recurrence,
        )
        normed = self._norm(attended.view(-1, config.value_dim)).view(len(x), -1)
        return self._output((widen(normed) * silu(widen(gate))).to(x.dtype), batch)

    def _projected(self, heads: Tensor) -> tuple[Tensor, Tensor]:
        """Queries, keys and values [T, num_channels], and gates [T, value_size]."""
        config = self._config
        if not config.is_fused:
            mixed, gate = torch.split(heads, [config.num_channels, self._value_size], -1)
            return mixed.contiguous(), gate
        share = config.num_value_heads // config.num_key_heads * config.value_dim
        by_head = heads.view(len(heads), config.num_key_heads, -1)
        parts = torch.split(by_head, [config.key_dim, config.key_dim, share, share], -1)
        q, k, v, gate = (part.reshape(len(heads), -1) for part in parts)
        return torch.cat((q, k, v), -1), gate

    def _split_rates(self, rates: Tensor) -> tuple[Tensor, Tensor]:
        """Rates and step sizes before their activations, each [T, num_value_heads]."""
        if not self._config.is_fused:
            rate, step = rates.chunk(2, -1)
            return rate, step
        parts = rates.view(len(rates), self._config.num_key_heads, -1).chunk(2, -1)
        rate, step = (part.reshape(len(rates), -1) for part in parts)
        return rate, step


class KimiDeltaLayer:
    """Kimi Linear's: convolution, delta rule with a decay for each number of a key, norm and gate
    (Kimi team, "Kimi Linear", 2025)."""

    def __init__(
        self, build: ModelBuild, name: str, state_index: int, config: GatedDeltaConfig
    ) -> None:
        hidden_size, heads, head_dim = (
            build.config.hidden_size,
            config.num_value_heads,
            config.key_dim,
        )
        self._config = config
        self._state_index = state_index
        self._kernels = build.kernels.recurrence
        size = heads * head_dim
        self._input = LinearLayer(
            build, [f"{name}.{part}_proj" for part in "qkv"], in_features=hidden_size,
            out_features=[size] * 3,
        )  # fmt: skip
        self._taps = torch.cat(
            [_taps(build, f"{name}.{part}_conv1d", size, config.kernel_size) for part in "qkv"], 1
        )
        sizes = [head_dim, head_dim, heads]
        self._down = LinearLayer(
            build, [f"{name}.{part}_proj" for part in ("f_a", "g_a", "b")],
            in_features=hidden_size, out_features=sizes,
        )  # fmt: skip
        self._sizes = sizes
        self._decay_up, self._gate_up = (
            LinearLayer(build, [f"{name}.{part}"], in_features=head_dim, out_features=[size])
            for part in ("f_b_proj", "g_b_proj")
        )
        wide = torch.promote_types(build.dtype, torch.float32)
        decay = build.source.take(f"{name}.A_log", (1, 1, heads, 1), wide)
        self._decay = -decay.view(heads, 1).exp()
        self._step_bias = build.source.take(f"{name}.dt_bias", (size,), wide)
        weight = build.source.take(f"{name}.o_norm.weight", (head_dim,))
        self._norm = build.kernels.make_rms_norm(weight, build.config.rms_norm_eps)
        self._output = LinearLayer(
            build, [f"{name}.o_proj"], in_features=size, out_features=[hidden_size]
        )

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """See `RecurrentLayer`."""
        config, state = self._config, batch.states[self._state_index]
        assert state.matrices is not None, "its states are matrices"
        shape = (len(x), config.num_value_heads, config.key_dim)
        mixed = self._kernels.short_convolution(
            self._input(x, batch), self._taps, None, state.tails, batch.recurrence, has_silu=True
        )
        decay, gate, rates = torch.split(self._down(x, batch), self._sizes, -1)
        steps = self._decay_up(decay.contiguous(), batch)
        steps = softplus(widen(steps) + self._step_bias).view(shape)
        q, k, v = (part.reshape(shape) for part in mixed.chunk(3, -1))
        attended = self._kernels.gated_delta_rule(
            q, k, v, self._decay * steps, sigmoid(widen(rates)), state.matrices, batch.recurrence
        )
        normed = self._norm(attended.view(-1, config.value_dim)).view(len(x), -1)
        gates = sigmoid(widen(self._gate_up(gate.contiguous(), batch)))
        return self._output((widen(normed) * gates).to(x.dtype), batch)


class Mamba2Layer:
    """Granite 4's: convolution, state-space scan, gate and norm."""

    def __init__(
        self, build: ModelBuild, name: str, state_index: int, config: Mamba2Config
    ) -> None:
        hidden_size, heads = build.config.hidden_size, config.num_heads
        inner_size, num_channels = config.inner_size, config.num_channels
        self._config = config
        self._eps = build.config.rms_norm_eps
        self._state_index = state_index
        self._kernels = build.kernels.recurrence
        self._input = LinearLayer(
            build,
            [f"{name}.in_proj"],
            in_features=hidden_size,
            out_features=[inner_size + num_channels + heads],
            bias=config.has_bias,
        )
        self._taps = _taps(build, f"{name}.conv1d", num_channels, config.kernel_size)
        self._bias: Tensor | None = None
        if config.has_convolution_bias:
            self._bias = build.source.take(f"{name}.conv1d.bias", (num_channels,))
        wide = torch.promote_types(build.dtype, torch.float32)
        self._decay = -build.source.take(f"{name}.A_log", (heads,), wide).exp()
        self._step_bias, self._skip = (
            build.source.take(f"{name}.{part}", (heads,), wide) for part in ("dt_bias", "D")
        )
        self._norm_weight = build.source.take(f"{name}.norm.weight", (inner_size,))
        self._output = LinearLayer(
            build,
            [f"{name}.out_proj"],
            in_features=inner_size,
            out_features=[hidden_size],
            bias=config.has_bias,
        )

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """See `RecurrentLayer`."""
        config, state = self._config, batch.states[self._state_index]
        assert state.matrices is not None, "its states are matrices"
        sizes = [config.inner_size, config.num_channels, config.num_heads]
        gate, mixed, steps = torch.split(self._input(x, batch), sizes, -1)
        mixed = self._kernels.short_convolution(
            mixed.contiguous(), self._taps, self._bias, state.tails, batch.recurrence,
            has_silu=True,
        )  # fmt: skip
        group_size = config.num_groups * config.state_dim
        values, k, q = torch.split(mixed, [config.inner_size, group_size, group_size], -1)
        groups_shape = (len(x), config.num_groups, config.state_dim)
        v = values.view(len(x), config.num_heads, config.head_dim)
        steps = softplus(widen(steps) + self._step_bias).clamp_(*config.step_limit)
        scanned = self._kernels.state_space_scan(
            q.view(groups_shape), k.view(groups_shape), v, steps, self._decay, state.matrices,
            batch.recurrence,
        )  # fmt: skip
        out = widen(scanned) + widen(v) * self._skip[:, None]
        return self._output(self._gated_norm(out.view(len(x), -1), gate).to(x.dtype), batch)

    def _gated_norm(self, out: Tensor, gate: Tensor) -> Tensor:
        """Each group of heads is normed by itself, behind its gates."""
        gated = (out * silu(widen(gate))).view(len(out), self._config.num_groups, -1)
        normed = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + self._eps)
        return normed.view(len(out), -1) * self._norm_weight


def _taps(build: ModelBuild, name: str, num_channels: int, kernel_size: int) -> Tensor:
    """Of a convolution, as the kernels take them: [kernel_size, num_channels], wide."""
    weight = build.source.take(f"{name}.weight", (num_channels, 1, kernel_size))
    return widen(weight).squeeze(1).t().contiguous()
