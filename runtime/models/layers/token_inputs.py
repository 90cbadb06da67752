"""What each layer takes of a token beside the residual stream: an embedding of its own, and a
projection of the model's (Gemma 3n, Gemma 4)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...checkpoint.config.varied_layers import VariedLayers
from ..forward_batch import ForwardBatch
from .activation import gelu_tanh
from .build import ModelBuild
from .linear import LinearLayer
from .norm import wide_rms_norm


class TokenInputs:
    """Of all layers, made once a step."""

    def __init__(self, build: ModelBuild, name: str, varied: VariedLayers) -> None:
        """name: the decoder's."""
        config, self._size = build.config, varied.token_input_size
        self._num_layers = config.num_layers
        self._gather = build.kernels.gather_rows
        width = self._num_layers * self._size
        self._vocab_size = varied.token_input_vocab
        self._has_all_tokens = config.vocab_size <= self._vocab_size
        self._table = build.source.take(
            f"{name}.embed_tokens_per_layer.weight", (self._vocab_size, width)
        )
        self._multiplier = torch.tensor(math.sqrt(self._size), dtype=build.dtype).item()
        self._project = LinearLayer(
            build,
            [f"{name}.per_layer_model_projection"],
            in_features=config.hidden_size,
            out_features=[width],
        )
        self._scale = config.hidden_size**-0.5
        self._norm = wide_rms_norm(build, f"{name}.per_layer_projection_norm", self._size)

    def __call__(self, input_ids: Tensor, embedded: Tensor, batch: ForwardBatch) -> Tensor:
        """input_ids [T], embedded [T, hidden_size] -> [num_layers, T, token_input_size]."""
        if not self._has_all_tokens:
            input_ids = torch.where(input_ids < self._vocab_size, input_ids, 0)
        own = self._gather(self._table, input_ids) * self._multiplier
        projected = self._project(embedded, batch) * self._scale
        normed = self._norm(projected.view(-1, self._size)).view(len(input_ids), -1)
        both = (normed + own) * 2**-0.5
        return both.view(len(input_ids), self._num_layers, -1).transpose(0, 1)


class TokenInputGate:
    """norm(project(gelu(gate(x)) * input)) of one layer."""

    def __init__(self, build: ModelBuild, name: str, varied: VariedLayers) -> None:
        """name: the layer's."""
        hidden_size, size = build.config.hidden_size, varied.token_input_size
        self._gate = LinearLayer(
            build, [f"{name}.per_layer_input_gate"], in_features=hidden_size, out_features=[size]
        )
        self._project = LinearLayer(
            build, [f"{name}.per_layer_projection"], in_features=size, out_features=[hidden_size]
        )
        self._norm = wide_rms_norm(build, f"{name}.post_per_layer_input_norm", hidden_size)

    def __call__(self, x: Tensor, own: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size], own [T, token_input_size] -> [T, hidden_size]."""
        gated = gelu_tanh(self._gate(x, batch)) * own
        return self._norm(self._project(gated, batch))
