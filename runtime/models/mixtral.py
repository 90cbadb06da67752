"""Mixtral: Mistral's attention, experts in every layer."""

from __future__ import annotations

from .decoder import Decoder
from .layers.attention import Attention
from .layers.build import ModelBuild
from .layers.experts import ExpertNames, MixtureOfExperts
from .pre_norm import PreNormLayer

_NAMES = ExpertNames(gate="experts.{}.w1", up="experts.{}.w3", down="experts.{}.w2")


class MixtralForCausalLM(Decoder):
    def __init__(self, build: ModelBuild) -> None:
        super().__init__(build, mixtral_layer)


def mixtral_layer(build: ModelBuild, name: str, index: int) -> PreNormLayer:
    attention = Attention(build, f"{name}.self_attn", index)
    experts = MixtureOfExperts(build, f"{name}.block_sparse_moe", _NAMES)
    return PreNormLayer(build, name, attention, experts)
