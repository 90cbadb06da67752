"""MPNet (Song et al. 2020): RoBERTa's layout without types of tokens, and with a bias of scores by
relative positions, which all layers share."""

from __future__ import annotations

from dataclasses import replace

from ...checkpoint.config.encoder_config import EncoderConfig, EncoderNames
from ...checkpoint.config.fields import Fields
from .bert import read_roberta

_NAMES = EncoderNames(
    base="mpnet.",
    tokens="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    relative_bias="encoder.relative_attention_bias",
    embedding_norm="embeddings.LayerNorm",
    layer="encoder.layer.{}",
    queries_keys_values=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    attention_output="attention.attn.o",
    attention_norm="attention.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    feed_forward_norm="output.LayerNorm",
    unread=("pooler.", "lm_head.", "embeddings.position_ids"),
)
_NUM_BUCKETS = 32  # which transformers reckons with, whatever the size of the table
_PADDING_ID = 1  # from which transformers counts positions, whatever the config says


def read_mpnet(config: Fields, architecture: str) -> EncoderConfig:
    config.restrict("relative_attention_num_buckets", _NUM_BUCKETS)
    config.restrict("pad_token_id", _PADDING_ID)
    encoder = read_roberta(config, architecture)
    return replace(encoder, num_token_types=0, num_relative_buckets=_NUM_BUCKETS, names=_NAMES)
