"""A GPU's draws, in the interpreter: token for token those of the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled_rows import sampling_rows

from stemma.kernels.gumbel import gumbel_of_all, gumbel_of_words, philox_4x32
from stemma.kernels.reference import sampling as reference
from stemma.kernels.triton import sampling
from stemma.kernels.triton.language import tl, triton

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top-1": {"top_k": 1, "temperature": 3.0},
    "whole": {},
    "cold": {"temperature": 1e-3},
    "hot": {"temperature": 1e4},
    "min-p": {"min_p": 0.1, "temperature": 2.0},
    "min-p 1": {"min_p": 1.0},
    "top-2": {"top_k": 2},
    "top-50": {"top_k": 50},
    "more than groups": {"top_k": 700, "temperature": 8.0},
    "all but one": {"top_k": 999, "temperature": 20.0},
    "more than all": {"top_k": 10**9},
    "top-p": {"top_p": 0.9},
    "low top-p": {"top_p": 0.05, "temperature": 8.0},
    "tiny top-p": {"top_p": 1e-12},
    "high top-p": {"top_p": 1 - 1e-12, "temperature": 5.0},
    "both": {"top_k": 40, "top_p": 0.8, "temperature": 2.0},
    "all three": {"top_k": 20, "top_p": 0.95, "min_p": 0.3, "temperature": 1.5},
    "top-p, min-p": {"top_p": 0.99, "min_p": 0.05, "temperature": 4.0},
    "top-k, min-p": {"top_k": 9, "min_p": 0.2, "temperature": 4.0},
}


@pytest.mark.parametrize("has_ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_the_reference_s(kind: str, has_ties: bool) -> None:
    """1,000 tokens: no whole number of blocks, and of seeds some have the highest bit."""
    row = {**KINDS[kind], "seed": 2**64 - 1 - len(kind), "position": 2**40 + 3}
    _check(_logits(1, 1000, has_ties), [row])


@pytest.mark.parametrize("vocab_size", [1, 4096, 9001])
def test_kinds_mix_in_a_batch_over_one_and_more_spans(vocab_size: int) -> None:
    names = ["greedy", "whole", "top-50", "top-p", "both", "min-p"]
    rows = [{**KINDS[name], "seed": i, "position": 9 * i} for i, name in enumerate(names)]
    logits = _logits(len(rows), vocab_size, has_ties=False)
    _check(logits, rows)


@settings(max_examples=10)
@given(
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.0, 0.5, 3.0, 30.0]),
    rows=st.lists(
        st.fixed_dictionaries(
            {
                "seed": st.integers(0, 2**64 - 1),
                "position": st.integers(0, 2**62),
                "temperature": st.sampled_from([0.0, 0.01, 0.7, 1.0, 50.0]),
                "top_k": st.sampled_from([0, 1, 2, 7, 60, 90]),
                "top_p": st.floats(1e-6, 1.0),
                "min_p": st.sampled_from([0.0, 0.01, 0.5, 1.0]),
            }
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_any_parameters_draw_the_reference_s_tokens(
    seed: int, spread: float, rows: list[dict[str, Any]]
) -> None:
    """Coarse logits, some of them masked."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(len(rows), 77, generator=generator) * spread).round(decimals=1)
    is_masked = torch.rand(logits.shape, generator=generator) < 0.3
    _check(logits.masked_fill(is_masked, -torch.inf), rows)


@pytest.mark.parametrize("kind", ["top-2", "top-50", "low top-p", "both", "whole"])
def test_among_equal_tokens_the_first_are_kept(kind: str) -> None:
    _check(torch.zeros(1, 300), [{**KINDS[kind], "seed": 6}])


@pytest.mark.parametrize(
    "kind", [{"top_k": 2}, {"top_p": 0.5}, {"top_k": 3, "top_p": 0.6}], ids=str
)
def test_a_set_that_ends_at_its_limit_exactly_holds_no_more(kind: dict[str, Any]) -> None:
    """Of four equal tokens the first two are kept: 0.5 of 4, or 0.6 of 3 less than two of them."""
    rows = [{**kind, "seed": seed} for seed in range(4)]
    assert set(_check(torch.zeros(4, 4), rows)) == {0, 1}


@pytest.mark.parametrize("largest", [3e38, -3e38])
def test_the_lowest_temperature_still_ends(largest: float) -> None:
    """Where scores were infinite, none would be the best of those before another."""
    rows = [{"temperature": 1e-100, **kind} for kind in ({}, {"top_k": 2}, {"top_p": 0.5})]
    _check(torch.tensor([[0.9, 1.0, 1.0, 0.8]]).repeat(3, 1) * largest, rows)


def test_min_p_tells_tokens_apart_whose_shares_are_rounded_to_one() -> None:
    logits = torch.tensor([[1e-30, 2e-30, 2e-30]]).repeat(4, 1)
    _check(logits, [{"min_p": 1.0, "seed": seed} for seed in range(4)])


def test_zeros_of_both_signs_are_equal() -> None:
    """Negative ones first, so that they are missed where they count as less."""
    logits = torch.cat((torch.full((5, 64), -0.0), torch.zeros(5, 128)), dim=1)
    both = {"top_k": 2, "top_p": 0.9}
    _check(logits, [{"temperature": 0.0}, both, *({"top_k": 2, "seed": i} for i in range(3))])


