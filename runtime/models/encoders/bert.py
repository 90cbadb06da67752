"""BERT (Devlin et al. 2019), RoBERTa and XLM-RoBERTa: norms behind the blocks, learned positions.

RoBERTa's positions begin behind that of padding, and its classifier has a layer of its own where
BERT has its pooler.
"""

from __future__ import annotations

from dataclasses import replace

from ...checkpoint.config.encoder_config import EncoderConfig, EncoderNames, ScoreHead
from ...checkpoint.config.fields import Fields
from ...checkpoint.config.score_fields import ScoreLabels
from .fields import MAX_POSITIONS, read_activation, shape_of

BERT_NAMES = EncoderNames(
    base="bert.",
    tokens="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    token_types="embeddings.token_type_embeddings",
    embedding_norm="embeddings.LayerNorm",
    layer="encoder.layer.{}",
    queries_keys_values=("attention.self.query", "attention.self.key", "attention.self.value"),
    attention_output="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    feed_forward_norm="output.LayerNorm",
    unread=("pooler.", "cls.", "lm_head.", "embeddings.position_ids"),
)


def read_bert(config: Fields, architecture: str) -> EncoderConfig:
    return _read(config, architecture, has_own_pooler=True)


def read_roberta(config: Fields, architecture: str) -> EncoderConfig:
    encoder = _read(config, architecture, has_own_pooler=False)
    padding_id = 1 if config.get("pad_token_id") is None else config.count("pad_token_id")
    num_positions = encoder.max_positions - padding_id - 1
    if num_positions < 1:
        raise config.fail(
            "max_position_embeddings", f"more than pad_token_id + 1, {padding_id + 1}"
        )
    return replace(
        encoder,
        padding_id=padding_id,
        max_positions=num_positions,
        names=replace(BERT_NAMES, base="roberta."),
    )


def _read(config: Fields, architecture: str, *, has_own_pooler: bool) -> EncoderConfig:
    config.restrict("position_embedding_type", "absolute")
    return EncoderConfig(
        **shape_of(config, architecture),
        max_positions=config.integer("max_position_embeddings", 512, most=MAX_POSITIONS),
        num_token_types=config.integer("type_vocab_size", 2, most=MAX_POSITIONS),
        norm_eps=config.number("layer_norm_eps", 1e-12),
        activation=read_activation(config, "hidden_act"),
        names=BERT_NAMES,
        head=_head(config, architecture, has_own_pooler=has_own_pooler),
    )


def _head(config: Fields, architecture: str, *, has_own_pooler: bool) -> ScoreHead | None:
    if not architecture.endswith("ForSequenceClassification"):
        return None
    return ScoreHead(
        ScoreLabels.of(config),
        pooling="cls",
        dense="bert.pooler.dense" if has_own_pooler else "classifier.dense",
        output="classifier" if has_own_pooler else "classifier.out_proj",
    )
