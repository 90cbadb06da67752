"""Which layers a process has, where processes hold a model one behind the other (pipeline
parallelism: Huang et al. 2019, "GPipe"; Narayanan et al. 2021, "Efficient large-scale language
model training", section 2.2).

The first stage has the embedding, the last one the final norm and the output projection. Between
them goes the residual stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...checkpoint.config.model_config import ModelConfig
from ...checkpoint.parts import Range


@dataclass(frozen=True, slots=True)
class Stage:
    """The part of a model that a process has; its config is that of `config_of_stage`."""

    first_layer: int = 0  # of the checkpoint's, in whose names layers have these numbers
    is_first: bool = True
    is_last: bool = True
    num_stages: int = 1  # of the model
    model: ModelConfig | None = None  # of all its layers; None: nobody asks for the others' KV
    runs: Sequence[Range] = ()  # the layers of each of its stages

    @property
    def is_whole(self) -> bool:
        """Whether it has all layers."""
        return self.is_first and self.is_last


ALL_LAYERS = Stage()


def config_of_stage(config: ModelConfig, layers: Range) -> ModelConfig:
    """The config of a model of these layers, numbered from 0."""
    first, end = layers
    kinds = config.layer_kinds[first:end]
    present = sorted(set(kinds))
    experts, latent = config.experts, config.latent
    if experts is not None:
        experts = replace(experts, layers=_within(experts.layers, layers))
    if latent is not None and latent.indexer is not None:
        indexer = replace(latent.indexer, layers=_within(latent.indexer.layers, layers))
        latent = replace(latent, indexer=indexer)
    return replace(
        config,
        num_layers=end - first,
        attention_kinds=tuple(config.attention_kinds[kind] for kind in present),
        kind_of_layer=tuple(map(present.index, kinds)),
        layers_without_rope=_within(config.layers_without_rope, layers),
        experts=experts,
        latent=latent,
    )


def _within(indices: Sequence[int], layers: Range) -> tuple[int, ...]:
    first, end = layers
    return tuple(index - first for index in indices if first <= index < end)
