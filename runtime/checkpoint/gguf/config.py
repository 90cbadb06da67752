"""Converts GGUF metadata to the config.json and generation_config.json of a checkpoint.

Keys: the GGUF specification and gguf-py's constants.py. For values missing in a file, llama.cpp has
constants in its code of each architecture (src/models/); these are marked here. Torch-free.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from ....errors import ModelLoadError
from .delta_heads import DeltaHeads
from .hyperparameters import Hyperparameters
from .names import EMBEDDING, OUTPUT
from .rope import rope_fields

Config = dict[str, Any]
_DTYPES = {"F32": "float32", "F16": "float16"}


def model_config(model: Hyperparameters) -> Config:
    """The contents of config.json.

    Raises:
        ModelLoadError: an unknown architecture, or missing or invalid metadata.
    """
    architecture = model.architecture
    if architecture not in FAMILIES:
        raise ModelLoadError(f"{model.path}: {_unknown(architecture)}")
    num_heads = model.integer("attention.head_count")
    hidden_size = model.integer("embedding_length")
    head_dim = model.integer("attention.key_length", max(1, hidden_size // num_heads))
    config = {
        "hidden_size": hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": model.kv_heads(num_heads),
        "head_dim": head_dim,
        "intermediate_size": model.integer(
            "feed_forward_length", model.count("expert_feed_forward_length") or None
        ),
        "vocab_size": model.shape(EMBEDDING)[0],
        "max_position_embeddings": model.integer("context_length"),
        "rms_norm_eps": model.number("attention.layer_norm_rms_epsilon", 1e-6),
        "hidden_act": "silu",
        "attention_bias": any(
            model.has_tensor(f"blk.{layer}.attn_q.bias") for layer in range(model.num_layers)
        ),
        "tie_word_embeddings": not model.has_tensor(OUTPUT),
        "dtype": _DTYPES.get(model.format_name(EMBEDDING), "bfloat16"),
        **rope_fields(model, head_dim),
    }
    config |= FAMILIES[architecture](model, config)
    return config | _token_ids(model)


def generation_config(model: Hyperparameters, stop_ids: list[int]) -> Config:
    """The contents of generation_config.json; stop_ids: all tokens that end an answer."""
    fields = model.fields
    config: Config = {"eos_token_id": stop_ids} if stop_ids else {}
    for name, key in _SAMPLING.items():
        value = fields.get(f"general.sampling.{key}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            config[name] = value
    return config


_SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def _unknown(architecture: str) -> str:
    nearest = difflib.get_close_matches(architecture, FAMILIES, n=1, cutoff=0.6)
    hint = f" (nearest: {nearest[0]})" if nearest else ""
    known = ", ".join(sorted(FAMILIES))
    return f"GGUF architecture {architecture!r} is not supported{hint}; supported are: {known}"


def _token_ids(model: Hyperparameters) -> Config:
    """null if the file names none: GGUF does not include the family's default."""
    return {"eos_token_id": model.fields.get("tokenizer.ggml.eos_token_id")}


