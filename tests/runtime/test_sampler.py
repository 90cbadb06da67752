"""Draws: Philox against its published vectors, Gumbel-max against softmax, exact kept sets."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import FakeListener
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.errors import InvalidRequest
from stemma.runtime.execute.adjustments import AdjustedRow, adjust_logits
from stemma.runtime.execute.philox import philox_4x32
from stemma.runtime.execute.sampler import gumbel, gumbel_of_all, kept_tokens, sample
from stemma.runtime.request import Request
from stemma.runtime.sampling_params import SamplingParams, seed_of_sample
from stemma.runtime.step import Adjustment

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


@pytest.mark.parametrize(
    "params",
    [
        {}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 7, "top_p": 0.9}, {"min_p": 0.2},
        {"top_k": 9, "top_p": 0.95, "min_p": 0.1},
    ],
    ids=str,
)  # fmt: skip
def test_draws_follow_the_softmax_of_the_kept_set(params: dict[str, float]) -> None:
    generator = np.random.default_rng(0)
    logits = generator.normal(size=12).astype(np.float32)
    temperature, num_draws = 0.7, 20_000
    sampling = SamplingParams(temperature=temperature, **params)  # type: ignore[arg-type]
    kept = _naive_kept(logits, temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    assert kept.sum() < 12 or not params, "the case keeps everything"
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
        {"min_p": 0.3},
        {"min_p": 0.01, "top_p": 0.9},
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
        min_p = [0.0, 0.02, 0.5, 1.0][trial // 5]
        params = SamplingParams(temperature=0.6, top_k=top_k, top_p=top_p, min_p=min_p)
        best = np.sort(logits)[::-1][: top_k or 8]
        kept = kept_tokens(logits, params, best)
        ids = np.arange(vocab_size) if kept is None else kept
        expected = np.flatnonzero(_naive_kept(logits, 0.6, top_k, top_p, min_p))
        assert np.array_equal(ids, expected), (trial, top_k, top_p, min_p)


def _naive_kept(
    logits: np.ndarray, temperature: float, top_k: int | None, top_p: float, min_p: float
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
    for token, weight in zip(order, weights, strict=True):
        kept[token] &= weight >= min_p
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


# --- penalties, bias, masks -----------------------------------------------------------------------

PENALTIES = st.fixed_dictionaries(
    {},
    optional={
        "frequency_penalty": st.sampled_from([-2.0, 0.5, 2.0]),
        "presence_penalty": st.sampled_from([-1.0, 0.75]),
        "repetition_penalty": st.sampled_from([0.5, 1.3, 10.0]),
        "logit_bias": st.dictionaries(st.integers(0, 10), st.floats(-100, 100), max_size=4).map(
            lambda bias: tuple(bias.items())
        ),
    },
)
TOKENS = st.lists(st.integers(0, 10), max_size=12)
ROWS = st.lists(st.tuples(PENALTIES, TOKENS, TOKENS, TOKENS), min_size=1, max_size=5)


@settings(max_examples=150)
@given(rows=ROWS, seed=st.integers(0, 2**32 - 1), data=st.data())
def test_adjusted_logits_are_the_documented_ones_in_any_batch(
    rows: list[tuple[dict[str, Any], list[int], list[int], list[int]]], seed: int, data: Any
) -> None:
    """Some rows of the batch stay as they are; masked ids may lie beyond the vocabulary."""
    vocab_size = 11
    logits = torch.randn(len(rows) + 2, vocab_size, generator=torch.Generator().manual_seed(seed))
    places = data.draw(st.permutations(range(len(rows) + 2)))[: len(rows)]
    expected = logits.double().numpy()
    adjusted = []
    for place, (fields, prompt, output, masked) in zip(places, rows, strict=True):
        params = SamplingParams(**fields)
        masked = [*masked, 10**6] if masked else []
        adjusted.append(_adjusted_row(place, params, prompt, output, masked))
        expected[place] = _naive_adjusted(expected[place], params, prompt, output, masked)
    alone = logits[places[0]][None].clone()
    adjust_logits(alone, [AdjustedRow(0, adjusted[0].params, adjusted[0].adjustment)])
    adjust_logits(logits, adjusted)
    np.testing.assert_allclose(logits.numpy(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits[places[0]], alone[0]), "the same bits in any batch"


def _adjusted_row(
    place: int, params: SamplingParams, prompt: list[int], output: list[int], masked: list[int]
) -> AdjustedRow:
    """As a request makes it that is still in its first min_tokens where tokens are masked."""
    params = replace(params, max_tokens=99, min_tokens=99 if masked else 0)
    request = Request(1, array("i", prompt), params, FakeListener(), stop_ids=frozenset(masked))
    for token_id in output:
        request.append_token(token_id)
    empty = Adjustment(array("i"), array("i"), array("d"), array("i"))
    return AdjustedRow(place, params, request.adjustment or empty)


def _naive_adjusted(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: list[int],
    output: list[int],
    masked: list[int],
) -> np.ndarray:
    """Token by token, as docs/sampling.md has it."""
    changed = []
    for token_id, logit in enumerate(logits.tolist()):
        if token_id in prompt or token_id in output:
            penalty = params.repetition_penalty
            logit = logit / penalty if logit > 0 else logit * penalty
        logit -= params.frequency_penalty * output.count(token_id)
        logit -= params.presence_penalty * (token_id in output)
        logit += dict(params.logit_bias).get(token_id, 0.0)
        changed.append(-np.inf if token_id in masked else logit)
    return np.array(changed)


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(4))
    prompt, output = [3, 3, 4, 9], [9, 40, 3]
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + output]), logits)
    params = SamplingParams(repetition_penalty=1.7)
    adjust_logits(logits, [_adjusted_row(0, params, prompt, output, [])])
    assert torch.equal(logits, expected)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("min_p", [-0.1, 1.1, float("nan"), "x", True]),
        ("frequency_penalty", [-2.1, 2.1, None]),
        ("presence_penalty", [-2.1, 2.1, float("inf")]),
        ("repetition_penalty", [0.0, -1.0, 10.1]),
        ("logit_bias", [
            {1: 2.0}, ((1, 101.0),), ((1, -101.0),), ((-1, 1.0),), ((1, 1.0), (1, 2.0)), ((1,),),
            ((1, "a"),), (("1", 1.0),), tuple((i, 1.0) for i in range(1025)),
        ]),
        ("min_tokens", [-1, 129, 1.5]),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_name(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidRequest, match=f"^{field}="):
            SamplingParams(**{field: value})
    assert hash(SamplingParams(logit_bias=((5, -100.0), (6, 100)))) is not None


def test_samples_have_seeds_of_their_own_and_the_first_has_the_given_one() -> None:
    seeds = [[seed_of_sample(seed, index) for index in range(64)] for seed in (0, 7, 2**63 - 1)]
    assert [row[0] for row in seeds] == [0, 7, 2**63 - 1]
    everything = [seed for row in seeds for seed in row]
    assert len(set(everything)) == len(everything)
    assert all(0 <= seed < 2**63 for seed in everything)


def _tokens(
    logits: torch.Tensor, params: list[SamplingParams], positions: np.ndarray
) -> np.ndarray:
    return sample(logits, params, positions).token_ids


def _ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)
