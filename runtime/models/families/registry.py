"""Selects the reader of config.json by the name in its `architectures`.

A new family is one reader and one line here. The reader specifies the layers in the
`DecoderConfig`; only a family with a new kind of layer adds a module in `models/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ....errors import ModelLoadError
from ...checkpoint.config.fields import Fields
from ...checkpoint.config.model_config import DecoderConfig
from ...checkpoint.config.score_fields import ScoreLabels
from .cohere import read_cohere, read_cohere2
from .deepseek import read_deepseek_v2, read_deepseek_v3, read_deepseek_v32, read_youtu
from .ernie import read_ernie, read_ernie_moe
from .exaone import read_exaone4
from .gemma import read_gemma, read_gemma2, read_gemma3, read_gemma3_with_images
from .gemma3n import read_gemma3n, read_gemma3n_with_images
from .gemma4 import read_gemma4, read_gemma4_with_images
from .glm import read_glm, read_glm4
from .glm_moe import (
    read_dots1,
    read_glm4_moe,
    read_glm4_moe_lite,
    read_glm_moe_dsa,
    read_solar_open,
)
from .gpt_oss import read_gpt_oss
from .granite import read_granite, read_granite_hybrid, read_granite_moe
from .hunyuan import read_hunyuan, read_hunyuan_moe
from .internlm import read_internlm3
from .kimi_linear import read_kimi_linear
from .kin import nearest_kin
from .lfm2 import read_lfm2, read_lfm2_moe
from .llama import read_arcee, read_cwm, read_helium, read_iquest_coder, read_llama
from .llama4 import read_llama4, read_llama4_with_images
from .minimax import read_minimax_m2
from .mistral import read_ministral3, read_mistral, read_mistral_with_images
from .mixtral import read_mixtral
from .nemotron import read_nemotron, read_nemotron_hybrid
from .olmo import read_olmo2, read_olmo3
from .olmoe import read_olmoe
from .phi import read_phi
from .phi3 import read_phi3
from .qwen import read_mimo, read_qwen2, read_qwen3
from .qwen_moe import read_qwen2_moe, read_qwen3_moe
from .qwen_next import (
    read_qwen3_5,
    read_qwen3_5_moe,
    read_qwen3_5_moe_with_images,
    read_qwen3_5_with_images,
    read_qwen3_next,
)
from .qwen_vl import read_qwen2_5_vl, read_qwen3_vl, read_qwen3_vl_moe
from .seed_oss import read_seed_oss
from .smollm3 import read_smollm3
from .stablelm import read_stablelm
from .starcoder2 import read_starcoder2

Reader = Callable[[Fields, str], DecoderConfig]
"""(config.json, the architecture's name) -> the model; raises ModelLoadError."""

ARCHITECTURES: dict[str, Reader] = {
    "LlamaForCausalLM": read_llama,
    "InternLM3ForCausalLM": read_internlm3,
    "IQuestCoderForCausalLM": read_iquest_coder,
    "CwmForCausalLM": read_cwm,
    "SeedOssForCausalLM": read_seed_oss,
    "ArceeForCausalLM": read_arcee,
    "HeliumForCausalLM": read_helium,
    "MistralForCausalLM": read_mistral,
    "MinistralForCausalLM": read_mistral,
    "Ministral3ForCausalLM": read_ministral3,
    "Mistral3ForConditionalGeneration": read_mistral_with_images,
    "Qwen2ForCausalLM": read_qwen2,
    "MiMoForCausalLM": read_mimo,
    "Qwen3ForCausalLM": read_qwen3,
    "SmolLM3ForCausalLM": read_smollm3,
    "GemmaForCausalLM": read_gemma,
    "Gemma2ForCausalLM": read_gemma2,
    "Gemma3ForCausalLM": read_gemma3,
    "Gemma3ForConditionalGeneration": read_gemma3_with_images,
    "Gemma3nForCausalLM": read_gemma3n,
    "Gemma3nForConditionalGeneration": read_gemma3n_with_images,
    "Gemma4ForCausalLM": read_gemma4,
    "Gemma4ForConditionalGeneration": read_gemma4_with_images,
    "Exaone4ForCausalLM": read_exaone4,
    "CohereForCausalLM": read_cohere,
    "Cohere2ForCausalLM": read_cohere2,
    "StableLmForCausalLM": read_stablelm,
    "Starcoder2ForCausalLM": read_starcoder2,
    "PhiForCausalLM": read_phi,
    "Phi3ForCausalLM": read_phi3,
    "Olmo2ForCausalLM": read_olmo2,
    "Olmo3ForCausalLM": read_olmo3,
    "GraniteForCausalLM": read_granite,
    "GlmForCausalLM": read_glm,
    "Glm4ForCausalLM": read_glm4,
    "Ernie4_5ForCausalLM": read_ernie,
    "Ernie4_5_ForCausalLM": read_ernie,
    "Ernie4_5_MoeForCausalLM": read_ernie_moe,
    "HunYuanDenseV1ForCausalLM": read_hunyuan,
    "HunYuanMoEV1ForCausalLM": read_hunyuan_moe,
    "GraniteMoeForCausalLM": read_granite_moe,
    "GraniteMoeSharedForCausalLM": read_granite_moe,
    "GraniteMoeHybridForCausalLM": read_granite_hybrid,
    "MixtralForCausalLM": read_mixtral,
    "GptOssForCausalLM": read_gpt_oss,
    "Qwen2MoeForCausalLM": read_qwen2_moe,
    "Qwen3MoeForCausalLM": read_qwen3_moe,
    "OlmoeForCausalLM": read_olmoe,
    "Qwen3NextForCausalLM": read_qwen3_next,
    "Qwen3_5ForCausalLM": read_qwen3_5,
    "Qwen3_5ForConditionalGeneration": read_qwen3_5_with_images,
    "Qwen3_5MoeForCausalLM": read_qwen3_5_moe,
    "Qwen3_5MoeForConditionalGeneration": read_qwen3_5_moe_with_images,
    "Qwen2_5_VLForConditionalGeneration": read_qwen2_5_vl,
    "Qwen3VLForConditionalGeneration": read_qwen3_vl,
    "Qwen3VLMoeForConditionalGeneration": read_qwen3_vl_moe,
    "NemotronForCausalLM": read_nemotron,
    "NemotronHForCausalLM": read_nemotron_hybrid,
    "KimiLinearForCausalLM": read_kimi_linear,
    "Lfm2ForCausalLM": read_lfm2,
    "Lfm2MoeForCausalLM": read_lfm2_moe,
    "DeepseekV2ForCausalLM": read_deepseek_v2,
    "DeepseekV3ForCausalLM": read_deepseek_v3,
    "DeepseekV32ForCausalLM": read_deepseek_v32,
    "YoutuForCausalLM": read_youtu,
    "Dots1ForCausalLM": read_dots1,
    "SolarOpenForCausalLM": read_solar_open,
    "Glm4MoeForCausalLM": read_glm4_moe,
    "Glm4MoeLiteForCausalLM": read_glm4_moe_lite,
    "GlmMoeDsaForCausalLM": read_glm_moe_dsa,
    "MiniMaxM2ForCausalLM": read_minimax_m2,
    "Llama4ForCausalLM": read_llama4,
    "Llama4ForConditionalGeneration": read_llama4_with_images,
}


_MAX_NAME_CHARS = 100  # of a name that is shown


def read_family(config: Fields) -> DecoderConfig:
    """Raises ModelLoadError for an architecture that is not implemented, or for a bad field."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise config.fail("architectures", "a list with the architecture's name")
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name](config, name)
        whole = _whole_name(name)
        if whole is not None:
            return _bare(ARCHITECTURES[whole](config, whole), config, name)
    raise ModelLoadError(f"{config.file}: {unknown_architecture(names[0], config.values)}")


_BARE, _CLASSIFIER, _WHOLE = "Model", "ForSequenceClassification", "ForCausalLM"


def _whole_name(name: str) -> str | None:
    """The family of a decoder without an output projection; None: it is no such one."""
    for task in (_CLASSIFIER, _BARE):
        whole = f"{name.removesuffix(task)}{_WHOLE}"
        if name.endswith(task) and whole in ARCHITECTURES:
            return whole
    return None


def _bare(decoder: DecoderConfig, config: Fields, name: str) -> DecoderConfig:
    labels = ScoreLabels.of(config) if name.endswith(_CLASSIFIER) else None
    # Nobody asks for logits; the embedding takes the place of what would give them.
    return replace(
        decoder, architecture=name, labels=labels, is_bare=True, tie_word_embeddings=True
    )


def unknown_architecture(name: str, config: Mapping[str, Any]) -> str:
    """The error text: the nearest family and what it lacks, and all names that exist."""
    known = ", ".join(sorted(ARCHITECTURES))
    shown = name[:_MAX_NAME_CHARS]
    return (
        f"architecture {shown!r} is not supported{_kin(name, config)}{_own_code(config)}; "
        f"supported are: {known}"
    )


def _kin(name: str, config: Mapping[str, Any]) -> str:
    kin = nearest_kin(name, config, ARCHITECTURES)
    if kin is None:
        return ""
    without = f", which has no {', no '.join(kin.missing)}" if kin.missing else ""
    return f" (nearest: {kin.architecture}{without})"


def _own_code(config: Mapping[str, Any]) -> str:
    return ", and the checkpoint's own code (auto_map) is never run" if "auto_map" in config else ""
