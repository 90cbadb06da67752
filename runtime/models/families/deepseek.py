"""DeepSeek-V2 to V3.2: latent attention, shared experts, routing within groups. Kimi K2 is
published as a DeepSeek-V3. Youtu-LLM has no experts."""

from __future__ import annotations

import math
from dataclasses import replace

from ....kernels.model_options import LatentOptions, RoutingOptions
from ...checkpoint.config.fields import Fields
from ...checkpoint.config.model_config import (
    DecoderConfig,
    ExpertsConfig,
    IndexerConfig,
    LatentConfig,
    PredictorConfig,
)
from .decoder import read_decoder, with_experts

_DEFAULTS_2 = {
    "first_k_dense_replace": 0,
    "n_shared_experts": 2,
    "q_lora_rank": 1536,
    "eos_token_id": 2,
}
_DEFAULTS_3 = {
    "first_k_dense_replace": 3,
    "n_shared_experts": 1,
    "max_position_embeddings": 4096,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 2.5,
    "eos_token_id": 1,
    "num_nextn_predict_layers": 1,
}

_DEFAULTS_32 = {
    **_DEFAULTS_3,
    "max_position_embeddings": 163840,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 64,
}

_DEFAULTS_YOUTU = {
    "max_position_embeddings": 131072,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "tie_word_embeddings": True,
    "eos_token_id": 128001,
}


