"""The layers of decoders: an attention block and a feed-forward block around a residual stream.

They differ in where their norms are. A layer returns its output without adding it to the residual
stream, so that the norm of the next layer adds it in the same pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...kernels.ops import NormedLinear
from ..checkpoint.config.model_config import Block
from .forward_batch import ForwardBatch
from .layers.attention import Attention
from .layers.build import ModelBuild
from .layers.experts import feed_forward_of
from .layers.latent_attention import LatentAttention
from .layers.mlp import GatedMLP
from .layers.norm import Norm, RMSNorm, norm_of
from .layers.recurrent import recurrent_layer
from .layers.rotary import Rotary


class DecoderLayer(Protocol):
    """One layer of the stack."""

    def __call__(
        self, x: Tensor | None, residual: Tensor, rotary: Rotary, batch: ForwardBatch
    ) -> Tensor:
        """x: the previous layer's output, not yet added to `residual` (None: nothing), both
        [T, hidden_size] -> this layer's, not yet added to `residual`, which is updated in place."""
        ...


def decoder_layer(build: ModelBuild, name: str, index: int) -> DecoderLayer:
    """The layer that the config specifies; name: its name in checkpoints."""
    if build.config.single_blocks is not None:
        return SingleBlockLayer(build, name, index, build.config.single_blocks[index])
    match build.config.norm_placement:
        case "after":
            return PostNormLayer(build, name, index)
        case "around":
            return SandwichNormLayer(build, name, index)
        case "parallel":
            return ParallelLayer(build, name, index)
        case "before" if build.config.residual_multiplier != 1.0:
            return ScaledPreNormLayer(build, name, index)
        case "before":
            return PreNormLayer(build, name, index)


class PreNormLayer:
    """residual + attention(norm(residual)), and the same around the feed-forward block."""

    def __init__(self, build: ModelBuild, name: str, index: int) -> None:
        size, names = build.config.hidden_size, build.config.names
        self._input_norm = norm_of(build, f"{name}.{names.input_norm}", size)
        self._attention = _mixer(build, name, index)
        self._middle_norm = norm_of(build, f"{name}.{names.middle_norm}", size)
        self._feed_forward = feed_forward_of(build, name, index)
        self._fused = _fused_layer(
            self._input_norm, self._attention, self._middle_norm, self._feed_forward
        )

    def __call__(
        self, x: Tensor | None, residual: Tensor, rotary: Rotary, batch: ForwardBatch
    ) -> Tensor:
        """See `DecoderLayer`."""
        if self._fused is not None and self._fused.serves(residual, batch):
            return self._fused(x, residual, rotary, batch)
        normed = self._input_norm(residual) if x is None else self._input_norm(x, residual)
        attended = self._attention(normed, rotary, batch)
        return self._feed_forward(self._middle_norm(attended, residual), batch)


@dataclass(frozen=True, slots=True)
class FusedPreNormLayer:
    """The same for few tokens without adapters: each norm is a part of the product behind it, the
    activation too, so that a layer takes three launches less."""

    heads: NormedLinear
    attention: Attention
    hidden: NormedLinear
    feed_forward: GatedMLP

    def serves(self, residual: Tensor, batch: ForwardBatch) -> bool:
        """Whether a step is for it."""
        most = min(self.heads.max_tokens, self.hidden.max_tokens)
        return len(residual) <= most and batch.adapters is None

    def __call__(
        self, x: Tensor | None, residual: Tensor, rotary: Rotary, batch: ForwardBatch
    ) -> Tensor:
        """See `DecoderLayer`. The sum goes to a tensor of its own and comes back with the next one,
        as a product's programs read its terms while one of them writes it."""
        between = torch.empty_like(residual)
        heads = self.heads(x, residual, between)
        attended = self.attention.attend(heads, rotary, batch)
        return self.feed_forward.down(self.hidden(attended, between, residual), batch)


def _fused_layer(
    input_norm: Norm, attention: object, middle_norm: Norm, feed_forward: object
) -> FusedPreNormLayer | None:
    """None where the kernels have no such products, or the layer has other parts."""
    if not (isinstance(attention, Attention) and isinstance(feed_forward, GatedMLP)):
        return None
    if not (isinstance(input_norm, RMSNorm) and isinstance(middle_norm, RMSNorm)):
        return None
    heads = attention.projection.make_normed(input_norm.weight, input_norm.eps)
    hidden = feed_forward.gate_up.make_normed(middle_norm.weight, middle_norm.eps)
    if heads is None or hidden is None:
        return None
    return FusedPreNormLayer(heads, attention, hidden, feed_forward)


class SingleBlockLayer:
    """residual + block(norm(residual)), of one block."""

    def __init__(self, build: ModelBuild, name: str, index: int, block: Block) -> None:
        self._norm = norm_of(
            build, f"{name}.{build.config.names.input_norm}", build.config.hidden_size
        )
        self._run: Callable[[Tensor, Rotary, ForwardBatch], Tensor]
        if block in ("attention", "recurrent"):
            self._run = _mixer(build, name, index)
            return
        feed_forward = feed_forward_of(build, name, index)
        self._run = lambda x, rotary, batch: feed_forward(x, batch)

    def __call__(
        self, x: Tensor | None, residual: Tensor, rotary: Rotary, batch: ForwardBatch
    ) -> Tensor:
        """See `DecoderLayer`."""
        normed = self._norm(residual) if x is None else self._norm(x, residual)
        return self._run(normed, rotary, batch)


