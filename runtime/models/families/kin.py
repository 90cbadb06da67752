"""Which supported family a model that is not supported is nearest to, and what that one lacks.

By name (Qwen3Next is a Qwen) and by what config.json tells of the layers. It is for an error's text
alone: no model is ever read as its kin.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]

_DECODER = re.compile(r"(ForCausalLM|ForConditionalGeneration|LMHeadModel)$")
_STEM = re.compile(r"[A-Z]+(?![a-z])|[A-Z][a-z]*")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SHARED = ("n_shared_experts", "num_shared_experts", "shared_expert_intermediate_size",
           "moe_num_shared_experts", "num_experts_shared")  # fmt: skip
_RECURRENT = ("ssm_", "rwkv", "time_mix", "state_size", "time_step_rank", "rescale_every")
_SAME_FAMILY = 3.0  # how many traits the same name outweighs; guess
# GPT-2, GPT-NeoX and gpt-oss have the word alone in common; so have Kimi K2 and Kimi Linear.
_NO_FAMILY = ("gpt", "kimi")
_ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu2")


@dataclass(frozen=True, slots=True)
class Trait:
    """Something of a model that its config.json tells."""

    label: str
    is_told_by: Callable[[Config], bool]


def _has_any(*names: str) -> Callable[[Config], bool]:
    return lambda config: any(config.get(name) for name in names)


def _number(config: Config, *names: str) -> float:
    given = [config.get(name) for name in names]
    values = [v for each in given for v in (each if isinstance(each, list) else [each])]
    return max((v for v in values if isinstance(v, int | float)), default=0)


def _list(config: Config, name: str) -> list[Any]:
    value = config.get(name)
    return value if isinstance(value, list) else []


def _layer_types(config: Config) -> list[Any]:
    return _list(config, "layer_types")


def _has_windows(config: Config) -> bool:
    is_on = config.get("use_sliding_window", True) and config.get("sliding_window")
    return bool(is_on) or "sliding_attention" in _layer_types(config)


def _rotates_in_part(config: Config) -> bool:
    ropes = (config, config.get("rope_parameters"), config.get("rope_scaling"))
    factors = (r.get("partial_rotary_factor") for r in ropes if isinstance(r, Mapping))
    return any(isinstance(factor, int | float) and 0 < factor < 1 for factor in factors)


EXPERTS = Trait("experts", lambda config: _number(config, *_EXPERTS) > 1)
SHARED = Trait("shared experts", _has_any(*_SHARED))
GROUPS = Trait("experts in groups", lambda config: _number(config, "n_group") > 1)
LATENT = Trait("latent attention", _has_any("kv_lora_rank"))
INDEXED = Trait("attention to chosen tokens", _has_any("index_topk", "index_n_heads"))
WINDOWS = Trait("sliding windows", _has_windows)
CONVOLUTIONS = Trait("short convolutions", _has_any("conv_L_cache"))
DELTA_NETS = Trait("gated delta nets", _has_any("linear_num_value_heads"))
CHANNEL_DECAYS = Trait(
    "delta rule with decays of channels", _has_any("linear_attn_config", "linear_num_heads")
)
MAMBA_2 = Trait("Mamba-2", _has_any("mamba_n_heads", "mamba_num_heads"))
PART = Trait("heads rotated in part", _rotates_in_part)
NORMED = Trait("normed heads", _has_any("use_qk_norm", "qk_layernorm", "qk_norm"))
CAPS = Trait("soft caps", _has_any("attn_logit_softcapping", "final_logit_softcapping"))
MULTIPLIERS = Trait("multipliers", _has_any("embedding_multiplier", "residual_multiplier",
                                            "attention_multiplier"))  # fmt: skip
CHUNKS = Trait("attention in chunks", _has_any("attention_chunk_size"))
OF_LAYERS = Trait("embeddings for each layer", _has_any("hidden_size_per_layer_input"))
SHARED_KV = Trait("KV shared by layers", _has_any("num_kv_shared_layers"))
SENSES = Trait("images or sound", _has_any("vision_config", "audio_config", "visual"))
ENCODER = Trait("encoder", _has_any("is_encoder_decoder", "encoder_layers"))
LAYER_NORM = Trait("norms with means", _has_any("layer_norm_eps", "layer_norm_epsilon"))
PARALLEL = Trait(
    "attention and MLP side by side", _has_any("use_parallel_residual", "parallel_attn")
)
POSITIONS = Trait("positions other than rotary ones", _has_any("n_positions", "alibi"))
ACTIVATION = Trait(
    "such an activation", lambda config: config.get("hidden_act", "silu") not in _ACTIVATIONS
)
_MIXERS = {
    "conv": (CONVOLUTIONS,),
    "linear_attention": (DELTA_NETS, CHANNEL_DECAYS),
    "mamba": (MAMBA_2,),
}


def _has_other_mixers(config: Config) -> bool:
    known = [kind for kind, traits in _MIXERS.items() if any(t.is_told_by(config) for t in traits)]
    kinds = {kind for kind in _layer_types(config) if not _is_attention(kind)}
    if kinds.difference(known) or 0 in _list(config, "attn_type_list"):
        return True
    names = _RECURRENT if "mamba" in known else (*_RECURRENT, "mamba_")
    return any(str(name).startswith(names) for name in config)


def _is_attention(kind: object) -> bool:
    return str(kind).endswith("attention") and kind != "linear_attention"


RECURRENT = Trait("recurrent layers of another kind", _has_other_mixers)
TRAITS = (EXPERTS, SHARED, GROUPS, LATENT, INDEXED, WINDOWS, CONVOLUTIONS, DELTA_NETS,
          CHANNEL_DECAYS, MAMBA_2, RECURRENT, CHUNKS, OF_LAYERS, SHARED_KV, PART, NORMED, CAPS,
          MULTIPLIERS, SENSES, ENCODER, LAYER_NORM, PARALLEL, POSITIONS, ACTIVATION)  # fmt: skip
# What a layer is made of says more than the rest.
_MAIN = frozenset((LATENT, CONVOLUTIONS, DELTA_NETS, CHANNEL_DECAYS, MAMBA_2, RECURRENT))
_MAIN_WEIGHT = 3  # guess

_GEMMA_4 = frozenset((EXPERTS, WINDOWS, CAPS, PART, OF_LAYERS, SHARED_KV))
_GEMMA_3N = frozenset((WINDOWS, CAPS, OF_LAYERS, SHARED_KV))
# What a family has beyond a plain decoder's layers, as Llama's; one that is not here has nothing.
_OF_FAMILY: dict[str, frozenset[Trait]] = {
    "MistralForCausalLM": frozenset((WINDOWS,)),
    "MinistralForCausalLM": frozenset((WINDOWS,)),
    "Ministral3ForCausalLM": frozenset((WINDOWS,)),
    "Mistral3ForConditionalGeneration": frozenset((WINDOWS, SENSES)),
    "CwmForCausalLM": frozenset((WINDOWS,)),
    "Qwen2ForCausalLM": frozenset((WINDOWS,)),
    "MiMoForCausalLM": frozenset((WINDOWS,)),
    "Qwen3ForCausalLM": frozenset((WINDOWS, NORMED)),
    "SmolLM3ForCausalLM": frozenset((WINDOWS,)),
    "Gemma2ForCausalLM": frozenset((WINDOWS, CAPS)),
    "Gemma3ForCausalLM": frozenset((WINDOWS, NORMED)),
    "Gemma3ForConditionalGeneration": frozenset((WINDOWS, NORMED, SENSES)),
    "Exaone4ForCausalLM": frozenset((WINDOWS, NORMED)),
    "CohereForCausalLM": frozenset((LAYER_NORM, PARALLEL, NORMED)),
    "Cohere2ForCausalLM": frozenset((LAYER_NORM, PARALLEL, WINDOWS)),
    "StableLmForCausalLM": frozenset((LAYER_NORM, PARALLEL, PART, NORMED)),
    "Starcoder2ForCausalLM": frozenset((LAYER_NORM, WINDOWS)),
    "PhiForCausalLM": frozenset((LAYER_NORM, PARALLEL, PART)),
    "Phi3ForCausalLM": frozenset((WINDOWS, PART)),
    "Olmo2ForCausalLM": frozenset((NORMED,)),
    "Olmo3ForCausalLM": frozenset((WINDOWS, NORMED)),
    "GraniteForCausalLM": frozenset((MULTIPLIERS,)),
    "GlmForCausalLM": frozenset((PART,)),
    "Glm4ForCausalLM": frozenset((PART,)),
    "YoutuForCausalLM": frozenset((LATENT,)),
    "Dots1ForCausalLM": frozenset((EXPERTS, SHARED, GROUPS, WINDOWS, NORMED)),
    "SolarOpenForCausalLM": frozenset((EXPERTS, SHARED, GROUPS)),
    "Ernie4_5_MoeForCausalLM": frozenset((EXPERTS, SHARED)),
    "HunYuanDenseV1ForCausalLM": frozenset((NORMED,)),
    "HunYuanMoEV1ForCausalLM": frozenset((EXPERTS, SHARED, NORMED)),
    "GraniteMoeForCausalLM": frozenset((EXPERTS, MULTIPLIERS)),
    "GraniteMoeSharedForCausalLM": frozenset((EXPERTS, MULTIPLIERS)),
    "GraniteMoeHybridForCausalLM": frozenset((EXPERTS, MULTIPLIERS, MAMBA_2)),
    "MixtralForCausalLM": frozenset((EXPERTS, WINDOWS)),
    "Qwen2MoeForCausalLM": frozenset((EXPERTS, SHARED, WINDOWS)),
    "Qwen3MoeForCausalLM": frozenset((EXPERTS, NORMED)),
    "OlmoeForCausalLM": frozenset((EXPERTS, NORMED)),
    "GptOssForCausalLM": frozenset((EXPERTS, WINDOWS)),
    "Qwen3NextForCausalLM": frozenset((EXPERTS, SHARED, DELTA_NETS, PART, NORMED)),
    "Qwen3_5ForCausalLM": frozenset((DELTA_NETS, PART, NORMED)),
    "Qwen3_5ForConditionalGeneration": frozenset((DELTA_NETS, PART, NORMED, SENSES)),
    "Qwen3_5MoeForCausalLM": frozenset((EXPERTS, SHARED, DELTA_NETS, PART, NORMED)),
    "Qwen3_5MoeForConditionalGeneration": frozenset(
        (EXPERTS, SHARED, DELTA_NETS, PART, NORMED, SENSES)
    ),
    "Lfm2ForCausalLM": frozenset((CONVOLUTIONS, NORMED)),
    "Lfm2MoeForCausalLM": frozenset((EXPERTS, CONVOLUTIONS, NORMED)),
    "DeepseekV2ForCausalLM": frozenset((EXPERTS, SHARED, GROUPS, LATENT)),
    "DeepseekV3ForCausalLM": frozenset((EXPERTS, SHARED, GROUPS, LATENT)),
    "DeepseekV32ForCausalLM": frozenset((EXPERTS, SHARED, GROUPS, LATENT, INDEXED)),
    "Glm4MoeForCausalLM": frozenset((EXPERTS, SHARED, GROUPS, PART, NORMED)),
    "Glm4MoeLiteForCausalLM": frozenset((EXPERTS, SHARED, GROUPS, LATENT)),
    "GlmMoeDsaForCausalLM": frozenset((EXPERTS, SHARED, GROUPS, LATENT, INDEXED)),
    "MiniMaxM2ForCausalLM": frozenset((EXPERTS, PART, NORMED)),
    "Gemma3nForCausalLM": _GEMMA_3N,
    "Gemma3nForConditionalGeneration": _GEMMA_3N | {SENSES},
    "Gemma4ForCausalLM": _GEMMA_4,
    "Gemma4ForConditionalGeneration": _GEMMA_4 | {SENSES},
    "KimiLinearForCausalLM": frozenset((EXPERTS, SHARED, LATENT, CHANNEL_DECAYS)),
    "NemotronForCausalLM": frozenset((PART,)),
    "NemotronHForCausalLM": frozenset((EXPERTS, SHARED, MAMBA_2)),
    "Llama4ForCausalLM": frozenset((EXPERTS, CHUNKS, NORMED)),
    "Llama4ForConditionalGeneration": frozenset((EXPERTS, CHUNKS, NORMED, SENSES)),
}


@dataclass(frozen=True, slots=True)
class Kin:
    """The nearest family, and the labels of what the model has beyond it, as far as is told."""

    architecture: str
    missing: tuple[str, ...]


def nearest_kin(name: str, config: Config, known: Iterable[str]) -> Kin | None:
    """The nearest of the `known` architectures; None for what is no decoder of text."""
    if not _DECODER.search(name):
        return None
    inner = config.get("text_config")
    whole = {**config, **inner} if isinstance(inner, Mapping) else config
    told = frozenset(trait for trait in TRAITS if trait.is_told_by(whole))
    best = max(known, key=lambda other: _nearness(name, other, told), default=None)
    if best is None:
        return None
    lacking = told - _OF_FAMILY.get(best, frozenset())
    return Kin(best, tuple(trait.label for trait in TRAITS if trait in lacking))


def _nearness(name: str, other: str, told: frozenset[Trait]) -> tuple[float, int]:
    """Traits that the other lacks count, those that it has beside them half; names break ties."""
    has = _OF_FAMILY.get(other, frozenset())
    is_family = _stem(name) == _stem(other) not in _NO_FAMILY
    distance = _weight(told - has) + _weight(has - told) / 2 - (_SAME_FAMILY if is_family else 0)
    return -distance, next((i for i, (a, b) in enumerate(zip(name, other)) if a != b), len(name))


def _weight(traits: Iterable[Trait]) -> int:
    return sum(_MAIN_WEIGHT if trait in _MAIN else 1 for trait in traits)


def _stem(name: str) -> str:
    """The first word: Qwen of Qwen3MoeForCausalLM."""
    found = _STEM.match(name)
    return (found[0] if found else name).lower()
