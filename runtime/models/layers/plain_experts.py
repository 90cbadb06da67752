"""Experts without gates, one after the other (Nemotron-H): down(activation(up(x))), perhaps of a
smaller vector that all of them take and give.

Cost: two products an expert that any token of the step has chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....kernels.ops import Linear
from ....kernels.reference.dense import widen
from ...checkpoint.config.model_config import ExpertsConfig
from .activation import PLAIN_ACTIVATIONS
from .build import ModelBuild


class PlainExperts:
    """See `ops.Experts`."""

    def __init__(self, build: ModelBuild, name: str, experts: ExpertsConfig) -> None:
        """name: the mixture's."""
        config, names = build.config, experts.names
        hidden_size, size = config.hidden_size, experts.intermediate_size
        width = experts.latent_size or hidden_size
        self._activate = PLAIN_ACTIVATIONS[config.plain_activation]
        self._ups, self._downs = (
            [
                _linear(build, f"{name}.{part.format(expert)}", *sizes)
                for expert in range(experts.num_experts)
            ]
            for part, sizes in ((names.up, (width, size)), (names.down, (size, width)))
        )
        self._into: Linear | None = None
        self._out_of: Linear | None = None
        if experts.latent_size:
            bias = config.mlp_bias
            self._into = _linear(build, f"{name}.fc1_latent_proj", hidden_size, width, bias)
            self._out_of = _linear(build, f"{name}.fc2_latent_proj", width, hidden_size, bias)

    def __call__(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """See `ops.Experts`."""
        taken = x if self._into is None else self._into(x)
        found = taken.new_zeros((*expert_ids.shape, taken.shape[1]))
        for expert in torch.unique(expert_ids[expert_ids >= 0]).tolist():
            tokens, choices = torch.where(expert_ids == expert)
            up = self._activate(self._ups[expert](taken[tokens]))
            found[tokens, choices] = self._downs[expert](up)
        wide = widen(found)
        total = torch.zeros_like(wide[:, 0])
        for choice in range(expert_ids.shape[1]):  # in their order, whoever else is in the step
            total += wide[:, choice] * weights[:, choice : choice + 1].to(wide.dtype)
        given = total.to(x.dtype)
        return given if self._out_of is None else self._out_of(given)


def _linear(
    build: ModelBuild, name: str, in_features: int, out_features: int, bias: bool = False
) -> Linear:
    weight = build.source.take_weight([name], [out_features], in_features)
    own = build.source.take(f"{name}.bias", (out_features,)) if bias else None
    return build.kernels.make_linear(weight, own)
