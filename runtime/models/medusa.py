"""Medusa's heads (Cai et al. 2024, arXiv:2401.10774): each guesses one token from the model's final
hidden state, the k-th the k-th token behind the one that the model draws from it.

    hidden h_p -> residual blocks x + silu(linear(x)) -> output projection -> token p + 1 + k

As published: `{k}.{block}.linear` and `{k}.{number of blocks}`. No head sees what another guessed,
and none has KV.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ...kernels.ops import Linear
from ..checkpoint.draft_heads import Medusa
from .layers.build import ModelBuild


class MedusaHeads:
    """All heads; immutable."""

    def __init__(self, build: ModelBuild, medusa: Medusa) -> None:
        """build: of the heads' checkpoint, with the model's config."""
        self._heads = [_Head(build, medusa, f"{place}.") for place in range(medusa.num_heads)]

    def __len__(self) -> int:
        return len(self._heads)

    def compute_logits(self, place: int, hidden: Tensor) -> Tensor:
        """hidden [N, hidden_size] -> [N, vocab_size] of the token `place` behind the first guess,
        as `Decoder.compute_logits`."""
        return self._heads[place](hidden)


class _Head:
    def __init__(self, build: ModelBuild, medusa: Medusa, name: str) -> None:
        size, make, source = build.config.hidden_size, build.kernels.make_linear, build.source
        self._blocks: list[Linear] = []
        for index in range(medusa.num_layers):
            block = f"{name}{index}.linear"
            bias = source.take(f"{block}.bias", (size,)) if medusa.has_bias else None
            self._blocks.append(make(source.take_weight([block], [size], size), bias))
        output = source.take_weight([f"{name}{medusa.num_layers}"], [build.config.vocab_size], size)
        self._output = build.kernels.make_output_linear(output)

    def __call__(self, hidden: Tensor) -> Tensor:
        for block in self._blocks:
            hidden = hidden + F.silu(block(hidden))
        return self._output(hidden)
