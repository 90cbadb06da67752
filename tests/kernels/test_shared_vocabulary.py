"""Draws and log-probabilities over a vocabulary that ranks share equal those over the whole."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from ranks import ThreadCommunicator, on_ranks
from torch import Tensor

from stemma.kernels.cpu.adjust import adjust_logits
from stemma.kernels.cpu.sampling import apply_token_mask, sample
from stemma.kernels.cpu.shared_vocabulary import SharedVocabulary
from stemma.kernels.reference.sampling import token_logprobs
from stemma.kernels.sampling_rows import (
    AdjustedRows,
    SamplingRows,
    best_tokens,
    top_logprobs,
)

VOCAB = 1000  # of three ranks: the last one has less


def shares(num_ranks: int, vocab_size: int = VOCAB) -> list[tuple[int, int]]:
    words = -(-vocab_size // 32)
    bounds = [min(vocab_size, words * rank // num_ranks * 32) for rank in range(num_ranks + 1)]
    return list(pairwise(bounds))


def shared(ranks: ThreadCommunicator, vocab_size: int = VOCAB) -> SharedVocabulary:
    share = shares(ranks.num_ranks, vocab_size)[ranks.rank]
    return SharedVocabulary(ranks, share, vocab_size, adjust_logits, apply_token_mask)


def part(logits: Tensor, ranks: ThreadCommunicator) -> Tensor:
    first, end = shares(ranks.num_ranks, logits.shape[1])[ranks.rank]
    return logits[:, first:end].clone()


def sampling_rows(*rows: tuple[float, int, float, float], seed: int = 0) -> SamplingRows:
    """(temperature, top-k, top-p, min-p) a row."""
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    return SamplingRows(
        torch.tensor(temperature, dtype=torch.float64),
        torch.tensor(top_k),
        torch.tensor(top_p, dtype=torch.float64),
        torch.tensor(min_p, dtype=torch.float64),
        torch.arange(len(rows)) + seed,
        torch.arange(len(rows)) * 7,
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])  # 0.3: a top-p set of most of the vocabulary
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_are_those_of_one_rank(num_ranks: int, spread: float, dtype: torch.dtype) -> None:
    kinds = [
        (temperature, top_k, top_p, min_p)
        for temperature in (0.0, 0.2, 1.0, 3.0)
        for top_k in (0, 1, 40, 5000)
        for top_p in (1.0, 0.9, 0.2)
        for min_p in (0.0, 0.05)
    ]
    generator = torch.Generator().manual_seed(num_ranks)
    logits = torch.randn(len(kinds), VOCAB, generator=generator, dtype=dtype) * spread
    logits = (logits * 8).round() / 8  # many are equal, also at the cuts
    rows = sampling_rows(*kinds)
    expected = sample(logits, rows)
    for found in on_ranks(num_ranks, lambda r: shared(r).sample(part(logits, r), rows)):
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


def test_a_top_p_set_larger_than_what_is_exchanged_first_is_found() -> None:
    logits = torch.randn(2, 20_000, generator=torch.Generator().manual_seed(5)) * 0.1
    rows = sampling_rows((1.0, 0, 0.999, 0.0), (1.0, 0, 0.3, 0.0))
    expected = sample(logits, rows)[0]
    for found, _ in on_ranks(2, lambda r: shared(r, 20_000).sample(part(logits, r), rows)):
        assert torch.equal(found, expected)


def test_logits_are_not_exchanged_as_a_whole() -> None:
    logits = torch.randn(4, 64_000, generator=torch.Generator().manual_seed(6)) * 4
    rows = sampling_rows(
        (0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 50, 1.0, 0.0), (1.0, 0, 0.9, 0.1)
    )

    def given(ranks: ThreadCommunicator) -> int:
        shared(ranks, 64_000).sample(part(logits, ranks), rows)
        return ranks.bytes_given

    assert max(on_ranks(2, given)) < logits.nbytes / 50


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [3, VOCAB - 3])
def test_a_row_that_is_not_finite_fails_alone(bad: float, at: int) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(7))
    logits[1, at] = bad
    rows = sampling_rows((0.0, 0, 1.0, 0.0), (1.0, 40, 0.9, 0.1), (1.0, 40, 0.9, 0.1))
    expected = sample(logits, rows)[0]
    for token_ids, is_finite in on_ranks(2, lambda r: shared(r).sample(part(logits, r), rows)):
        assert is_finite.tolist() == [True, False, True]
        assert token_ids[[0, 2]].tolist() == expected[[0, 2]].tolist()


def test_a_rank_whose_tokens_are_all_masked_leaves_the_draw_to_the_others() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(8))
    masks = torch.zeros(2, -(-VOCAB // 32), dtype=torch.int32)
    masks[0, -1] = 7  # tokens of the last rank
    rows = sampling_rows((0.7, 0, 0.9, 0.02), (0.7, 3, 1.0, 0.0))
    whole = logits.clone()
    apply_token_mask(whole, torch.tensor([0, 1]), masks)
    expected = sample(whole, rows)

    def run(ranks: ThreadCommunicator) -> tuple[Tensor, Tensor]:
        own = part(logits, ranks)
        vocabulary = shared(ranks)
        vocabulary.apply_mask(own, torch.tensor([0, 1]), masks)
        return vocabulary.sample(own, rows)

    for token_ids, is_finite in on_ranks(3, run):
        assert is_finite.tolist() == expected[1].tolist() == [True, False]
        assert token_ids[0] == expected[0][0]


def test_penalties_and_biases_reach_the_rank_that_has_the_token() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(9))
    adjusted = AdjustedRows(
        place=torch.tensor([0, 2]),
        repetition=torch.tensor([1.3, 1.0], dtype=torch.float64),
        frequency=torch.tensor([0.5, 0.1], dtype=torch.float64),
        presence=torch.tensor([0.0, 0.7], dtype=torch.float64),
        latest=torch.tensor([-1, -1]),
        entry_start=torch.tensor([0, 4, 6]),
        token_id=torch.tensor([999, 1, 500, 31, 32, 0]),
        count=torch.tensor([1, 0, 3, 0, 2, 1]),
        is_in_prompt=torch.tensor([False, True, True, False, False, False]),
        bias=torch.tensor([0.0, 0.0, 2.0, -torch.inf, 0.0, 4.0], dtype=torch.float64),
    )
    previous = torch.zeros(1, dtype=torch.int64)
    whole = logits.clone()
    adjust_logits(whole, adjusted, previous)

    def run(ranks: ThreadCommunicator) -> Tensor:
        own = part(logits, ranks)
        shared(ranks).adjust(own, adjusted, previous)
        return own

    assert torch.equal(torch.cat(on_ranks(3, run), dim=1), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_probabilities_and_the_best_tokens_are_those_of_one_rank(dtype: torch.dtype) -> None:
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(3), dtype=dtype)
    logits = (logits * 4).round() / 4
    chosen = torch.tensor([0, 999, 31, 32, 640])

    def run(ranks: ThreadCommunicator) -> tuple[Tensor, ...]:
        vocabulary, own = shared(ranks), part(logits, ranks)
        return (
            vocabulary.logprobs(own, chosen),
            *vocabulary.top_logprobs(own, 20),
            vocabulary.best(own, VOCAB)[0],
            vocabulary.argmax(own),
            vocabulary.log_softmax(own),
        )

    results = on_ranks(3, run)
    for of_chosen, top_ids, tops, ranked, argmax, _ in results:
        torch.testing.assert_close(of_chosen, token_logprobs(logits, chosen))
        assert torch.equal(top_ids, top_logprobs(logits, 20)[0])
        torch.testing.assert_close(tops, top_logprobs(logits, 20)[1])
        assert torch.equal(ranked, best_tokens(logits, VOCAB))
        assert torch.equal(argmax, logits.argmax(dim=-1))
    together = torch.cat([softmax for *_, softmax in results], dim=1)
    torch.testing.assert_close(together, logits.log_softmax(dim=-1))
