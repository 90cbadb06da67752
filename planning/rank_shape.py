"""A model as one of several processes holds it: a rank a part of each layer (tensor parallelism), a
stage some of the layers (pipeline parallelism). What sums over ranks cost. Torch-free."""

from __future__ import annotations

from dataclasses import replace

from ..errors import InvalidRequest
from ..runtime.checkpoint.config.model_config import ModelConfig
from ..runtime.models.layers.ranks import Ranks, head_share
from ..runtime.models.layers.stage import ALL_LAYERS, Stage, config_of_stage
from ..runtime.parallel.stages import stages_of


def parts_of(
    config: ModelConfig, num_ranks: int, num_stages: int
) -> list[tuple[ModelConfig, Stage]]:
    """What the largest rank of each stage holds, in the order of the stages. Raises InvalidRequest
    for a model whose layers cannot be divided so."""
    rank = config_of_rank(config, num_ranks)
    if num_stages == 1:
        return [(rank, ALL_LAYERS)]
    runs = stages_of(config, num_stages)
    return [
        (config_of_stage(rank, layers), Stage(layers[0], layers == runs[0], layers == runs[-1]))
        for layers in runs
    ]


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


def num_sums(config: ModelConfig, num_ranks: int, num_layers: int | None = None) -> int:
    """Of a step: the embedding's, and one a block whose parts are divided; of so many of the
    layers, which are alike where there are stages, those of their blocks."""
    if num_ranks == 1:
        return 0
    has_attention_sum = head_share(config, Ranks(0, num_ranks)).is_divided
    sums = config.num_layers + has_attention_sum * len(config.attention_layers)
    return 1 + sums if num_layers is None else sums * num_layers // config.num_layers


def require_divisible_tokens(config: ModelConfig, num_shares: int) -> None:
    """Raises InvalidRequest for a model of whose layers no rank computes its own tokens alone."""
    if num_shares == 1:
        return
    why = None
    if config.recurrent is not None:
        why = "of recurrent layers each rank computes all tokens, which is not predicted"
    elif config.latent is not None and config.latent.indexer is not None:
        why = "layers that select keys need those of all ranks"
    if why is not None:
        raise InvalidRequest.of("cp_size", num_shares, f"1 for {config.architecture}: {why}")


def _part(size: int, num_ranks: int) -> int:
    return -(-size // num_ranks)