def read_deepseek_v2(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults(_DEFAULTS_2)
    config.restrict("norm_topk_prob", False)
    config.restrict("scoring_func", "softmax")
    config.restrict("topk_method", "greedy", "group_limited_greedy")
    routing = RoutingOptions(
        config.integer("num_experts_per_tok"),
        weight_factor=config.number("routed_scaling_factor", 1.0),
    )
    if config.get("topk_method") == "group_limited_greedy":
        routing = _in_groups(routing, config)
    decoder = read_latent_decoder(config, architecture)
    decoder = replace(decoder, mlp_bias=config.flag("mlp_bias", False))
    return with_experts(decoder, config, _experts(config, decoder, routing))


def read_deepseek_v3(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults(_DEFAULTS_3)
    decoder = read_latent_decoder(config, architecture)
    return with_experts(decoder, config, sigmoid_experts(config, decoder))


def read_deepseek_v32(config: Fields, architecture: str) -> DecoderConfig:
    """V3 with an indexer, which selects the tokens that attention is to."""
    config = config.with_defaults(_DEFAULTS_32)
    decoder = with_indexer(read_latent_decoder(config, architecture), config)
    experts = sigmoid_experts(config, decoder)
    return with_experts(decoder, config, with_listed_layers(config, decoder, experts))


def with_indexer(
    decoder: DecoderConfig,
    config: Fields,
    layers: tuple[int, ...] | None = None,
    *,
    is_interleaved: bool = False,
) -> DecoderConfig:
    """The decoder whose queries attend to `index_topk` tokens. layers: which select, None: all;
    is_interleaved: unless config.json says it."""
    latent, (options,) = decoder.latent, decoder.attention_kinds
    assert latent is not None and isinstance(options, LatentOptions), "it was just read"
    if latent.query_latent_dim is None:
        raise config.fail(
            "q_lora_rank", "an integer: the indexer's queries are made of that latent"
        )
    head_dim = config.integer("index_head_dim")
    if head_dim < latent.rope_dim:
        raise config.fail("index_head_dim", f"at least qk_rope_head_dim, {latent.rope_dim}")
    indexer = IndexerConfig(
        config.integer("index_n_heads"),
        head_dim,
        tuple(range(decoder.num_layers)) if layers is None else layers,
        config.flag("indexer_rope_interleave", is_interleaved),
    )
    return replace(
        decoder,
        latent=replace(latent, indexer=indexer),
        attention_kinds=(replace(options, num_selected=config.integer("index_topk")),),
    )


def read_youtu(config: Fields, architecture: str) -> DecoderConfig:
    config.restrict("mlp_bias", False)
    return read_latent_decoder(config.with_defaults(_DEFAULTS_YOUTU), architecture)


def with_listed_layers(
    config: Fields, decoder: DecoderConfig, experts: ExpertsConfig
) -> ExpertsConfig:
    """In the layers that `mlp_layer_types` calls sparse, if there is such a list."""
    types = config.get("mlp_layer_types")
    if types is None:
        return experts
    is_list = isinstance(types, list) and len(types) == decoder.num_layers
    if not is_list or any(each not in ("dense", "sparse") for each in types):
        expected = f"a list of {decoder.num_layers} names among dense, sparse"
        raise config.fail("mlp_layer_types", expected)
    layers = tuple(index for index, each in enumerate(types) if each == "sparse")
    return replace(experts, layers=layers)


def sigmoid_experts(config: Fields, decoder: DecoderConfig) -> ExpertsConfig:
    """V3's: scored by sigmoid, ranked with a bias, in groups that are ranked by their best two."""
    config.restrict("scoring_func", "sigmoid")
    config.restrict("topk_method", "noaux_tc")
    return replace(_experts(config, decoder, routing_of_v3(config)), has_selection_bias=True)


def routing_of_v3(config: Fields) -> RoutingOptions:
    """V3's, which others have taken over."""
    routing = RoutingOptions(
        config.integer("num_experts_per_tok"),
        scoring="sigmoid",
        is_normalized=config.flag("norm_topk_prob", True),
        weight_factor=config.number("routed_scaling_factor", 1.0),
        group_rank="best_two",
    )
    return _in_groups(routing, config)


def drafting_layer(config: Fields) -> tuple[str, ...]:
    """The name of the layer past the last, which predicts a further token for speculative decoding;
    it is read where it drafts."""
    return (f"{_behind_the_last(config)}.",)


def predictor_of(config: Fields) -> PredictorConfig | None:
    """That layer, where a checkpoint has one."""
    if config.get("num_nextn_predict_layers") in (None, 0):
        return None
    name = _behind_the_last(config)
    return PredictorConfig(
        layer=name,
        token_norm=f"{name}.enorm",
        hidden_norm=f"{name}.hnorm",
        merge=f"{name}.eh_proj",
        norm=f"{name}.shared_head.norm",
        weights=(f"{name}.",),
        copies=(f"{name}.embed_tokens.", f"{name}.shared_head.head."),
    )


def _behind_the_last(config: Fields) -> str:
    return f"model.layers.{config.integer('num_hidden_layers')}"


def _in_groups(routing: RoutingOptions, config: Fields) -> RoutingOptions:
    num_groups, num_chosen = config.integer("n_group"), config.integer("topk_group")
    return replace(routing, num_groups=num_groups, num_chosen_groups=num_chosen)


def _experts(config: Fields, decoder: DecoderConfig, routing: RoutingOptions) -> ExpertsConfig:
    config.restrict("moe_layer_freq", 1)
    size = config.integer("moe_intermediate_size")
    num_shared = 0 if config.get("n_shared_experts") is None else config.count("n_shared_experts")
    return ExpertsConfig(
        layers=tuple(range(config.count("first_k_dense_replace"), decoder.num_layers)),
        num_experts=config.integer("n_routed_experts"),
        intermediate_size=size,
        shared_intermediate_size=size * num_shared,
        routing=routing,
    )


def read_latent_decoder(config: Fields, architecture: str) -> DecoderConfig:
    """The KV cache has one row a token for all heads, whatever the number of KV heads."""
    latent = LatentConfig(
        latent_dim=config.integer("kv_lora_rank"),
        rope_dim=config.integer("qk_rope_head_dim"),
        nope_dim=config.integer("qk_nope_head_dim"),
        value_dim=config.integer("v_head_dim"),
        query_latent_dim=config.optional_integer("q_lora_rank"),
        is_interleaved=config.flag("rope_interleave", True),
    )
    if latent.rope_dim % 2:
        raise config.fail("qk_rope_head_dim", "an even number, as rotary embeddings need")
    bias = config.flag("attention_bias", False)
    if bias and latent.query_latent_dim is None:
        raise config.fail("attention_bias", "false where q_lora_rank is null")
    own = {"head_dim": latent.rope_dim, "num_key_value_heads": 1}
    config = Fields(config.file, {**config.values, **own})
    return replace(
        read_decoder(config, architecture),
        qkv_bias=bias,
        output_bias=bias,
        latent=latent,
        unread_weights=drafting_layer(config),
        predictor=predictor_of(config),
        attention_kinds=(LatentOptions(_scale(config, latent)),),
    )


def _scale(config: Fields, latent: LatentConfig) -> float:
    """The scale of the scores. It includes YaRN's temperature as far as that applies to all
    dimensions, not just the rotated (Peng et al., "YaRN", section 3.4; DeepSeek-V2, 3.1.4)."""
    scale: float = (latent.nope_dim + latent.rope_dim) ** -0.5
    fields = config.nested("rope_scaling") or config.nested("rope_parameters")
    if fields is None or (fields.get("rope_type") or fields.get("type")) in (None, "default"):
        return scale
    factor = fields.number("factor", 1.0)
    if not fields.get("mscale_all_dim") or factor <= 1:
        return scale
    temperature = 0.1 * fields.number("mscale_all_dim", 1.0) * math.log(factor) + 1
    return scale * temperature**2
