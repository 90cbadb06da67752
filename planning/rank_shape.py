"""A model as one of several ranks holds it (tensor parallelism), and what their sums cost.
Torch-free."""

from __future__ import annotations

from dataclasses import replace

from ..runtime.checkpoint.config.model_config import ModelConfig
from ..runtime.models.layers.ranks import Ranks, head_share


def config_of_rank(config: ModelConfig, num_ranks: int) -> ModelConfig:
    """The config of a model of the size of the largest rank's part: its heads, its feed-forward
    blocks, its share of the vocabulary. What is not divided stays (`runtime/models/layers/ranks`).
    """
    heads = head_share(config, Ranks(0, num_ranks))
    experts = config.experts
    if experts is not None:
        experts = replace(
            experts,
            intermediate_size=_part(experts.intermediate_size, num_ranks),
            shared_intermediate_size=_part(experts.shared_intermediate_size, num_ranks),
        )
    return replace(
        config,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        intermediate_size=_part(config.intermediate_size, num_ranks),
        vocab_size=_part(config.vocab_size, num_ranks),
        experts=experts,
    )


def num_sums(config: ModelConfig, num_ranks: int) -> int:
    """Of a step: the embedding's, and one a block whose parts are divided."""
    if num_ranks == 1:
        return 0
    has_attention_sum = head_share(config, Ranks(0, num_ranks)).is_divided
    return 1 + config.num_layers + has_attention_sum * len(config.attention_layers)


def _part(size: int, num_ranks: int) -> int:
    return -(-size // num_ranks)
