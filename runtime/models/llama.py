"""The Llama family: RMSNorm, rotary attention with grouped KV heads, gated MLP.

Llama, Mistral, Qwen2, SmolLM3 and the first Gemma differ only in what the config says: biases,
windows, which layers rotate, activation. Layers are plain objects that hold prepared kernels;
everything a step needs comes in through the call.
"""

from __future__ import annotations

from .decoder import Decoder
from .layers.attention import Attention
from .layers.build import ModelBuild
from .layers.mlp import GatedMLP
from .pre_norm import PreNormLayer


class LlamaForCausalLM(Decoder):
    def __init__(self, build: ModelBuild) -> None:
        super().__init__(build, llama_layer)


def llama_layer(build: ModelBuild, name: str, index: int) -> PreNormLayer:
    attention = Attention(build, f"{name}.self_attn", index)
    return PreNormLayer(build, name, attention, GatedMLP(build, f"{name}.mlp"))