def _llama(model: Hyperparameters, config: Config) -> Config:
    """Llama, Mistral and Mixtral share a name."""
    if model.count("expert_count"):
        return {
            "architectures": ["MixtralForCausalLM"],
            "num_local_experts": model.integer("expert_count"),
            "num_experts_per_tok": model.integer("expert_used_count"),
            "sliding_window": model.count("attention.sliding_window") or None,
        }
    window = model.count("attention.sliding_window")
    if window:
        return {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    return {
        "architectures": ["LlamaForCausalLM"],
        "mlp_bias": model.has_tensor("blk.0.ffn_up.bias"),
    }


def _qwen2(model: Hyperparameters, config: Config) -> Config:
    return {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False}


def _qwen3(model: Hyperparameters, config: Config) -> Config:
    return {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": False}


def _qwen2_moe(model: Hyperparameters, config: Config) -> Config:
    shared = model.shape("blk.0.ffn_gate_shexp.weight")[0]
    return {
        "architectures": ["Qwen2MoeForCausalLM"],
        "use_sliding_window": False,
        "norm_topk_prob": False,  # llama.cpp's constant
        "shared_expert_intermediate_size": shared,
        **_qwen_experts(model),
    }


def _qwen3_moe(model: Hyperparameters, config: Config) -> Config:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "use_sliding_window": False,
        "norm_topk_prob": True,  # llama.cpp's constant
        **_qwen_experts(model),
    }


def _qwen_experts(model: Hyperparameters) -> Config:
    return {
        "num_experts": model.integer("expert_count"),
        "num_experts_per_tok": model.integer("expert_used_count"),
        "moe_intermediate_size": _expert_size(model, 0),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _expert_size(model: Hyperparameters, layer: int) -> int:
    """From the stack [num_experts, size, hidden_size]: early files have no key for the size."""
    name = f"blk.{layer}.ffn_gate_exps.weight"
    shape = model.shape(name)
    if len(shape) != 3:
        raise ModelLoadError(f"{model.path}: tensor {name!r}: expected 3 axes, found {len(shape)}")
    return shape[1]


_GEMMA = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _gemma(model: Hyperparameters, config: Config) -> Config:
    return {"architectures": ["GemmaForCausalLM"], **_GEMMA}


def _gemma2(model: Hyperparameters, config: Config) -> Config:
    """The defaults are llama.cpp's constants."""
    return {
        "architectures": ["Gemma2ForCausalLM"],
        **_GEMMA,
        "attn_logit_softcapping": model.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": model.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scalar(config, layers_of_27b=46),
        **_windows(model, config, model.integer("attention.sliding_window", 4096), every=2),
    }


def _gemma3(model: Hyperparameters, config: Config) -> Config:
    return {
        "architectures": ["Gemma3ForCausalLM"],
        **_GEMMA,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": model.optional_number("final_logit_softcapping"),
        "query_pre_attn_scalar": _query_scalar(config, layers_of_27b=62),
        "rope_local_base_freq": model.number("rope.freq_base_swa", 10_000.0),
        **_windows(model, config, model.count("attention.sliding_window"), every=6),
    }


def _query_scalar(config: Config, layers_of_27b: int) -> int:
    """llama.cpp's constant: the largest models scale scores by a size other than head_dim."""
    if config["num_hidden_layers"] == layers_of_27b:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _windows(model: Hyperparameters, config: Config, window: int, every: int) -> Config:
    """One layer of `every` has no window, unless the file has a pattern; window 0: none has."""
    num_layers = config["num_hidden_layers"]
    pattern = model.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != num_layers:
            raise model.fail("attention.sliding_window_pattern", f"{num_layers} values")
        has_window = [bool(value) for value in pattern]
    else:
        every = model.integer("attention.sliding_window_pattern", every)
        has_window = [(layer + 1) % every != 0 for layer in range(num_layers)]
    kinds = ["sliding_attention" if window and has else "full_attention" for has in has_window]
    return {"sliding_window": window or None, "layer_types": kinds}


def _phi3(model: Hyperparameters, config: Config) -> Config:
    return {
        "architectures": ["Phi3ForCausalLM"],
        "sliding_window": model.count("attention.sliding_window") or None,
    }


def _olmo2(model: Hyperparameters, config: Config) -> Config:
    window = model.count("attention.sliding_window")
    if not window:
        return {"architectures": ["Olmo2ForCausalLM"]}
    return {"architectures": ["Olmo3ForCausalLM"], **_windows(model, config, window, every=4)}


def _smollm3(model: Hyperparameters, config: Config) -> Config:
    every = 4  # llama.cpp's constant: this layer has no rotary embedding
    return {
        "architectures": ["SmolLM3ForCausalLM"],
        "use_sliding_window": False,
        "no_rope_layer_interval": every,
        "no_rope_layers": [
            int((layer + 1) % every != 0) for layer in range(config["num_hidden_layers"])
        ],
    }


def _granite(model: Hyperparameters, config: Config) -> Config:
    if not model.flag("rope.scaling.finetuned", True):
        raise model.fail("rope.scaling.finetuned", "true: a Granite with rotary embedding")
    return {
        "architectures": ["GraniteForCausalLM"],
        **_multipliers(model, config),
        "mlp_bias": model.has_tensor("blk.0.ffn_up.bias"),
    }


def _multipliers(model: Hyperparameters, config: Config) -> Config:
    return {
        "attention_multiplier": model.optional_number("attention.scale")
        or config["head_dim"] ** -0.5,
        "embedding_multiplier": model.number("embedding_scale", 1.0),
        "residual_multiplier": model.number("residual_scale", 1.0),
        "logits_scaling": model.number("logit_scale", 1.0),
    }


def _deepseek2(model: Hyperparameters, config: Config) -> Config:
    """V2 and V3, which choose experts by softmax and by sigmoid (2 in ggml's gating functions)."""
    is_v3 = model.get("expert_gating_func") == 2
    num_heads = config["num_attention_heads"]
    rope_dim = model.integer("rope.dimension_count")
    key_dim = model.integer("attention.key_length_mla", config["head_dim"])
    value_dim = model.integer("attention.value_length")
    num_groups = model.integer("expert_group_count", 1)
    is_grouped = num_groups > 1
    dense = model.count("leading_dense_block_count")
    method = "group_limited_greedy" if is_grouped else "greedy"
    return {
        "architectures": [f"Deepseek{'V3' if is_v3 else 'V2'}ForCausalLM"],
        "num_key_value_heads": num_heads,
        "head_dim": rope_dim,
        "kv_lora_rank": model.integer("attention.kv_lora_rank"),
        "q_lora_rank": model.count("attention.q_lora_rank") or None,
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key_dim - rope_dim,
        "v_head_dim": model.integer("attention.value_length_mla", value_dim),
        "attention_bias": False,
        "first_k_dense_replace": dense,
        "moe_layer_freq": 1,
        "n_routed_experts": model.integer("expert_count"),
        "num_experts_per_tok": model.integer("expert_used_count"),
        "n_shared_experts": model.count("expert_shared_count"),
        "moe_intermediate_size": _expert_size(model, dense),
        "routed_scaling_factor": model.number("expert_weights_scale", 1.0),
        "norm_topk_prob": model.flag("expert_weights_norm", False),
        "scoring_func": "sigmoid" if is_v3 else "softmax",
        "n_group": num_groups,
        "topk_group": model.integer("expert_group_used_count", 1),
        "topk_method": "noaux_tc" if is_v3 else method,
        "rope_interleave": True,
    }


def _mistral3(model: Hyperparameters, config: Config) -> Config:
    """Mistral Small from 3.1 on, and Ministral 3, whose queries are scaled by their position."""
    beta = model.optional_number("attention.temperature_scale")
    if beta is None:
        return _llama(model, config)
    rope = {**(config["rope_scaling"] or {}), "llama_4_scaling_beta": beta}
    return {
        "architectures": ["Ministral3ForCausalLM"],
        "sliding_window": model.count("attention.sliding_window") or None,
        **_rope_parameters(config, rope),
    }


def _gpt_oss(model: Hyperparameters, config: Config) -> Config:
    """Bounds of YaRN are not rounded, as in all of the family."""
    rope = config["rope_scaling"]
    return {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": model.integer("expert_count"),
        "num_experts_per_tok": model.integer("expert_used_count"),
        "intermediate_size": _expert_size(model, 0),
        **_windows(model, config, model.integer("attention.sliding_window"), every=2),
        **_rope_parameters(config, {**rope, "truncate": False} if rope else {}),
    }


def _rope_parameters(config: Config, rope: Config) -> Config:
    """In the newer layout, of which the family's reader has a default."""
    rope = {"rope_type": "default", **rope, "rope_theta": config["rope_theta"]}
    return {"rope_parameters": rope, "rope_scaling": None}


def _qwen3_next(model: Hyperparameters, config: Config) -> Config:
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        **_gated_delta(model, config),
        **_gated_delta_experts(model),
    }


def _qwen3_5(model: Hyperparameters, config: Config) -> Config:
    return {"architectures": ["Qwen3_5ForCausalLM"], **_gated_delta(model, config)}


def _qwen3_5_moe(model: Hyperparameters, config: Config) -> Config:
    return {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        **_gated_delta(model, config),
        **_gated_delta_experts(model),
    }


def _gated_delta(model: Hyperparameters, config: Config) -> Config:
    heads = DeltaHeads.of(model)
    return {
        "linear_conv_kernel_dim": model.integer("ssm.conv_kernel"),
        "linear_key_head_dim": heads.key_dim,
        "linear_value_head_dim": heads.value_dim,
        "linear_num_key_heads": heads.num_keys,
        "linear_num_value_heads": heads.num_values,
        "layer_types": _layer_types(model, "linear_attention"),
        "partial_rotary_factor": _rotated_share(model, config),
    }


def _gated_delta_experts(model: Hyperparameters) -> Config:
    return {
        "norm_topk_prob": True,  # llama.cpp's constant
        "shared_expert_intermediate_size": model.shape("blk.0.ffn_gate_shexp.weight")[0],
        **_qwen_experts(model),
    }


def _layer_types(model: Hyperparameters, recurrent: str) -> list[str]:
    """A layer without queries is a recurrent one."""
    return [
        "full_attention" if model.has_tensor(f"blk.{layer}.attn_q.weight") else recurrent
        for layer in range(model.num_layers)
    ]


def _rotated_share(model: Hyperparameters, config: Config) -> float:
    """Of a head."""
    head_dim: int = config["head_dim"]
    return model.integer("rope.dimension_count", head_dim) / head_dim


def _lfm2(model: Hyperparameters, config: Config) -> Config:
    return {
        "architectures": ["Lfm2ForCausalLM"],
        "norm_eps": config["rms_norm_eps"],
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": model.integer("shortconv.l_cache"),
        "conv_bias": model.has_tensor("blk.0.shortconv.conv.bias"),
        "layer_types": _layer_types(model, "conv"),
    }


def _lfm2_moe(model: Hyperparameters, config: Config) -> Config:
    dense = model.count("leading_dense_block_count")
    return {
        **_lfm2(model, config),
        "architectures": ["Lfm2MoeForCausalLM"],
        "num_dense_layers": dense,
        "num_experts": model.integer("expert_count"),
        "num_experts_per_tok": model.integer("expert_used_count"),
        "moe_intermediate_size": _expert_size(model, dense),
        "norm_topk_prob": model.flag("expert_weights_norm", True),
        "routed_scaling_factor": model.number("expert_weights_scale", 1.0),
        "use_expert_bias": model.has_tensor(f"blk.{dense}.exp_probs_b.bias"),
    }


def _glm4(model: Hyperparameters, config: Config) -> Config:
    """Of a model that sees images rows are in another order, which is not undone."""
    if model.get("rope.dimension_sections") is not None:
        raise model.fail("rope.dimension_sections", "none: a GLM-4 of texts")
    return {
        "architectures": ["Glm4ForCausalLM"],
        "partial_rotary_factor": _rotated_share(model, config),
    }


def _glm4_moe(model: Hyperparameters, config: Config) -> Config:
    dense = model.count("leading_dense_block_count")
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "partial_rotary_factor": _rotated_share(model, config),
        "use_qk_norm": model.has_tensor("blk.0.attn_q_norm.weight"),
        "first_k_dense_replace": dense,
        "n_routed_experts": model.integer("expert_count"),
        "num_experts_per_tok": model.integer("expert_used_count"),
        "n_shared_experts": model.count("expert_shared_count"),
        "moe_intermediate_size": _expert_size(model, dense),
        "routed_scaling_factor": model.number("expert_weights_scale", 1.0),
        "norm_topk_prob": model.flag("expert_weights_norm", True),
        "n_group": model.integer("expert_group_count", 1),
        "topk_group": model.integer("expert_group_used_count", 1),
        "num_nextn_predict_layers": 0,
    }