@pytest.mark.parametrize("kind", [{}, {"top_k": 3}, {"top_p": 0.99}, {"top_k": 3, "top_p": 0.99}])
def test_min_p_holds_beside_what_else_truncates(kind: dict[str, Any]) -> None:
    """Of rows that would draw the second token, whose probability is 0.37 of the first one's."""
    logits = torch.tensor([[-1.0, 0.0, -3.0, -9.0]])
    rows = [{**kind, "seed": seed} for seed in range(24)]
    drawn, _ = reference.sample(logits.repeat(24, 1), sampling_rows(*rows))
    others = [row for row, token in zip(rows, drawn.tolist(), strict=True) if token == 0][:2]
    found, _ = sampling.sample(
        logits.repeat(2, 1), sampling_rows(*({**row, "min_p": 0.4} for row in others))
    )
    assert found.tolist() == [1] * 2


def test_rows_with_one_token_allowed_take_it_and_with_none_say_so() -> None:
    logits = torch.full((6, 200), -torch.inf)
    logits[:3, 150] = -40.0
    kinds = ["whole", "top-50", "both"]
    rows = sampling_rows(*(KINDS[name] for name in kinds * 2))
    token_ids, is_finite = sampling.sample(logits, rows)
    assert token_ids[:3].tolist() == [150] * 3 and is_finite.tolist() == [True] * 3 + [False] * 3
    assert ((token_ids >= 0) & (token_ids < 200)).all()


def test_rows_that_are_not_finite_are_told_and_do_not_disturb_the_others() -> None:
    logits = _logits(5, 130, has_ties=False)
    rows = sampling_rows(*({"top_p": 0.9, "position": i} for i in range(4)), {"temperature": 0.0})
    expected, is_finite = sampling.sample(logits, rows)
    assert is_finite.all()
    logits[0, 7], logits[1, 129], logits[2], logits[4, 0] = (
        torch.nan,
        torch.inf,
        -torch.inf,
        torch.nan,
    )
    found, is_finite = sampling.sample(logits, rows)
    assert is_finite.tolist() == [False, False, False, True, False]
    assert found[3] == expected[3] and ((found >= 0) & (found < 130)).all()


def test_a_token_wins_that_is_hardly_better_than_the_likeliest() -> None:
    """Where noise would be left out that could have won by little, one of these draws differs."""
    assert set(_check(torch.zeros(16, 5), [{"seed": seed} for seed in range(16)])) != {0}


def test_a_row_draws_the_same_alone() -> None:
    logits = _logits(3, 500, has_ties=False)
    rows = [{"top_p": 0.9, "seed": 1}, {"seed": 2, "temperature": 3.0}, {"top_k": 8, "seed": 3}]
    together = sampling.sample(logits, sampling_rows(*rows))[0].tolist()
    for i, row in enumerate(rows):
        alone, _ = sampling.sample(logits[i : i + 1].contiguous(), sampling_rows(row))
        assert alone.tolist() == [together[i]]


@triton.jit
def _noise(seed, position, by_four, by_one, words, BLOCKS: tl.constexpr):
    """Noise of 4 * BLOCKS tokens, both ways, and the words."""
    blocks = tl.arange(0, BLOCKS)
    tokens = blocks[:, None] * 4 + tl.arange(0, 4)[None, :]
    found = sampling._four_words(tl.load(seed), tl.load(position), blocks)
    own = sampling._word(tl.load(seed), tl.load(position), tokens)
    tl.store(words + tokens, found.to(tl.int64))
    tl.store(by_four + tokens, sampling._gumbel(found))
    tl.store(by_one + tokens, sampling._gumbel(own))


@pytest.mark.parametrize(
    ("seed", "position"), [(0, 0), (2**64 - 1, 2**63 - 1), (2**63 + 12345, 2**33 + 7), (5, 1000)]
)
def test_noise_is_that_of_the_cpu_bit_for_bit(seed: int, position: int) -> None:
    key = torch.from_numpy(np.array([seed], dtype=np.uint64).view(np.int64))
    by_four, by_one = torch.empty(64, dtype=torch.float64), torch.empty(64, dtype=torch.float64)
    words = torch.empty(64, dtype=torch.int64)
    _noise[(1,)](key, torch.tensor([position]), by_four, by_one, words, BLOCKS=16)
    low, high = np.uint64(position & 0xFFFFFFFF), np.uint64(position >> 32)
    counter = (np.arange(16, dtype=np.uint64), *(np.full(16, w, np.uint64) for w in (low, high, 0)))
    halves = (np.full(16, seed & 0xFFFFFFFF, np.uint64), np.full(16, seed >> 32, np.uint64))
    expected = np.stack(philox_4x32(counter, halves), axis=1).ravel()
    assert np.array_equal(words.numpy().astype(np.uint64), expected)
    if seed == position == 0:  # Random123's first known answer
        assert words[:4].tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    whole = gumbel_of_all(np.array([seed], np.uint64), np.array([position], np.uint64), 64)[0]
    assert np.array_equal(gumbel_of_words(expected), whole)
    assert np.array_equal(by_four.numpy(), whole) and np.array_equal(by_one.numpy(), whole)


def _logits(num_rows: int, vocab_size: int, has_ties: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 3
    return logits.round() if has_ties else logits


def _check(logits: torch.Tensor, rows: list[dict[str, Any]]) -> list[int]:
    """The tokens drawn, which are the reference's."""
    expected, were_finite = reference.sample(logits, sampling_rows(*rows))
    found, is_finite = sampling.sample(logits, sampling_rows(*rows))
    assert torch.equal(is_finite, were_finite)
    assert torch.equal(found[is_finite], expected[is_finite])
    return found.tolist()
