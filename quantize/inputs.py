"""What is kept of the inputs of a linear."""

from __future__ import annotations

import torch
from torch import Tensor

_SAMPLE_ROWS = 256


class InputStatistics:
    """Over all tokens that the linear has seen."""

    def __init__(self, in_features: int, num_tokens: int, *, has_gram: bool) -> None:
        """num_tokens: that it will see."""
        self.gram: Tensor | None = None  # [in_features, in_features] float32: X^T X
        if has_gram:
            self.gram = torch.zeros(in_features, in_features)
        self.peak = torch.zeros(in_features)  # largest magnitude
        self._sum, self._squares = torch.zeros(in_features), torch.zeros(in_features)
        self._rows: list[Tensor] = []  # one in so many
        self._step = max(1, num_tokens // _SAMPLE_ROWS)
        self._seen = 0

    def note(self, x: Tensor) -> None:
        """x [T, in_features] float32."""
        if self.gram is not None:
            self.gram.addmm_(x.t(), x)
        magnitudes = x.abs()
        torch.maximum(self.peak, magnitudes.amax(0), out=self.peak)
        self._sum += magnitudes.sum(0)
        self._squares += magnitudes.square_().sum(0)
        self._rows.append(x[-self._seen % self._step :: self._step].clone())
        self._seen += len(x)

    def divide(self, scales: Tensor) -> None:
        """As if the inputs had been divided by scales [in_features]."""
        if self.gram is not None:
            self.gram.div_(scales).div_(scales[:, None])
        for own in (self.peak, self._sum, *self._rows):
            own.div_(scales)
        self._squares.div_(scales).div_(scales)

    def take_gram(self) -> Tensor:
        """The sums, which are given up."""
        gram, self.gram = self.gram, None
        assert gram is not None, "they were asked for"
        return gram

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
