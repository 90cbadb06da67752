"""A matrix product of a model. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Product:
    """A weight [out_features, in_features] at `count` places of the model, each with its own.

    If a place has `num_experts` such weights, a token is multiplied by `num_used` of them.
    """

    name: str
    in_features: int
    out_features: int
    count: int
    num_experts: int = 1
    num_used: int = 1
    num_modules: int = 0  # checkpoint modules that form it, if it takes adapters
    is_quantized: bool = True  # if the model's linear layers are
    is_sampled_only: bool = False  # only for tokens whose logits are needed

    @property
    def num_parameters(self) -> int:
        """Over all places and experts."""
        return self.in_features * self.out_features * self.count * self.num_experts

    def num_touched(self, num_tokens: int) -> float:
        """Weights of a place that a step of `num_tokens` reads, on average if each token's experts
        are drawn uniformly."""
        share = self.num_used / self.num_experts
        return self.num_experts * (1.0 - (1.0 - share) ** num_tokens)
