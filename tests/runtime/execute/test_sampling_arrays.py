"""Penalties, bias and masks: from requests through arrays to logits, on each backend."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import FakeListener
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.kernels.cpu import adjust as cpu
from stemma.kernels.ops import AdjustLogits
from stemma.kernels.reference import sampling as reference
from stemma.kernels.sampling_rows import AdjustedRows
from stemma.runtime.execute.sampling_arrays import RowAdjustment, adjusted_arrays
from stemma.runtime.schedule.plan import Adjustment
from stemma.runtime.schedule.request import Request
from stemma.runtime.schedule.sampling_params import SamplingParams

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


OPS = pytest.mark.parametrize(
    "adjust", [reference.adjust_logits, cpu.adjust_logits], ids=["reference", "cpu"]
)


@OPS
@settings(max_examples=80)
@given(rows=ROWS, seed=st.integers(0, 2**32 - 1), data=st.data())
def test_adjusted_logits_are_the_documented_ones_in_any_batch(
    adjust: AdjustLogits,
    rows: list[tuple[dict[str, Any], list[int], list[int], list[int]]],
    seed: int,
    data: Any,
) -> None:
    """Some rows of the batch stay as they are; masked ids may lie beyond the vocabulary; of some
    outputs the last token is known from the step before only."""
    vocab_size = 11
    logits = torch.randn(len(rows) + 2, vocab_size, generator=torch.Generator().manual_seed(seed))
    places = data.draw(st.permutations(range(len(rows) + 2)))[: len(rows)]
    expected = logits.double().numpy()
    adjusted, previous = [], []
    for place, (fields, prompt, output, masked) in zip(places, rows, strict=True):
        params = SamplingParams(**fields)
        masked = [*masked, 10**6] if masked else []
        expected[place] = _naive_adjusted(expected[place], params, prompt, output, masked)
        previous.append(output[-1] if output else -1)
        is_known = not output or data.draw(st.booleans())
        row = _row_adjustment(place, params, prompt, output if is_known else output[:-1], masked)
        adjusted.append(row if is_known else replace(row, latest=len(previous) - 1))
    alone = logits[places[0]][None].clone()
    _apply(adjust, alone, [replace(adjusted[0], place=0)], previous)
    _apply(adjust, logits, adjusted, previous)
    np.testing.assert_allclose(logits.numpy(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits[places[0]], alone[0]), "the same bits in any batch"


def _apply(
    adjust: AdjustLogits,
    logits: torch.Tensor,
    rows: list[RowAdjustment],
    previous: Sequence[int] = (),
) -> None:
    arrays = adjusted_arrays(rows, logits.shape[-1])
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    adjust(logits, AdjustedRows(**tensors), torch.tensor(previous, dtype=torch.int64))


@OPS
def test_padding_rows_and_entries_change_nothing(adjust: AdjustLogits) -> None:
    params = SamplingParams(presence_penalty=1.0, repetition_penalty=2.0)
    arrays = adjusted_arrays([_row_adjustment(1, params, [4], [3, 5], [])], 11)
    logits = torch.randn(3, 11, generator=torch.Generator().manual_seed(2))
    expected = logits.clone()
    _apply(adjust, expected, [_row_adjustment(1, params, [4], [3, 5], [])])
    last = int(arrays["entry_start"][-1])
    padding = {"place": -1, "latest": -1, "entry_start": last, "repetition": 1.0}
    padded = {
        name: torch.from_numpy(np.append(array, [padding.get(name, 0)] * 2).astype(array.dtype))
        for name, array in arrays.items()
    }
    adjust(logits, AdjustedRows(**padded), torch.zeros(0, dtype=torch.int64))
    assert torch.equal(logits, expected)


def _row_adjustment(
    place: int, params: SamplingParams, prompt: list[int], output: list[int], masked: list[int]
) -> RowAdjustment:
    """As a request makes it that is still in its first min_tokens where tokens are masked."""
    params = replace(params, max_tokens=99, min_tokens=99 if masked else 0)
    request = Request(1, array("i", prompt), params, FakeListener(), stop_ids=frozenset(masked))
    for token_id in output:
        request.append_token(token_id)
    empty = Adjustment(array("i"), array("i"), array("d"), array("i"))
    return RowAdjustment(place, params, request.adjustment or empty)


def _naive_adjusted(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: list[int],
    output: list[int],
    masked: list[int],
) -> np.ndarray:
    """Token by token, as docs/how-it-works/sampling.md has it."""
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


@OPS
def test_the_repetition_penalty_is_that_of_transformers(adjust: AdjustLogits) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(4))
    prompt, output = [3, 3, 4, 9], [9, 40, 3]
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + output]), logits)
    params = SamplingParams(repetition_penalty=1.7)
    _apply(adjust, logits, [_row_adjustment(0, params, prompt, output, [])])
    assert torch.equal(logits, expected)
