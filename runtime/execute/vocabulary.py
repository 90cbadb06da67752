"""Draws and log-probabilities over logits of the whole vocabulary; ranks that share it have
`kernels.cpu.shared_vocabulary` in its place."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ...kernels.cpu.shared_vocabulary import SharedVocabulary
from ...kernels.registry import Kernels
from ...kernels.sampling_rows import AdjustedRows, SamplingRows, best_tokens, top_logprobs
from ..models.layers.embedding import vocab_share
from ..models.layers.ranks import Ranks


class Vocabulary(Protocol):
    """Of logits [N, vocab_size], or of a rank's share of them."""

    def log_softmax(self, logits: Tensor) -> Tensor:
        """The logits as log-probabilities."""
        ...

    def adjust(self, logits: Tensor, rows: AdjustedRows, previous: Tensor) -> None:
        """See `ops.AdjustLogits`."""
        ...

    def apply_mask(self, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
        """See `ops.ApplyTokenMask`; masks of the whole vocabulary."""
        ...

    def sample(self, logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
        """See `ops.Sample`."""
        ...

    def logprobs(self, logits: Tensor, token_ids: Tensor) -> Tensor:
        """See `ops.TokenLogprobs`."""
        ...

    def top_logprobs(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """See `sampling_rows.top_logprobs`."""
        ...

    def best(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The ids [N, count] of the largest logits, best first, of equal ones the smaller id first,
        and the logits."""
        ...

    def argmax(self, logits: Tensor) -> Tensor:
        """[N] int64."""
        ...


def vocabulary_of(kernels: Kernels, vocab_size: int, ranks: Ranks) -> Vocabulary:
    """By which this rank draws; see `VocabEmbedding`."""
    share = vocab_share(vocab_size, ranks)
    if share is None or ranks.communicator is None:
        return WholeVocabulary(kernels)
    return SharedVocabulary(
        ranks.communicator, share, vocab_size, kernels.adjust_logits, kernels.apply_token_mask
    )


class WholeVocabulary:
    """See `Vocabulary`."""

    def __init__(self, kernels: Kernels) -> None:
        self.adjust = kernels.adjust_logits
        self.apply_mask = kernels.apply_token_mask
        self.sample = kernels.sample
        self.logprobs = kernels.token_logprobs
        self.top_logprobs = top_logprobs

    def log_softmax(self, logits: Tensor) -> Tensor:
        """See `Vocabulary`."""
        return torch.log_softmax(logits, dim=-1)

    def best(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """See `Vocabulary`."""
        token_ids = best_tokens(logits, count)
        return token_ids, logits.gather(-1, token_ids)

    def argmax(self, logits: Tensor) -> Tensor:
        """See `Vocabulary`."""
        return logits.argmax(dim=-1)