class ScaledPreNormLayer(PreNormLayer):
    """residual + m * attention(norm(residual)), and the same around the feed-forward block."""

    def __init__(self, build: ModelBuild, name: str, index: int) -> None:
        super().__init__(build, name, index)
        self._scale = build.kernels.scale_in_place
        self._multiplier = build.config.residual_multiplier

    def __call__(
        self, x: Tensor | None, residual: Tensor, rotary: Rotary, batch: ForwardBatch
    ) -> Tensor:
        """See `DecoderLayer`."""
        normed = self._input_norm(residual) if x is None else self._input_norm(x, residual)
        attended = self._attention(normed, rotary, batch)
        self._scale(attended, self._multiplier)
        output = self._feed_forward(self._middle_norm(attended, residual), batch)
        self._scale(output, self._multiplier)
        return output


class ParallelLayer:
    """residual + attention(norm(residual)) + feed-forward block(norm(residual)), of one norm."""

    def __init__(self, build: ModelBuild, name: str, index: int) -> None:
        size, names = build.config.hidden_size, build.config.names
        self._add = build.kernels.add_in_place
        self._input_norm = norm_of(build, f"{name}.{names.input_norm}", size)
        self._attention = attention_of(build, name, index)
        self._feed_forward = feed_forward_of(build, name, index)

    def __call__(
        self, x: Tensor | None, residual: Tensor, rotary: Rotary, batch: ForwardBatch
    ) -> Tensor:
        """See `DecoderLayer`."""
        normed = self._input_norm(residual) if x is None else self._input_norm(x, residual)
        output = self._attention(normed, rotary, batch)
        self._add(output, self._feed_forward(normed, batch))
        return output


class SandwichNormLayer:
    """residual + norm(attention(norm(residual))), and the same around the feed-forward block."""

    def __init__(self, build: ModelBuild, name: str, index: int) -> None:
        size, names = build.config.hidden_size, build.config.names
        self._input_norm = norm_of(build, f"{name}.{names.input_norm}", size)
        self._attention = attention_of(build, name, index)
        self._attended_norm = norm_of(build, f"{name}.{names.attended_norm}", size)
        self._middle_norm = norm_of(build, f"{name}.{names.middle_norm}", size)
        self._feed_forward = feed_forward_of(build, name, index)
        self._output_norm = norm_of(build, f"{name}.{names.output_norm}", size)

    def __call__(
        self, x: Tensor | None, residual: Tensor, rotary: Rotary, batch: ForwardBatch
    ) -> Tensor:
        """See `DecoderLayer`."""
        normed = self._input_norm(residual) if x is None else self._input_norm(x, residual)
        attended = self._attended_norm(self._attention(normed, rotary, batch))
        return self._output_norm(self._feed_forward(self._middle_norm(attended, residual), batch))


class PostNormLayer:
    """residual + norm(attention(residual)), and the same around the feed-forward block."""

    def __init__(self, build: ModelBuild, name: str, index: int) -> None:
        size, names = build.config.hidden_size, build.config.names
        self._add = build.kernels.add_in_place
        self._attention = attention_of(build, name, index)
        self._attended_norm = norm_of(build, f"{name}.{names.attended_norm}", size)
        self._feed_forward = feed_forward_of(build, name, index)
        self._output_norm = norm_of(build, f"{name}.{names.output_norm}", size)

    def __call__(
        self, x: Tensor | None, residual: Tensor, rotary: Rotary, batch: ForwardBatch
    ) -> Tensor:
        """See `DecoderLayer`."""
        if x is not None:
            self._add(residual, x)
        self._add(residual, self._attended_norm(self._attention(residual, rotary, batch)))
        return self._output_norm(self._feed_forward(residual, batch))


def _mixer(build: ModelBuild, layer: str, index: int) -> Callable[..., Tensor]:
    """A layer's attention, or what it has in its place."""
    recurrent = build.config.recurrent
    if recurrent is None or index not in recurrent.layers:
        return attention_of(build, layer, index)
    mix = recurrent_layer(build, f"{layer}.{build.config.names.recurrence}", index)
    # One token's state follows from the one before: where ranks divide tokens, each computes all.
    return lambda x, rotary, batch: batch.tokens.take(mix(batch.tokens.gather(x), batch))


def attention_of(
    build: ModelBuild, layer: str, index: int, in_features: int | None = None
) -> Attention | LatentAttention:
    """A layer's attention block. in_features: of the input; None: hidden_size."""
    name = f"{layer}.{build.config.names.attention}"
    if build.config.latent is not None:
        assert in_features is None, "it has the hidden size"
        return LatentAttention(build, name, index)
    return Attention(build, name, index, in_features)
