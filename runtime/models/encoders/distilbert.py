"""DistilBERT (Sanh et al. 2019): BERT without types of tokens and with names of its own."""

from __future__ import annotations

from ...checkpoint.config.encoder_config import EncoderConfig, EncoderNames, ScoreHead
from ...checkpoint.config.fields import Fields
from ...checkpoint.config.score_fields import ScoreLabels
from .fields import MAX_POSITIONS, read_activation, shape_of

_NAMES = EncoderNames(
    base="distilbert.",
    tokens="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    embedding_norm="embeddings.LayerNorm",
    layer="transformer.layer.{}",
    queries_keys_values=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    attention_output="attention.out_lin",
    attention_norm="sa_layer_norm",
    up="ffn.lin1",
    down="ffn.lin2",
    feed_forward_norm="output_layer_norm",
    unread=("vocab_transform.", "vocab_layer_norm.", "vocab_projector."),
)
_OWN = {
    "hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers",
    "intermediate_size": "hidden_dim",
}  # fmt: skip
_DEFAULTS = {"dim": 768, "n_heads": 12, "n_layers": 6, "hidden_dim": 3072, "vocab_size": 30522}


def read_distilbert(config: Fields, architecture: str) -> EncoderConfig:
    config = config.with_defaults(_DEFAULTS)
    sizes = {name: config.integer(own) for name, own in _OWN.items()}
    config = Fields(config.file, {**config.values, **sizes})
    return EncoderConfig(
        **shape_of(config, architecture),
        max_positions=config.integer("max_position_embeddings", 512, most=MAX_POSITIONS),
        num_token_types=0,
        norm_eps=1e-12,
        activation=read_activation(config, "activation"),
        names=_NAMES,
        head=_head(config, architecture),
    )


def _head(config: Fields, architecture: str) -> ScoreHead | None:
    if not architecture.endswith("ForSequenceClassification"):
        return None
    return ScoreHead(
        ScoreLabels.of(config),
        pooling="cls",
        dense="pre_classifier",
        output="classifier",
        dense_activation="relu",
    )
