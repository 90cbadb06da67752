"""ERNIE 4.5: Llama with its rotated pairs side by side. With experts: softmax scores, ranked with a
bias, normalized, and shared experts."""

from __future__ import annotations

from dataclasses import replace

from ....kernels.model_options import RoutingOptions
from ...checkpoint.config.fields import Fields
from ...checkpoint.config.model_config import (
    DecoderConfig,
    ExpertNames,
    ExpertsConfig,
    PredictorConfig,
)
from .decoder import read_decoder, with_experts

_DEFAULTS = {
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
_DEFAULTS_DENSE = {**_DEFAULTS, "head_dim": 128, "num_key_value_heads": 2}
_DEFAULTS_MOE = {
    **_DEFAULTS,
    "num_key_value_heads": 4,
    "moe_k": 6,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "moe_intermediate_size": 1536,
}
_NAMES = ExpertNames(selection_bias="moe_statics.e_score_correction_bias")
# The layer for multi-token prediction, of which Baidu's FastDeploy is the form that is served: it
# goes on with states behind the model's norm, and its own output is behind that norm, too.
_PREDICTOR = PredictorConfig(
    layer="model.mtp_block.0",
    token_norm="model.mtp_emb_norm.0",
    hidden_norm="model.mtp_hidden_norm.0",
    merge="model.mtp_linear_proj.0",
    norm="model.norm",
    weights=tuple(
        f"model.mtp_{name}." for name in ("block", "emb_norm", "hidden_norm", "linear_proj")
    ),
    hands_on_normed=True,
    is_dense=True,
)


def read_ernie(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults(_DEFAULTS_DENSE)
    bias = config.flag("use_bias", False)
    decoder = _ernie(config, architecture)
    return replace(decoder, qkv_bias=bias, output_bias=bias, mlp_bias=bias)


def read_ernie_moe(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults(_DEFAULTS_MOE)
    config.restrict("use_bias", False)
    config.restrict("moe_use_aux_free", True)
    config.restrict("moe_norm_min", 1e-12)
    has_predictor = config.get("num_nextn_predict_layers") not in (None, 0)
    decoder = replace(
        _ernie(config, architecture),
        unread_weights=_PREDICTOR.weights,
        predictor=_PREDICTOR if has_predictor else None,
    )
    size = config.integer("moe_intermediate_size")
    experts = ExpertsConfig(
        layers=_layers_with_experts(config, decoder.num_layers),
        num_experts=config.integer("moe_num_experts"),
        intermediate_size=size,
        routing=RoutingOptions(config.integer("moe_k"), is_normalized=True),
        shared_intermediate_size=size * config.count("moe_num_shared_experts"),
        has_selection_bias=True,
        is_selection_bias_row=True,
        names=_NAMES,
    )
    return with_experts(decoder, config, experts, num_chosen="moe_k")


def _ernie(config: Fields, architecture: str) -> DecoderConfig:
    config.restrict("compression_ratio", 1)
    for field in ("attention_bias", "mlp_bias"):
        config.restrict(field, False)
    return replace(read_decoder(config, architecture), has_interleaved_rope=True)


def _layers_with_experts(config: Fields, num_layers: int) -> tuple[int, ...]:
    last = num_layers - 1
    if config.get("moe_layer_end_index") not in (None, -1):
        last = min(last, config.count("moe_layer_end_index"))
    interval = config.integer("moe_layer_interval")
    layers = range(config.count("moe_layer_start_index"), last + 1)
    return tuple(layer for layer in layers if (layer + 1) % interval == 0)
