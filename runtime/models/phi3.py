"""Phi-3, Phi-4 and Phi-4-mini: a Llama whose checkpoints hold qkv as one matrix, gates and ups as
another."""

from __future__ import annotations

from .decoder import Decoder
from .layers.attention import Attention
from .layers.build import ModelBuild
from .layers.mlp import GatedMLP
from .pre_norm import PreNormLayer


class Phi3ForCausalLM(Decoder):
    def __init__(self, build: ModelBuild) -> None:
        super().__init__(build, phi3_layer)


def phi3_layer(build: ModelBuild, name: str, index: int) -> PreNormLayer:
    attention = Attention(build, f"{name}.self_attn", index, is_fused=True)
    return PreNormLayer(build, name, attention, GatedMLP(build, f"{name}.mlp", is_fused=True))