def _minimax_m2(model: Hyperparameters, config: Config) -> Config:
    return {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "num_local_experts": model.integer("expert_count"),
        "num_experts_per_tok": model.integer("expert_used_count"),
        "intermediate_size": _expert_size(model, 0),
        "partial_rotary_factor": _rotated_share(model, config),
    }


def _exaone4(model: Hyperparameters, config: Config) -> Config:
    window = model.count("attention.sliding_window")
    return {"architectures": ["Exaone4ForCausalLM"], **_windows(model, config, window, every=4)}


def _phi2(model: Hyperparameters, config: Config) -> Config:
    """Biases are in all of its layers, of attention not by a field."""
    return {
        "architectures": ["PhiForCausalLM"],
        "attention_bias": False,
        "hidden_act": "gelu_new",
        **_layer_norm(model, config),
    }


def _stablelm(model: Hyperparameters, config: Config) -> Config:
    return {
        "architectures": ["StableLmForCausalLM"],
        "attention_bias": False,
        "use_qkv_bias": config["attention_bias"],
        "use_parallel_residual": model.flag("use_parallel_residual", False),
        "qk_layernorm": model.has_tensor("blk.0.attn_q_norm.weight"),
        **_layer_norm(model, config),
    }


def _nemotron(model: Hyperparameters, config: Config) -> Config:
    return {
        "architectures": ["NemotronForCausalLM"],
        "hidden_act": "relu2",
        "norm_eps": model.number("attention.layer_norm_epsilon", 1e-5),
        "partial_rotary_factor": _rotated_share(model, config),
        "mlp_bias": model.has_tensor("blk.0.ffn_up.bias"),
    }


