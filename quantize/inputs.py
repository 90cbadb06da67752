"""What is kept of the inputs of a linear: X [tokens, in_features]."""

from __future__ import annotations

import torch
from torch import Tensor

_SAMPLE_ROWS = 256


class InputStatistics:
    """Over all tokens that the linear has seen."""

    def __init__(self, in_features: int, num_tokens: int) -> None:
        """num_tokens: that it will see."""
        self.peak = torch.zeros(in_features)  # largest magnitude
        self._sum, self._squares = torch.zeros(in_features), torch.zeros(in_features)
        self._rows: list[Tensor] = []  # one in so many
        self._step = max(1, num_tokens // _SAMPLE_ROWS)
        self._seen = 0

    def note(self, x: Tensor) -> None:
        """x [T, in_features] float32."""
        magnitudes = x.abs()
        torch.maximum(self.peak, magnitudes.amax(0), out=self.peak)
        self._sum += magnitudes.sum(0)
        self._squares += magnitudes.square_().sum(0)
        self._rows.append(x[-self._seen % self._step :: self._step].clone())
        self._seen += len(x)

    @property
    def mean(self) -> Tensor:
        """[in_features]: of magnitudes."""
        return self._sum / max(1, self._seen)

    @property
    def mean_square(self) -> Tensor:
        """[in_features]"""
        return self._squares / max(1, self._seen)

    @property
    def sample(self) -> Tensor:
        """[about 256, in_features], evenly spread over the tokens."""
        return torch.cat(self._rows)


class InputProducts:
    """What rounding a linear so that it makes up for errors needs (`gptq`), over all tokens."""

    def __init__(self, in_features: int) -> None:
        self.gram = torch.zeros(in_features, in_features)  # X^T X
        self.drift = torch.zeros(in_features, in_features)  # X^T D

    def note(self, x: Tensor, original: Tensor) -> None:
        """x, original [T, in_features] float32: the input, and what it is in the original."""
        self.gram.addmm_(x.t(), x)
        self.drift.addmm_(x.t(), original - x)
