"""OLMo 2 and 3: norms after the blocks instead of before, and one of all query heads together, and
of all key heads. (OLMo 3 has windows too, and two rotary embeddings: the config's.)"""

from __future__ import annotations

from torch import Tensor

from .decoder import Decoder
from .forward_batch import ForwardBatch
from .layers.attention import Attention
from .layers.build import ModelBuild
from .layers.mlp import GatedMLP
from .layers.norm import QueryKeyNorm, RMSNorm
from .layers.rotary import Rotary


class Olmo2ForCausalLM(Decoder):
    def __init__(self, build: ModelBuild) -> None:
        super().__init__(build, Olmo2Layer)


class Olmo2Layer:
    """residual + norm(attention(residual)), and the same around the MLP."""

    def __init__(self, build: ModelBuild, name: str, index: int) -> None:
        size, attention = build.config.hidden_size, f"{name}.self_attn"
        norm = QueryKeyNorm(build, attention, is_whole=True)
        self._add = build.kernels.add_in_place
        self._attention = Attention(build, attention, index, query_key_norm=norm)
        self._attended_norm = RMSNorm(build, f"{name}.post_attention_layernorm", size)
        self._mlp = GatedMLP(build, f"{name}.mlp")
        self._output_norm = RMSNorm(build, f"{name}.post_feedforward_layernorm", size)

    def __call__(
        self, x: Tensor | None, residual: Tensor, rotary: Rotary, batch: ForwardBatch
    ) -> Tensor:
        """See `decoder.DecoderLayer`."""
        if x is not None:
            self._add(residual, x)
        self._add(residual, self._attended_norm(self._attention(residual, rotary, batch)))
        return self._output_norm(self._mlp(residual, batch))
