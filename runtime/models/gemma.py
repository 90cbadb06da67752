"""Gemma 2 and 3: norms before and after each block; Gemma 3 norms queries and keys too.

Soft caps, windows in every second layer (five of six in Gemma 3), the two rotary bases of Gemma 3,
norms by 1 + weight and the scale of the embedding come with the config. The first Gemma is a Llama
with the last two.
"""

from __future__ import annotations

import logging

from torch import Tensor

from .decoder import Decoder
from .forward_batch import ForwardBatch
from .layers.attention import Attention
from .layers.build import ModelBuild
from .layers.mlp import GatedMLP
from .layers.norm import QueryKeyNorm, RMSNorm
from .layers.rotary import Rotary

logger = logging.getLogger(__name__)


class Gemma2ForCausalLM(Decoder):
    def __init__(self, build: ModelBuild) -> None:
        super().__init__(build, Gemma2Layer)


class Gemma3ForCausalLM(Decoder):
    def __init__(self, build: ModelBuild) -> None:
        super().__init__(build, Gemma3Layer)


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The text half of a checkpoint that sees images too; these are not read."""

    def __init__(self, build: ModelBuild) -> None:
        super().__init__(build)
        for part in ("vision_tower.", "multi_modal_projector."):
            build.source.skip(part)
        logger.info("%s: text only, its vision tower is not loaded", build.config.architecture)


class Gemma2Layer:
    """residual + norm(attention(norm(residual))), and the same around the MLP."""

    def __init__(
        self,
        build: ModelBuild,
        name: str,
        index: int,
        query_key_norm: QueryKeyNorm | None = None,
    ) -> None:
        size = build.config.hidden_size
        self._input_norm = RMSNorm(build, f"{name}.input_layernorm", size)
        self._attention = Attention(
            build, f"{name}.self_attn", index, query_key_norm=query_key_norm
        )
        self._attended_norm = RMSNorm(build, f"{name}.post_attention_layernorm", size)
        self._mlp_norm = RMSNorm(build, f"{name}.pre_feedforward_layernorm", size)
        self._mlp = GatedMLP(build, f"{name}.mlp")
        self._output_norm = RMSNorm(build, f"{name}.post_feedforward_layernorm", size)

    def __call__(
        self, x: Tensor | None, residual: Tensor, rotary: Rotary, batch: ForwardBatch
    ) -> Tensor:
        """See `decoder.DecoderLayer`."""
        normed = self._input_norm(residual) if x is None else self._input_norm(x, residual)
        attended = self._attended_norm(self._attention(normed, rotary, batch))
        return self._output_norm(self._mlp(self._mlp_norm(attended, residual), batch))


class Gemma3Layer(Gemma2Layer):
    def __init__(self, build: ModelBuild, name: str, index: int) -> None:
        super().__init__(build, name, index, QueryKeyNorm(build, f"{name}.self_attn"))
