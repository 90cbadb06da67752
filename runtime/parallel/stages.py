"""Which layers each stage of a pipeline has: as many bytes of weights as comes out, since a step
that decodes takes about as long as reading them does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from ...errors import InvalidRequest
from ..checkpoint.config.model_config import ModelConfig
from ..checkpoint.parts import Range


def stages_of(config: ModelConfig, num_stages: int) -> list[Range]:
    """The layers of each stage, in their order.

    Raises InvalidRequest for a model whose layers cannot be divided so, or has too few.
    """
    indexer = None if config.latent is None else config.latent.indexer
    why = None
    if config.recurrent is not None:
        why = "its recurrent layers keep states"
    elif config.varied is not None:
        why = "its layers share KV"
    elif indexer is not None and len(indexer.layers) < config.num_layers:
        why = "its layers share a selection of keys"
    if why is not None:
        allowed = f"1 for {config.architecture}: {why}; tp_size divides each layer"
        raise InvalidRequest.of("pp_size", num_stages, allowed)
    if num_stages > config.num_layers:
        allowed = f"at most {config.num_layers}, the model's layers"
        raise InvalidRequest.of("pp_size", num_stages, allowed)
    return divided(*_weights_of(config), num_stages)


def divided(costs: Sequence[float], last_cost: float, num_stages: int) -> list[Range]:
    """Layers with these costs in so many runs, at least one layer each, of which the dearest is as
    cheap as can be. last_cost: of what the last run has besides."""
    ends = list(accumulate(costs, initial=0.0))
    num_layers = len(costs)
    # best[first]: (cost of the dearest, where the first ends) of the layers from there on
    best = [(ends[-1] - ends[first] + last_cost, num_layers) for first in range(num_layers)]
    rounds = [best]
    for _ in range(num_stages - 1):
        behind, best = best, []
        for first in range(num_layers):
            choices = (
                (max(ends[end] - ends[first], behind[end][0]), end)
                for end in range(first + 1, num_layers)
            )
            best.append(min(choices, default=(math.inf, num_layers)))
        rounds.append(best)
    stages: list[Range] = []
    first = 0
    for best in reversed(rounds):
        end = best[first][1]
        stages.append((first, end))
        first = end
    return stages


def _weights_of(config: ModelConfig) -> tuple[list[float], float]:
    """Numbers in each layer's weights, and in those of the output projection."""
    from ..models.model_tensors import model_tensors

    per_layer = [0.0] * config.num_layers
    prefix = f"{config.weight_prefix}model.layers."
    for name, shape in model_tensors(config).shapes.items():
        if name.startswith(prefix):
            layer = int(name.removeprefix(prefix).partition(".")[0])
            per_layer[layer] += math.prod(shape)
    return per_layer, float(config.vocab_size * config.hidden_size)
