"""Draws: Philox against its published vectors, Gumbel-max against softmax, exact kept sets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stemma.runtime.execute.philox import philox_4x32
from stemma.runtime.execute.sampler import gumbel, gumbel_of_all, kept_tokens, sample
from stemma.runtime.sampling_params import SamplingParams

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
    from stemma.runtime.execute.sampler import _gumbel_of

    low, high = _gumbel_of(np.array([0, ALL_ONES], dtype=np.uint64))
    assert -3.13 < low < -3.12 and 22.8 < high < 22.9


@pytest.mark.parametrize("params", [{}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 7, "top_p": 0.9}])
def test_draws_follow_the_softmax_of_the_kept_set(params: dict[str, float]) -> None:
    generator = np.random.default_rng(0)
    logits = generator.normal(size=12).astype(np.float32)
    temperature, num_draws = 0.7, 20_000
    sampling = SamplingParams(temperature=temperature, **params)  # type: ignore[arg-type]
    kept = _naive_kept(logits, temperature, sampling.top_k, sampling.top_p)
    weights = np.where(kept, np.exp(logits.astype(np.float64) / temperature), 0.0)
    expected = weights / weights.sum() * num_draws
    batch = torch.from_numpy(np.tile(logits, (num_draws, 1)))
    drawn = _tokens(batch, [sampling] * num_draws, np.arange(num_draws))
    counts = np.bincount(drawn, minlength=12)
    assert counts[~kept].sum() == 0
    chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    freedom = int(kept.sum()) - 1
    # Mean freedom, variance 2 freedom; five standard deviations with a fixed seed.
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom), (chi_square, freedom)


def test_draws_do_not_depend_on_batch_or_order() -> None:
    logits = torch.randn(24, 301, generator=torch.Generator().manual_seed(1))
    kinds = [
        {},
        {"top_k": 4},
        {"top_p": 0.5},
        {"top_k": 290},
        {"temperature": 0.0},
        {"top_p": 0.99},
    ]
    params = [SamplingParams(seed=i, **kinds[i % len(kinds)]) for i in range(24)]  # type: ignore[arg-type]
    positions = np.arange(24) * 1000
    together = _tokens(logits, params, positions)
    order = np.random.default_rng(2).permutation(24)
    shuffled = _tokens(logits[order.tolist()], [params[i] for i in order], positions[order])
    assert np.array_equal(shuffled, together[order])
    alone = [
        int(_tokens(logits[i : i + 1], params[i : i + 1], positions[i : i + 1])[0])
        for i in range(24)
    ]
    assert alone == together.tolist()


def test_seeds_positions_and_tokens_draw_independently() -> None:
    noise = gumbel_of_all(np.arange(40, dtype=np.uint64), np.zeros(40, np.uint64), 500)
    other = gumbel_of_all(np.zeros(40, np.uint64), np.arange(40, dtype=np.uint64), 500)
    for table in (noise, other):
        correlation = np.corrcoef(table) - np.eye(40)
        assert np.abs(correlation).max() < 5 / np.sqrt(500)
        assert abs(table.mean() - 0.5772) < 0.05  # Euler's constant


def test_greedy_takes_the_first_best_and_top_k_one_is_greedy() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]] * 2)
    params = [SamplingParams(temperature=0.0), SamplingParams(temperature=2.0, top_k=1)]
    assert _tokens(logits, params, np.array([0, 0])).tolist() == [1, 1]


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((200, 40), -torch.inf)
    logits[:, [3, 17]] = 0.0
    for params in (SamplingParams(), SamplingParams(top_k=10), SamplingParams(top_p=0.99)):
        drawn = _tokens(logits, [params] * 200, np.arange(200))
        assert set(drawn.tolist()) == {3, 17}


@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("vocab_size", [1, 2, 50, 1500])
def test_kept_set_equals_the_naive_one(vocab_size: int, has_ties: bool) -> None:
    generator = np.random.default_rng(vocab_size)
    for trial in range(20):
        spread = [0.1, 1.0, 8.0][trial % 3]
        logits = (generator.normal(size=vocab_size) * spread).astype(np.float32)
        if has_ties:
            logits = np.round(logits)
        top_k = [None, 2, 3, 40, 5000][trial % 5]
        top_p = [1.0, 0.9, 0.3, 0.999][trial % 4]
        params = SamplingParams(temperature=0.6, top_k=top_k, top_p=top_p)
        best = np.sort(logits)[::-1][: top_k or 8]
        kept = kept_tokens(logits, params, best)
        ids = np.arange(vocab_size) if kept is None else kept
        expected = np.flatnonzero(_naive_kept(logits, 0.6, top_k, top_p))
        assert np.array_equal(ids, expected), (trial, top_k, top_p)


def _naive_kept(
    logits: np.ndarray, temperature: float, top_k: int | None, top_p: float
) -> np.ndarray:
    """Token by token, best first, ties by id."""
    order = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))[: top_k or len(logits)]
    weights = [
        float(np.exp((float(logits[i]) - float(logits[order[0]])) / temperature)) for i in order
    ]
    kept, reached = np.zeros(len(logits), dtype=bool), 0.0
    for token, weight in zip(order, weights, strict=True):
        kept[token] = True
        reached += weight
        if top_p < 1.0 and reached >= top_p * sum(weights):
            break
    return kept


def test_rows_that_are_not_finite_are_told_and_do_not_disturb_the_others() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(3))
    params = [SamplingParams(top_p=0.9)] * 5 + [SamplingParams(temperature=0.0)]
    expected = sample(logits, params, np.arange(6))
    logits[0, 7], logits[1, 3], logits[2], logits[5, 1] = (
        torch.nan,
        torch.inf,
        -torch.inf,
        torch.nan,
    )
    logits[3, expected.token_ids[3] - 1] = -torch.inf
    found = sample(logits, params, np.arange(6))
    assert expected.is_finite.all()
    assert found.is_finite.tolist() == [False, False, False, True, True, False]
    assert found.token_ids[4] == expected.token_ids[4]
    assert ((found.token_ids >= 0) & (found.token_ids < 50)).all()


def _tokens(
    logits: torch.Tensor, params: list[SamplingParams], positions: np.ndarray
) -> np.ndarray:
    return sample(logits, params, positions).token_ids


def _ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)
