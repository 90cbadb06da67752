"""A GPU's penalties and log-probabilities, in the interpreter, against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stemma.kernels.cpu import adjust as cpu
from stemma.kernels.reference import sampling as reference
from stemma.kernels.reference import sampling as reference_logprobs
from stemma.kernels.sampling_rows import AdjustedRows
from stemma.kernels.triton import adjust, logprobs

VOCAB_SIZE = 2500
PREVIOUS = torch.tensor([11, 2499, 0])


@pytest.mark.parametrize("latest", ["none", "among the entries", "alone", "of a row without any"])
@pytest.mark.parametrize("num_entries", [1, 1024, 1030])
def test_adjusted_logits_are_the_reference_s_bit_for_bit(num_entries: int, latest: str) -> None:
    """Three rows of a batch of five, one place for padding; entries of one tile and more."""
    generator = np.random.default_rng(num_entries)
    token_ids = [generator.permutation(VOCAB_SIZE - 2)[:num_entries] + 1 for _ in range(3)]
    sources = [-1, -1, -1]
    if latest == "among the entries":
        token_ids[0][-1], sources[0] = 11, 0
        token_ids[0][:-1] += token_ids[0][:-1] == 11
        token_ids[0] = np.unique(token_ids[0])
    elif latest == "alone":
        sources[1] = 1
    elif latest == "of a row without any":
        token_ids[2], sources[2] = token_ids[2][:0], 2
    rows = _rows(generator, token_ids, sources)
    logits = torch.from_numpy(generator.normal(size=(5, VOCAB_SIZE)).astype(np.float32))
    expected, by_numpy = logits.clone(), logits.clone()
    reference.adjust_logits(expected, rows, PREVIOUS)
    cpu.adjust_logits(by_numpy, rows, PREVIOUS)
    adjust.adjust_logits(logits, rows, PREVIOUS)
    assert torch.equal(by_numpy, expected)
    assert torch.equal(logits, expected)


def _rows(
    generator: np.random.Generator, token_ids: list[np.ndarray], sources: list[int]
) -> AdjustedRows:
    """With a row of padding, which would change row 0 if it were not known as one."""
    lengths = [len(ids) for ids in token_ids]
    num_entries = sum(lengths)
    bias = generator.normal(size=num_entries + 4).round(1)
    bias[::5] = -np.inf
    columns = {
        "place": np.array([3, 0, 4, -1]),
        "repetition": np.array([1.3, 1.0, 0.7, 9.0]),
        "frequency": np.array([0.1, 0.0, -0.3, 9.0]),
        "presence": np.array([0.0, 0.7, 0.3, 9.0]),
        "latest": np.array([*sources, -1]),
        "entry_start": np.cumsum([0, *lengths, 4]),
        "token_id": np.concatenate([*token_ids, np.arange(4)]).astype(np.int64),
        "count": generator.integers(0, 4, num_entries + 4),
        "is_in_prompt": generator.random(num_entries + 4) < 0.5,
        "bias": bias,
    }
    return AdjustedRows(**{name: torch.from_numpy(column) for name, column in columns.items()})


@pytest.mark.parametrize("vocab_size", [1, 1000, 8192, 20_003])
def test_logprobs_are_the_reference_s(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(3, vocab_size, generator=generator) * 10
    logits[2, : vocab_size // 2] = -torch.inf
    token_ids = torch.tensor([0, vocab_size // 2, vocab_size - 1])
    found = logprobs.token_logprobs(logits, token_ids)
    torch.testing.assert_close(
        found, reference_logprobs.token_logprobs(logits, token_ids), rtol=1e-6, atol=1e-5
    )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logprobs_of_a_row_that_is_not_finite_are_not(bad: float) -> None:
    logits = torch.zeros(2, 50)
    logits[0, 20] = bad
    found = logprobs.token_logprobs(logits, torch.tensor([3, 3]))
    assert found.isfinite().tolist() == [False, True]
