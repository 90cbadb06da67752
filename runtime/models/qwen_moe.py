"""Qwen2-MoE and Qwen3-MoE: Qwen2's and Qwen3's attention, experts in some layers; Qwen2-MoE has a
shared expert behind a gate."""

from __future__ import annotations

from .decoder import Decoder
from .layers.attention import Attention
from .layers.build import ModelBuild
from .layers.experts import ExpertNames, feed_forward_of
from .pre_norm import PreNormLayer
from .qwen3 import qwen3_attention

_QWEN2_NAMES = ExpertNames(shared="shared_expert")


class Qwen2MoeForCausalLM(Decoder):
    def __init__(self, build: ModelBuild) -> None:
        super().__init__(build, qwen2_moe_layer)


class Qwen3MoeForCausalLM(Decoder):
    def __init__(self, build: ModelBuild) -> None:
        super().__init__(build, qwen3_moe_layer)


def qwen2_moe_layer(build: ModelBuild, name: str, index: int) -> PreNormLayer:
    attention = Attention(build, f"{name}.self_attn", index)
    return PreNormLayer(build, name, attention, feed_forward_of(build, name, index, _QWEN2_NAMES))


def qwen3_moe_layer(build: ModelBuild, name: str, index: int) -> PreNormLayer:
    attention = qwen3_attention(build, name, index)
    return PreNormLayer(build, name, attention, feed_forward_of(build, name, index))
