"""MiniMax-M2: heads rotated in part, one norm of all query heads and one of all key heads, and
experts in every layer, scored by sigmoid and ranked with a bias."""

from __future__ import annotations

from dataclasses import replace

from ....kernels.model_options import RoutingOptions
from ...checkpoint.config.fields import Fields
from ...checkpoint.config.model_config import DecoderConfig, ExpertNames, ExpertsConfig
from .decoder import read_decoder, with_experts

_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 196608,
    "rope_theta": 5e6,
    "num_experts_per_tok": 8,
    "num_local_experts": 256,
    "eos_token_id": 200020,
}
_NAMES = ExpertNames(
    block="block_sparse_moe",
    selection_bias="e_score_correction_bias",
    gate="experts.{}.w1",
    up="experts.{}.w3",
    down="experts.{}.w2",
)


def read_minimax_m2(config: Fields, architecture: str) -> DecoderConfig:
    config = _with_rotated_share(config.with_defaults(_DEFAULTS))
    _require_plain(config)
    decoder = read_decoder(config, architecture, can_rotate_in_part=True)
    experts = ExpertsConfig(
        layers=tuple(range(decoder.num_layers)),
        num_experts=config.integer("num_local_experts"),
        intermediate_size=decoder.intermediate_size,
        routing=RoutingOptions(
            config.integer("num_experts_per_tok"), scoring="sigmoid", is_normalized=True
        ),
        has_selection_bias=True,
        names=_NAMES,
    )
    return with_experts(replace(decoder, query_key_norm="whole"), config, experts)


def _with_rotated_share(config: Fields) -> Fields:
    """Published configs give how much of a head is rotated as `rotary_dim`."""
    rotary_dim = config.optional_integer("rotary_dim")
    if rotary_dim is None or config.get("partial_rotary_factor") is not None:
        return config
    share = rotary_dim / config.integer("head_dim")
    return Fields(config.file, {**config.values, "partial_rotary_factor": share})


def _require_plain(config: Fields) -> None:
    """Fields of published configs that transformers does not read."""
    config.restrict("scoring_func", "sigmoid")
    config.restrict("qk_norm_type", "per_layer")
    config.restrict("shared_intermediate_size", 0)
    for field in ("attention_bias", "mlp_bias"):
        config.restrict(field, False)
    for field in ("use_qk_norm", "use_routing_bias"):
        config.restrict(field, True)
    types = config.get("attn_type_list")
    if types is not None and (not isinstance(types, list) or any(each != 1 for each in types)):
        raise config.fail("attn_type_list", "a list of 1, full attention in all layers")
