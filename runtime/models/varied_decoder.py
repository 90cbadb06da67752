"""The decoder of models whose layers differ, share KV and take inputs of their own (Gemma 3n, Gemma
4): several residual streams, or one."""

from __future__ import annotations

import logging
import math
from statistics import NormalDist
from typing import Protocol

import torch
from torch import Tensor

from ..checkpoint.config.model_config import ExpertsConfig
from ..checkpoint.config.varied_layers import AltUpConfig, VariedLayers
from .forward_batch import ForwardBatch
from .layers.activation import gelu_tanh
from .layers.altup import AltUp, Laurel, StreamEnds
from .layers.build import ModelBuild
from .layers.embedding import VocabEmbedding
from .layers.experts import take_experts
from .layers.linear import LinearLayer
from .layers.mlp import GatedMLP
from .layers.norm import wide_rms_norm
from .layers.rotary import LayerRotary, Rotary
from .layers.shared_kv_attention import SharedKVAttention
from .layers.token_inputs import TokenInputGate, TokenInputs
from .vision.tower import VisionTower

logger = logging.getLogger(__name__)


class VariedDecoder:
    """As `Decoder`: immutable after construction, KV lives in the batch's pool."""

    def __init__(self, build: ModelBuild) -> None:
        config, varied = build.config, build.config.varied
        assert varied is not None, "the config says how layers differ"
        self.vision: VisionTower | None = None  # of Gemma 3n and 4 the text half is read
        name = f"{config.weight_prefix}model"
        self._vocab = VocabEmbedding(build)
        self._inputs = TokenInputs(build, name, varied) if varied.token_input_size else None
        self._ends = None if varied.altup is None else StreamEnds(build, name, varied.altup)
        self._layers = [
            _layer(build, f"{name}.layers.{index}", index, varied)
            for index in range(config.num_layers)
        ]
        self._norm = wide_rms_norm(build, f"{name}.{config.final_norm}", config.hidden_size)
        self._rotary = LayerRotary(build)
        for prefix in config.unread_weights:
            build.source.skip(prefix)
        if config.unread_weights:
            unread = ", ".join(f"{prefix}*" for prefix in config.unread_weights)
            logger.info("%s: not loaded: %s", config.architecture, unread)

    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        """See `Decoder`."""
        rotaries = self._rotary.at(positions)
        x = self._vocab.embed(input_ids)
        own: list[Tensor | None] = [None] * len(self._layers)
        if self._inputs is not None:
            own = list(self._inputs(input_ids, x, batch))
        if self._ends is not None:
            x = self._ends.split(x, batch)
        layers = zip(self._layers, rotaries, own, strict=True)
        for index, (layer, rotary, inputs) in enumerate(layers):
            x = layer(x, inputs, rotary, batch)
            if batch.on_layer is not None:
                batch.on_layer(index)
        if self._ends is not None:
            x = self._ends.join(x, batch)
        return self._norm(x, out=batch.out)

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Decoder`."""
        return self._vocab.logits(hidden, out)


class _Layer(Protocol):
    def __call__(
        self, x: Tensor, own: Tensor | None, rotary: Rotary, batch: ForwardBatch
    ) -> Tensor:
        """x: the residual stream [T, hidden_size], or all streams -> the same behind the layer;
        own [T, token_input_size]: the token's input to it."""
        ...


def _layer(build: ModelBuild, name: str, index: int, varied: VariedLayers) -> _Layer:
    if varied.altup is not None:
        return _StreamsLayer(build, name, index, varied, varied.altup)
    return _OneStreamLayer(build, name, index, varied)


class _Blocks:
    """What both kinds of layers have: attention and a feed-forward block between norms."""

    def __init__(self, build: ModelBuild, name: str, index: int, varied: VariedLayers) -> None:
        self._attention = SharedKVAttention(build, f"{name}.self_attn", index)
        self._feed_forward = _feed_forward(build, name, index, varied)
        self.input_norm, self._attended_norm, self.middle_norm, self._output_norm = (
            wide_rms_norm(build, f"{name}.{norm}", build.config.hidden_size)
            for norm in (
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            )
        )

    def attend(self, normed: Tensor, rotary: Rotary, batch: ForwardBatch) -> Tensor:
        return self._attended_norm(self._attention(normed, rotary, batch))

    def feed_forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Of the residual stream."""
        return self._output_norm(self._feed_forward(x, self.middle_norm(x), batch))


class _OneStreamLayer:
    """Gemma 4's."""

    def __init__(self, build: ModelBuild, name: str, index: int, varied: VariedLayers) -> None:
        self._blocks = _Blocks(build, name, index, varied)
        self._gate = TokenInputGate(build, name, varied) if varied.token_input_size else None
        self._scalar: Tensor | None = None
        if varied.has_output_scalars:
            self._scalar = build.source.take(f"{name}.layer_scalar", (1,))

    def __call__(
        self, x: Tensor, own: Tensor | None, rotary: Rotary, batch: ForwardBatch
    ) -> Tensor:
        """See `_Layer`."""
        x = x + self._blocks.attend(self._blocks.input_norm(x), rotary, batch)
        x = x + self._blocks.feed_forward(x, batch)
        if self._gate is not None and own is not None:
            x = x + self._gate(x, own, batch)
        return x if self._scalar is None else x * self._scalar


class _StreamsLayer:
    """Gemma 3n's."""

    def __init__(
        self, build: ModelBuild, name: str, index: int, varied: VariedLayers, altup: AltUpConfig
    ) -> None:
        self._active = altup.active_stream
        self._blocks = _Blocks(build, name, index, varied)
        self._altup = AltUp(build, name, altup)
        self._laurel = Laurel(build, name, altup.laurel_rank)
        self._gate = TokenInputGate(build, name, varied)

    def __call__(
        self, x: Tensor, own: Tensor | None, rotary: Rotary, batch: ForwardBatch
    ) -> Tensor:
        """See `_Layer`."""
        assert own is not None, "the config has inputs of tokens"
        predicted = self._altup.predict(x)
        active = predicted[self._active]
        normed = self._blocks.input_norm(active.contiguous())
        laurel = self._laurel(normed, batch)
        attended = active + self._blocks.attend(normed, rotary, batch)
        computed = (attended + laurel) / math.sqrt(2)
        computed = computed + self._blocks.feed_forward(computed, batch)
        streams = self._altup.correct(predicted, computed)
        streams[1:] += self._gate(self._altup.scaled(streams), own, batch)
        return streams


class _FeedForward(Protocol):
    def __call__(self, residual: Tensor, normed: Tensor, batch: ForwardBatch) -> Tensor:
        """Both [T, hidden_size]: the residual stream as it is, and normed."""
        ...


def _feed_forward(build: ModelBuild, name: str, index: int, varied: VariedLayers) -> _FeedForward:
    size, sparsity = varied.intermediate_sizes[index], varied.sparsities[index]
    if sparsity:
        sparse = _SparseMLP(build, f"{name}.mlp", size, sparsity)
        return lambda residual, normed, batch: sparse(normed, batch)
    dense = GatedMLP(build, f"{name}.mlp", size)
    if build.config.experts is None:
        return lambda residual, normed, batch: dense(normed, batch)
    return _DenseAndExperts(build, name, index, dense, build.config.experts)


class _SparseMLP:
    """down(gelu(relu(gate - cut)) * up), with a cut that a normal distribution of the gates' mean
    and spread has this share of its mass below (Gemma 3n)."""

    def __init__(self, build: ModelBuild, name: str, size: int, sparsity: float) -> None:
        hidden_size = build.config.hidden_size
        self._gate_up = LinearLayer(
            build,
            [f"{name}.gate_proj", f"{name}.up_proj"],
            in_features=hidden_size,
            out_features=[size, size],
        )
        self._down = LinearLayer(
            build, [f"{name}.down_proj"], in_features=size, out_features=[hidden_size]
        )
        deviations = NormalDist().inv_cdf(sparsity)
        self._deviations = torch.tensor(deviations, dtype=torch.float32).to(build.dtype).item()

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        gate, up = self._gate_up(x, batch).chunk(2, -1)
        spread = gate.std(-1, keepdim=True, correction=0)
        gate = (gate - (gate.mean(-1, keepdim=True) + spread * self._deviations)).relu()
        return self._down(gelu_tanh(gate) * up, batch)


class _DenseAndExperts:
    """A dense block and a mixture of experts side by side, each normed (Gemma 4)."""

    def __init__(
        self,
        build: ModelBuild,
        name: str,
        index: int,
        dense: GatedMLP,
        experts: ExpertsConfig,
    ) -> None:
        self._note = None if build.expert_loads is None else build.expert_loads.of_layer(index)
        hidden_size, kernels = build.config.hidden_size, build.kernels
        wide = torch.promote_types(build.dtype, torch.float32)
        ones = torch.ones(hidden_size, dtype=build.dtype, device=build.device)
        self._dense, self._routing = dense, experts.routing
        self._route = kernels.route_experts
        self._router_norm = kernels.make_rms_norm(ones, build.config.rms_norm_eps)
        self._router_scale = build.source.take(f"{name}.router.scale", (hidden_size,))
        self._root = hidden_size**-0.5
        router = build.source.take(f"{name}.router.proj.weight", (experts.num_experts, hidden_size))
        self._router = kernels.make_output_linear(router)
        self._expert_scale = build.source.take(
            f"{name}.router.per_expert_scale", (experts.num_experts,), wide
        )
        self._experts = kernels.make_experts(
            *take_experts(build, name, experts), build.config.activation
        )
        self._dense_norm, self._input_norm, self._output_norm = (
            wide_rms_norm(build, f"{name}.{norm}", hidden_size)
            for norm in (
                "post_feedforward_layernorm_1",
                "pre_feedforward_layernorm_2",
                "post_feedforward_layernorm_2",
            )
        )

    def __call__(self, residual: Tensor, normed: Tensor, batch: ForwardBatch) -> Tensor:
        """See `_FeedForward`."""
        dense = self._dense_norm(self._dense(normed, batch))
        logits = self._router(self._router_norm(residual) * self._router_scale * self._root)
        expert_ids, weights = self._route(logits, None, self._routing, batch.num_tokens)
        if self._note is not None:
            self._note(expert_ids, batch)
        weights = (weights * self._expert_scale[expert_ids.long()]).to(weights.dtype)
        found = self._experts(self._input_norm(residual), expert_ids, weights)
        return dense + self._output_norm(found)
