"""Draws: Philox against its published vectors, Gumbel-max against softmax, exact kept sets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sampled_rows import sampling_rows

from stemma.kernels.cpu import sampling as cpu
from stemma.kernels.gumbel import gumbel, gumbel_of_all, gumbel_of_words, philox_4x32
from stemma.kernels.ops import Sample
from stemma.kernels.reference import sampling as reference
from stemma.kernels.sampling_rows import top_logprobs

PI_COUNTER = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
ALL_ONES = 0xFFFFFFFF
# Random123, tests/kat_vectors, lines "philox4x32 10".
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ALL_ONES,) * 4, (ALL_ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (PI_COUNTER, (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    words = philox_4x32(
        tuple(np.array([word], dtype=np.uint64) for word in counter),  # type: ignore[arg-type]
        tuple(np.array([word], dtype=np.uint64) for word in key),  # type: ignore[arg-type]
    )
    assert tuple(int(word[0]) for word in words) == expected


def test_noise_is_the_documented_function_of_seed_position_and_token() -> None:
    seed, position, token_id = 2**62 + 12345, 2**33 + 7, 1001
    words = philox_4x32(
        tuple(np.array([w], dtype=np.uint64) for w in (token_id >> 2, 7, 2, 0)),  # type: ignore[arg-type]
        (np.array([seed & ALL_ONES], np.uint64), np.array([seed >> 32], np.uint64)),
    )
    uniform = (int(words[token_id & 3][0]) + 0.5) / 2**32
    noise = gumbel(_ids(seed), _ids(position), np.array([token_id]))
    assert noise[0] == -np.log(-np.log(uniform))


def test_noise_of_all_tokens_equals_noise_of_single_ones() -> None:
    seeds, positions = np.array([5, 6], np.uint64), np.array([0, 99], np.uint64)
    whole = gumbel_of_all(seeds, positions, 103)
    assert whole.shape == (2, 103)
    for row in range(2):
        single = gumbel(seeds[row : row + 1], positions[row : row + 1], np.arange(103))
        assert np.array_equal(whole[row], single)


def test_noise_stays_finite_at_both_ends_of_the_words() -> None:
    low, high = gumbel_of_words(np.array([0, ALL_ONES], dtype=np.uint64))
    assert -3.13 < low < -3.12 and 22.8 < high < 22.9


@pytest.mark.parametrize(
    "params",
    [
        {}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 7, "top_p": 0.9}, {"min_p": 0.2},
        {"top_k": 9, "top_p": 0.95, "min_p": 0.1},
    ],
    ids=str,
)  # fmt: skip
def test_draws_follow_the_softmax_of_the_kept_set(params: dict[str, Any]) -> None:
    generator = np.random.default_rng(0)
    logits = generator.normal(size=12).astype(np.float32)
    temperature, num_draws = 0.7, 20_000
    cut = cpu.Truncation(temperature, **{"top_k": 0, "top_p": 1.0, "min_p": 0.0, **params})
    kept = _naive_kept(logits, cut)
    assert kept.sum() < 12 or not params, "the case keeps everything"
    weights = np.where(kept, np.exp(logits.astype(np.float64) / temperature), 0.0)
    expected = weights / weights.sum() * num_draws
    batch = torch.from_numpy(np.tile(logits, (num_draws, 1)))
    rows = [{**cut._asdict(), "position": position} for position in range(num_draws)]
    drawn = cpu.sample(batch, sampling_rows(*rows))[0].numpy()
    counts = np.bincount(drawn, minlength=12)
    assert counts[~kept].sum() == 0
    chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    freedom = int(kept.sum()) - 1
    # Mean freedom, variance 2 freedom; five standard deviations with a fixed seed.
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom), (chi_square, freedom)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_draws_do_not_depend_on_batch_or_order_and_are_those_of_the_reference(
    dtype: torch.dtype,
) -> None:
    logits = torch.randn(24, 301, generator=torch.Generator().manual_seed(1)).to(dtype)
    kinds: list[dict[str, Any]] = [
        {},
        {"top_k": 4},
        {"top_p": 0.5},
        {"top_k": 290},
        {"temperature": 0.0},
        {"top_p": 0.99},
        {"min_p": 0.3},
        {"min_p": 0.01, "top_p": 0.9},
    ]
    rows = [
        {"seed": 2**64 - 1 - i, "position": i * 1000, **kinds[i % len(kinds)]} for i in range(24)
    ]
    together = _tokens(logits, rows)
    assert torch.equal(together, reference.sample(logits, sampling_rows(*rows))[0])
    order = np.random.default_rng(2).permutation(24).tolist()
    assert torch.equal(_tokens(logits[order], [rows[i] for i in order]), together[order])
    alone = [int(_tokens(logits[i : i + 1], rows[i : i + 1])[0]) for i in range(24)]
    assert alone == together.tolist()


def test_seeds_positions_and_tokens_draw_independently() -> None:
    noise = gumbel_of_all(np.arange(40, dtype=np.uint64), np.zeros(40, np.uint64), 500)
    other = gumbel_of_all(np.zeros(40, np.uint64), np.arange(40, dtype=np.uint64), 500)
    for table in (noise, other):
        correlation = np.corrcoef(table) - np.eye(40)
        assert np.abs(correlation).max() < 5 / np.sqrt(500)
        assert abs(table.mean() - 0.5772) < 0.05  # Euler's constant


SAMPLERS = pytest.mark.parametrize("sample", [reference.sample, cpu.sample], ids=["ref", "cpu"])


@SAMPLERS
def test_greedy_takes_the_first_best_and_top_k_one_is_greedy(sample: Sample) -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]] * 2)
    rows = sampling_rows({"temperature": 0.0}, {"temperature": 2.0, "top_k": 1})
    assert sample(logits, rows)[0].tolist() == [1, 1]


@SAMPLERS
def test_masked_tokens_are_never_drawn(sample: Sample) -> None:
    logits = torch.full((200, 40), -torch.inf)
    logits[:, [3, 17]] = 0.0
    cases: list[dict[str, Any]] = [{}, {"top_k": 10}, {"top_p": 0.99}]
    for params in cases:
        rows = sampling_rows(*({**params, "position": i} for i in range(200)))
        assert set(sample(logits, rows)[0].tolist()) == {3, 17}


@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("vocab_size", [1, 2, 50, 1500])
def test_kept_set_equals_the_naive_one(vocab_size: int, has_ties: bool) -> None:
    generator = np.random.default_rng(vocab_size)
    for trial in range(20):
        spread = [0.1, 1.0, 8.0][trial % 3]
        logits = (generator.normal(size=vocab_size) * spread).astype(np.float32)
        if has_ties:
            logits = np.round(logits)
        cut = cpu.Truncation(
            temperature=0.6,
            top_k=[0, 2, 3, 40, 5000][trial % 5],
            top_p=[1.0, 0.9, 0.3, 0.999][trial % 4],
            min_p=[0.0, 0.02, 0.5, 1.0][trial // 5],
        )
        expected = np.flatnonzero(_naive_kept(logits, cut))
        kept = cpu.kept_tokens(logits, cut, np.sort(logits)[::-1][: cut.top_k or 8])
        assert np.array_equal(np.arange(vocab_size) if kept is None else kept, expected), cut
        assert np.array_equal(reference.kept_tokens(logits.astype(float), *cut), expected), cut


def _naive_kept(logits: np.ndarray, cut: cpu.Truncation) -> np.ndarray:
    """Token by token, best first, ties by id."""
    order = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    order = order[: cut.top_k or len(logits)]
    highest = float(logits[order[0]])
    weights = [float(np.exp((float(logits[i]) - highest) / cut.temperature)) for i in order]
    kept, reached = np.zeros(len(logits), dtype=bool), 0.0
    for token, weight in zip(order, weights, strict=True):
        kept[token] = True
        reached += weight
        if cut.top_p < 1.0 and reached >= cut.top_p * sum(weights):
            break
    for token, weight in zip(order, weights, strict=True):
        kept[token] &= weight >= cut.min_p
    return kept


@SAMPLERS
def test_rows_that_are_not_finite_are_told_and_do_not_disturb_the_others(sample: Sample) -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(3))
    rows = sampling_rows(*({"top_p": 0.9, "position": i} for i in range(5)), {"temperature": 0.0})
    expected, is_finite = sample(logits, rows)
    assert is_finite.all()
    logits[0, 7], logits[1, 3], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, expected[3] - 1], logits[5, 1] = -torch.inf, torch.nan
    found, is_finite = sample(logits, rows)
    assert is_finite.tolist() == [False, False, False, True, True, False]
    assert found[4] == expected[4]
    assert ((found >= 0) & (found < 50)).all()


def test_best_tokens_are_listed_with_the_smaller_id_first_among_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, -0.0, 3.0, 0.0, -2.0], [-1.0, -1.0, -7.0, -0.5, -1.0, -9.0]])
    for dtype in (torch.float32, torch.float64):
        token_ids, logprobs = top_logprobs(logits.to(dtype), 4)
        assert token_ids.tolist() == [[1, 3, 0, 2], [3, 0, 1, 4]]
        expected = logits.to(dtype).log_softmax(dim=-1).gather(1, token_ids)
        torch.testing.assert_close(logprobs, expected)
    for count in (0, 1, 6):
        assert top_logprobs(logits, count)[0].shape == (2, count)


def test_best_tokens_at_the_edge_are_those_of_a_stable_sort() -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(5)).round(decimals=1)
    expected = (-logits).argsort(dim=-1, stable=True)[:, :64]
    assert torch.equal(top_logprobs(logits, 64)[0], expected)


def _tokens(logits: torch.Tensor, rows: list[dict[str, Any]]) -> torch.Tensor:
    return cpu.sample(logits, sampling_rows(*rows))[0]


def _ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)
