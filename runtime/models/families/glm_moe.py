"""GLM-4.5 to 4.7: attention of half-rotated heads, normed where the config says so, and the experts
of DeepSeek-V3. Solar Open and dots.llm1 rotate whole heads; the former norms none, the latter all.
GLM-4.7-Flash is a DeepSeek-V3 but for its defaults, GLM-5 a DeepSeek-V3.2 whose layers may take
over what an earlier one selected."""

from __future__ import annotations

from dataclasses import replace

from ...checkpoint.config.fields import Fields
from ...checkpoint.config.model_config import DecoderConfig
from .decoder import read_decoder, with_experts, with_windows
from .deepseek import (
    drafting_layer,
    predictor_of,
    read_latent_decoder,
    sigmoid_experts,
    with_indexer,
    with_listed_layers,
)

_DEFAULTS = {
    "num_nextn_predict_layers": 1,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_DEFAULTS_SOLAR = {
    **_DEFAULTS,
    "head_dim": 128,
    "rope_theta": 1e6,
    "partial_rotary_factor": 1.0,
    "moe_intermediate_size": 1280,
    "intermediate_size": 1280,  # of no layer
}
_DEFAULTS_DOTS = {
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "max_window_layers": 62,
    "sliding_window": 4096,
}
_DEFAULTS_LITE = {
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "moe_intermediate_size": 1536,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 64,
    "routed_scaling_factor": 1.8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "eos_token_id": 1,
}

_DEFAULTS_5 = {
    **_DEFAULTS_LITE,
    "q_lora_rank": 2048,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 32,
}


def read_glm4_moe(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults(_DEFAULTS)
    config.restrict("mlp_bias", False)
    decoder = replace(
        read_decoder(config, architecture, can_rotate_in_part=True),
        qkv_bias=config.flag("attention_bias", False),
        query_key_norm="head" if config.flag("use_qk_norm", False) else None,
        unread_weights=drafting_layer(config),
        predictor=predictor_of(config),
    )
    return with_experts(decoder, config, sigmoid_experts(config, decoder))


def read_solar_open(config: Fields, architecture: str) -> DecoderConfig:
    """Experts in every layer."""
    config.restrict("use_qk_norm", False)
    own = {"first_k_dense_replace": 0}
    config = Fields(config.file, {**_DEFAULTS_SOLAR, **config.values, **own})
    return read_glm4_moe(config, architecture)


def read_dots1(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults(_DEFAULTS_DOTS)
    config.restrict("scoring_func", "sigmoid", "noaux_tc")  # published as the latter
    config = Fields(config.file, {**config.values, "scoring_func": None})
    bias = config.flag("attention_bias", False)
    decoder = read_decoder(config, architecture)
    decoder = replace(decoder, qkv_bias=bias, output_bias=bias, query_key_norm="head")
    window, first = config.optional_integer("sliding_window"), config.count("max_window_layers")
    default = [window is not None and index >= first for index in range(decoder.num_layers)]
    decoder = with_windows(decoder, config, default=default, window=window)
    return with_experts(decoder, config, sigmoid_experts(config, decoder))


def read_glm4_moe_lite(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults(_DEFAULTS_LITE)
    decoder = read_latent_decoder(config, architecture)
    experts = sigmoid_experts(config, decoder)
    if config.get("mlp_layer_types") is None:
        config.restrict("first_k_dense_replace", 1)
    return with_experts(decoder, config, with_listed_layers(config, decoder, experts))


def read_glm_moe_dsa(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults(_DEFAULTS_5)
    decoder = read_latent_decoder(config, architecture)
    layers = _selecting_layers(config, decoder.num_layers)
    decoder = with_indexer(decoder, config, layers, is_interleaved=True)
    experts = sigmoid_experts(config, decoder)
    return with_experts(decoder, config, with_listed_layers(config, decoder, experts))


def _selecting_layers(config: Fields, num_layers: int) -> tuple[int, ...]:
    """Those that are listed as full, or marked by F in a pattern; else the first ones, and one of
    every `index_topk_freq` behind them."""
    field = "index_topk_pattern" if config.get("indexer_types") is None else "indexer_types"
    listed = config.get(field)
    if listed is None:
        every = config.integer("index_topk_freq", 1)
        first = config.integer("index_skip_topk_offset", 2)
        return tuple(i for i in range(num_layers) if max(i - first + 1, 0) % every == 0)
    kinds = list(listed) if isinstance(listed, str | list) else []
    is_known = all(kind in ("full", "shared", "F", "S") for kind in kinds)
    layers = tuple(index for index, kind in enumerate(kinds) if kind in ("full", "F"))
    if len(kinds) != num_layers or not is_known or 0 not in layers:
        raise config.fail(field, f"full or shared for each of {num_layers} layers, first full")
    return layers
