"""DeepSeek-V2 and DeepSeek-V3: latent attention, shared experts beside the chosen ones, some dense
layers first. What tells them apart is how experts are chosen, which the config says."""

from __future__ import annotations

from .decoder import Decoder
from .layers.build import ModelBuild
from .layers.experts import feed_forward_of
from .layers.latent_attention import LatentAttention
from .pre_norm import PreNormLayer


class DeepseekForCausalLM(Decoder):
    def __init__(self, build: ModelBuild) -> None:
        super().__init__(build, deepseek_layer)
        # V3 has one layer more, which predicts a token further for speculative decoding.
        build.source.skip(f"model.layers.{build.config.num_layers}.")


def deepseek_layer(build: ModelBuild, name: str, index: int) -> PreNormLayer:
    attention = LatentAttention(build, f"{name}.self_attn", index)
    return PreNormLayer(build, name, attention, feed_forward_of(build, name, index))
