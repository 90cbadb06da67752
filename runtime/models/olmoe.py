"""OLMoE: a Llama with experts in every layer, and norms of all query heads and of all key heads
together."""

from __future__ import annotations

from .decoder import Decoder
from .layers.attention import Attention
from .layers.build import ModelBuild
from .layers.experts import feed_forward_of
from .layers.norm import QueryKeyNorm
from .pre_norm import PreNormLayer


class OlmoeForCausalLM(Decoder):
    def __init__(self, build: ModelBuild) -> None:
        super().__init__(build, olmoe_layer)


def olmoe_layer(build: ModelBuild, name: str, index: int) -> PreNormLayer:
    block = f"{name}.self_attn"
    norm = QueryKeyNorm(build, block, is_whole=True)
    attention = Attention(build, block, index, query_key_norm=norm)
    return PreNormLayer(build, name, attention, feed_forward_of(build, name, index))
