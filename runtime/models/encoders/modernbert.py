"""ModernBERT (Warner et al. 2024): norms before the blocks, gates, rotary positions; two of three
layers see a window only, with a rotary base of their own."""

from __future__ import annotations

from typing import Any

from ...checkpoint.config.encoder_config import EncoderConfig, EncoderNames, ScoreHead
from ...checkpoint.config.fields import Fields
from ...checkpoint.config.score_fields import ScoreLabels
from .fields import (
    MAX_POSITIONS,
    read_activation,
    require_even_heads,
    rope_theta,
    shape_of,
)

_NAMES = EncoderNames(
    base="model.",
    tokens="embeddings.tok_embeddings",
    embedding_norm="embeddings.norm",
    layer="layers.{}",
    queries_keys_values=("attn.Wqkv",),
    attention_output="attn.Wo",
    attention_norm="attn_norm",
    up="mlp.Wi",
    down="mlp.Wo",
    feed_forward_norm="mlp_norm",
    final_norm="final_norm",
    unread=("head.", "decoder."),
)
_FULL, _WINDOW = "full_attention", "sliding_attention"


def read_modernbert(config: Fields, architecture: str) -> EncoderConfig:
    require_even_heads(config)
    shape = shape_of(config, architecture)
    has_window = [kind == _WINDOW for kind in _layer_types(config, shape["num_layers"])]
    reach = config.integer("local_attention", 128) // 2
    full = rope_theta(config, _FULL, "global_rope_theta", default=160_000.0)
    local = rope_theta(config, _WINDOW, "local_rope_theta", default=10_000.0)
    bias = config.flag("attention_bias", False)
    return EncoderConfig(
        **shape,
        max_positions=config.integer("max_position_embeddings", 8192, most=MAX_POSITIONS),
        num_token_types=0,
        norm_eps=config.number("norm_eps", 1e-5),
        activation=read_activation(config, "hidden_activation"),
        names=_NAMES,
        is_normed_before=True,
        has_norm_bias=config.flag("norm_bias", False),
        has_attention_bias=bias,
        has_feed_forward_bias=config.flag("mlp_bias", False),
        has_gates=True,
        windows=tuple([reach if is_local else None for is_local in has_window]),
        rope_thetas=tuple([local if is_local else full for is_local in has_window]),
        head=_head(config, architecture),
    )


def _layer_types(config: Fields, num_layers: int) -> list[Any]:
    given = config.get("layer_types")
    if given is None:
        every = config.integer("global_attn_every_n_layers", 3)
        return [_WINDOW if index % every else _FULL for index in range(num_layers)]
    is_known = isinstance(given, list) and all(kind in (_FULL, _WINDOW) for kind in given)
    if not is_known or len(given) != num_layers:
        raise config.fail("layer_types", f"{num_layers} of {_FULL!r} and {_WINDOW!r}")
    return list(given)


def _head(config: Fields, architecture: str) -> ScoreHead | None:
    if not architecture.endswith("ForSequenceClassification"):
        return None
    config.restrict("classifier_pooling", "cls", "mean")
    return ScoreHead(
        ScoreLabels.of(config),
        pooling="mean" if config.get("classifier_pooling") == "mean" else "cls",
        dense="head.dense",
        norm="head.norm",
        output="classifier",
        dense_activation=read_activation(config, "classifier_activation"),
        has_dense_bias=config.flag("classifier_bias", False),
    )
