"""Qwen3: a Llama that norms each query and key head before the rotation."""

from __future__ import annotations

from .decoder import Decoder
from .layers.attention import Attention
from .layers.build import ModelBuild
from .layers.mlp import GatedMLP
from .layers.norm import QueryKeyNorm
from .pre_norm import PreNormLayer


class Qwen3ForCausalLM(Decoder):
    def __init__(self, build: ModelBuild) -> None:
        super().__init__(build, qwen3_layer)


def qwen3_layer(build: ModelBuild, name: str, index: int) -> PreNormLayer:
    attention = qwen3_attention(build, name, index)
    return PreNormLayer(build, name, attention, GatedMLP(build, f"{name}.mlp"))


def qwen3_attention(build: ModelBuild, name: str, index: int) -> Attention:
    """name: of the layer."""
    block = f"{name}.self_attn"
    return Attention(build, block, index, query_key_norm=QueryKeyNorm(build, block))