def _layer_norm(model: Hyperparameters, config: Config) -> Config:
    return {
        "layer_norm_eps": model.number("attention.layer_norm_epsilon", 1e-5),
        "partial_rotary_factor": _rotated_share(model, config),
    }


def _seed_oss(model: Hyperparameters, config: Config) -> Config:
    return {
        "architectures": ["SeedOssForCausalLM"],
        "attention_out_bias": model.has_tensor("blk.0.attn_output.bias"),
        "mlp_bias": model.has_tensor("blk.0.ffn_up.bias"),
    }


def _granite_hybrid(model: Hyperparameters, config: Config) -> Config:
    num_experts = model.count("expert_count")
    inner, num_heads = model.integer("ssm.inner_size"), model.integer("ssm.time_step_rank")
    kinds = _layer_types(model, "linear_attention")
    first = kinds.index("linear_attention") if "linear_attention" in kinds else 0
    shared = "blk.0.ffn_gate_shexp.weight" if num_experts else "blk.0.ffn_gate.weight"
    return {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        **_multipliers(model, config),
        "position_embedding_type": "rope" if model.flag("rope.scaling.finetuned", True) else "nope",
        "layer_types": kinds,
        "num_local_experts": num_experts,
        "num_experts_per_tok": model.count("expert_used_count"),
        "intermediate_size": _expert_size(model, 0) if num_experts else model.shape(shared)[0],
        "shared_intermediate_size": model.shape(shared)[0],
        "mamba_n_heads": num_heads,
        "mamba_n_groups": model.integer("ssm.group_count"),
        "mamba_d_state": model.integer("ssm.state_size"),
        "mamba_d_conv": model.integer("ssm.conv_kernel"),
        "mamba_d_head": inner // num_heads,
        "mamba_expand": max(1, inner // config["hidden_size"]),
        "mamba_conv_bias": model.has_tensor(f"blk.{first}.ssm_conv1d.bias"),
        "mamba_proj_bias": model.has_tensor(f"blk.{first}.ssm_in.bias"),
    }


def _ernie(model: Hyperparameters, config: Config) -> Config:
    return {"architectures": ["Ernie4_5ForCausalLM"]}


def _ernie_moe(model: Hyperparameters, config: Config) -> Config:
    dense = model.count("leading_dense_block_count")
    return {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "moe_num_experts": model.integer("expert_count"),
        "moe_k": model.integer("expert_used_count"),
        "moe_num_shared_experts": model.count("expert_shared_count"),
        "moe_intermediate_size": _expert_size(model, dense),
        "moe_layer_start_index": dense,
        "moe_layer_interval": model.integer("interleave_moe_layer_step", 1),
    }


def _hunyuan(model: Hyperparameters, config: Config) -> Config:
    """The scaling of its rotary embedding is in the base that a file has."""
    return {"architectures": ["HunYuanDenseV1ForCausalLM"]}


def _hunyuan_moe(model: Hyperparameters, config: Config) -> Config:
    return {
        "architectures": ["HunYuanMoEV1ForCausalLM"],
        "num_experts": model.integer("expert_count"),
        "moe_topk": model.integer("expert_used_count"),
        "num_shared_expert": model.integer("expert_shared_count", 1),
        "intermediate_size": _expert_size(model, 0),
    }


def _olmoe(model: Hyperparameters, config: Config) -> Config:
    return {
        "architectures": ["OlmoeForCausalLM"],
        "num_experts": model.integer("expert_count"),
        "num_experts_per_tok": model.integer("expert_used_count"),
        "intermediate_size": _expert_size(model, 0),
        "norm_topk_prob": False,  # llama.cpp's constant
    }


FAMILIES: dict[str, Callable[[Hyperparameters, Config], Config]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen2moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "smollm3": _smollm3,
    "granite": _granite,
    "deepseek2": _deepseek2,
    "mistral3": _mistral3,
    "gpt-oss": _gpt_oss,
    "qwen3next": _qwen3_next,
    "qwen35": _qwen3_5,
    "qwen35moe": _qwen3_5_moe,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2_moe,
    "glm4": _glm4,
    "glm4moe": _glm4_moe,
    "minimax-m2": _minimax_m2,
    "exaone4": _exaone4,
    "phi2": _phi2,
    "stablelm": _stablelm,
    "nemotron": _nemotron,
    "seed_oss": _seed_oss,
    "granitehybrid": _granite_hybrid,
    "ernie4_5": _ernie,
    "ernie4_5-moe": _ernie_moe,
    "hunyuan-dense": _hunyuan,
    "hunyuan-moe": _hunyuan_moe,
    "olmoe": _olmoe,
}
"""By `general.architecture`."""
