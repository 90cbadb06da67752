"""Jina's embeddings v3 as transformers has them: XLM-RoBERTa with rotary positions. The layout of
2024, whose code came with the checkpoint, is refused: it is never run."""

from __future__ import annotations

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
    base="roberta.",
    tokens="embeddings.word_embeddings",
    token_types="embeddings.token_type_embeddings",
    embedding_norm="emb_ln",
    layer="encoder.layers.{}",
    queries_keys_values=("mixer.Wqkv",),
    attention_output="mixer.out_proj",
    attention_norm="norm1",
    up="mlp.fc1",
    down="mlp.fc2",
    feed_forward_norm="norm2",
    unread=("pooler.", "lm_head."),
)


def read_jina_v3(config: Fields, architecture: str) -> EncoderConfig:
    require_even_heads(config)
    shape = shape_of(config, architecture)
    return EncoderConfig(
        **shape,
        max_positions=config.integer("max_position_embeddings", 8194, most=MAX_POSITIONS),
        num_token_types=config.integer("type_vocab_size", 1, most=MAX_POSITIONS),
        norm_eps=config.number("layer_norm_eps", 1e-5),
        activation=read_activation(config, "hidden_act"),
        rope_thetas=(rope_theta(config, None, "rope_theta", default=20000.0),)
        * shape["num_layers"],
        names=_NAMES,
        head=_head(config, architecture),
    )


def _head(config: Fields, architecture: str) -> ScoreHead | None:
    if not architecture.endswith("ForSequenceClassification"):
        return None
    return ScoreHead(
        ScoreLabels.of(config),
        pooling="cls",
        dense="classifier.dense",
        output="classifier.out_proj",
    )
