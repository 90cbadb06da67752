"""Several residual streams, of which each layer computes one and predicts the others (Gemma 3n;
Baykal et al., "Alternating Updates for Efficient Transformers", 2023), and a learned residual of
low rank (Menghani et al., "LAuReL", 2024)."""

from __future__ import annotations

import torch
from torch import Tensor

from ....kernels.reference.dense import sigmoid
from ...checkpoint.config.varied_layers import AltUpConfig
from ..forward_batch import ForwardBatch
from .build import ModelBuild
from .linear import LinearLayer
from .norm import wide_rms_norm

_LEAST_SQUARE = 1e-5  # of a stream's mean square, as in Hugging Face


class AltUp:
    """One layer's predictions of all streams, and their correction by what it computed."""

    def __init__(self, build: ModelBuild, name: str, config: AltUpConfig) -> None:
        """name: the layer's."""
        own, count, hidden_size = f"{name}.altup", config.num_streams, build.config.hidden_size
        take = build.source.take
        self._count, self._active = count, config.active_stream
        router = take(f"{own}.modality_router.weight", (count, hidden_size))
        self._router = build.kernels.make_output_linear(router)
        self._router_norm = wide_rms_norm(build, f"{own}.router_norm", hidden_size)
        self._router_scale = hidden_size**-1.0
        self._prediction = take(f"{own}.prediction_coefs.weight", (count * count, count))
        self._correction = take(f"{own}.correction_coefs.weight", (count, count))
        scale = take(f"{own}.correct_output_scale", (hidden_size,))
        self._output_scale = scale if config.has_output_scale else None

    def predict(self, streams: Tensor) -> Tensor:
        """[num_streams, T, hidden_size] -> the same, a new tensor."""
        modes = self._modes(streams[self._active])
        mixed = _products(modes, self._prediction).view(-1, self._count, self._count)
        predicted = streams.clone()
        for source, stream in enumerate(streams):  # one by one: equal bits in any step
            predicted += mixed[:, :, source].T[..., None] * stream
        return predicted

    def correct(self, predicted: Tensor, computed: Tensor) -> Tensor:
        """computed [T, hidden_size], of the active stream -> [num_streams, T, hidden_size]."""
        innovation = computed - predicted[self._active]
        share = _products(self._modes(computed), self._correction) + 1.0
        return innovation * share.T[..., None] + predicted

    def scaled(self, streams: Tensor) -> Tensor:
        """The active one, as the token's own input is gated by it."""
        active = streams[self._active]
        return active if self._output_scale is None else active * self._output_scale

    def _modes(self, x: Tensor) -> Tensor:
        """[T, hidden_size] -> [T, num_streams]"""
        routed = self._router(self._router_norm(x.contiguous()) * self._router_scale)
        return (2 * sigmoid(2 * routed) - 1).to(x.dtype)  # tanh, of equal bits in any step


def _products(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, n], weight [m, n] -> [T, m], for few n, of equal bits in any step."""
    out = x[:, :1] * weight[:, 0]
    for index in range(1, x.shape[1]):
        out += x[:, index : index + 1] * weight[:, index]
    return out


class Laurel:
    """x + norm(right(left(x)))"""

    def __init__(self, build: ModelBuild, name: str, rank: int) -> None:
        """name: the layer's."""
        hidden_size = build.config.hidden_size
        self._left = LinearLayer(
            build, [f"{name}.laurel.linear_left"], in_features=hidden_size, out_features=[rank]
        )
        self._right = LinearLayer(
            build, [f"{name}.laurel.linear_right"], in_features=rank, out_features=[hidden_size]
        )
        self._norm = wide_rms_norm(build, f"{name}.laurel.post_laurel_norm", hidden_size)

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, hidden_size] -> [T, hidden_size]"""
        return x + self._norm(self._right(self._left(x, batch), batch))


class StreamEnds:
    """One stream made to several before the first layer, and these to one behind the last."""

    def __init__(self, build: ModelBuild, name: str, config: AltUpConfig) -> None:
        """name: the decoder's."""
        self._apart, self._together = (
            [
                LinearLayer(
                    build,
                    [f"{name}.{part}.{index}"],
                    in_features=build.config.hidden_size,
                    out_features=[build.config.hidden_size],
                )
                for index in range(config.num_streams - 1)
            ]
            for part in ("altup_projections", "altup_unembed_projections")
        )

    def split(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, hidden_size] -> [num_streams, T, hidden_size], of one magnitude."""
        others = (project(x, batch) for project in self._apart)
        return torch.stack([x, *(_as_large(each, x) for each in others)])

    def join(self, streams: Tensor, batch: ForwardBatch) -> Tensor:
        """[num_streams, T, hidden_size] -> their mean, each projected back."""
        first, others = streams[0], streams[1:]
        projected = (p(each, batch) for p, each in zip(self._together, others, strict=True))
        return torch.stack([first, *(_as_large(each, first) for each in projected)]).mean(0)


def _as_large(x: Tensor, other: Tensor) -> Tensor:
    """x with the root mean square of `other`, token by token."""
    target = other.square().mean(-1, keepdim=True).sqrt()
    own = x.square().mean(-1, keepdim=True).clamp(min=_LEAST_SQUARE).sqrt()
    return x * target / own
