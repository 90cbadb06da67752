"""Granite: a Llama that scales what each block adds. (Its embedding, scores and logits are scaled
too: the config's.)"""

from __future__ import annotations

from torch import Tensor

from .decoder import Decoder
from .forward_batch import ForwardBatch
from .layers.attention import Attention
from .layers.build import ModelBuild
from .layers.mlp import GatedMLP
from .layers.norm import RMSNorm
from .layers.rotary import Rotary


class GraniteForCausalLM(Decoder):
    def __init__(self, build: ModelBuild) -> None:
        super().__init__(build, GraniteLayer)


class GraniteLayer:
    """residual + m * attention(norm(residual)), and the same around the MLP."""

    def __init__(self, build: ModelBuild, name: str, index: int) -> None:
        size = build.config.hidden_size
        self._scale = build.kernels.scale_in_place
        self._multiplier = build.config.residual_multiplier
        self._input_norm = RMSNorm(build, f"{name}.input_layernorm", size)
        self._attention = Attention(build, f"{name}.self_attn", index)
        self._mlp_norm = RMSNorm(build, f"{name}.post_attention_layernorm", size)
        self._mlp = GatedMLP(build, f"{name}.mlp")

    def __call__(
        self, x: Tensor | None, residual: Tensor, rotary: Rotary, batch: ForwardBatch
    ) -> Tensor:
        """See `decoder.DecoderLayer`."""
        normed = self._input_norm(residual) if x is None else self._input_norm(x, residual)
        attended = self._attention(normed, rotary, batch)
        self._scale(attended, self._multiplier)
        output = self._mlp(self._mlp_norm(attended, residual), batch)
        self._scale(output, self._multiplier)
        return output
