"""What sampling values may be, the seeds of several samples, and the arrays made of them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from stemma.errors import InvalidRequest
from stemma.frontend.protocol.ir import SAMPLING_FIELDS, seed_of_sample
from stemma.runtime.execute.sampling_arrays import sampling_arrays
from stemma.runtime.schedule.sampling_params import SamplingParams


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


def test_a_gen_can_ask_for_each_field_and_for_no_other() -> None:
    assert set(SAMPLING_FIELDS) == {field.name for field in fields(SamplingParams)}


def test_samples_have_seeds_of_their_own_and_the_first_has_the_given_one() -> None:
    seeds = [[seed_of_sample(seed, index) for index in range(64)] for seed in (0, 7, 2**63 - 1)]
    assert [row[0] for row in seeds] == [0, 7, 2**63 - 1]
    everything = [seed for row in seeds for seed in row]
    assert len(set(everything)) == len(everything)
    assert all(0 <= seed < 2**63 for seed in everything)


def test_arrays_hold_each_row_and_zero_for_what_is_off() -> None:
    params = [SamplingParams(temperature=0.5, top_k=3, seed=2**63 - 1), SamplingParams(min_p=0.1)]
    arrays = sampling_arrays(params, np.array([7, 2**40]))
    assert {name: array.tolist() for name, array in arrays.items()} == {
        "temperature": [0.5, 1.0],
        "top_k": [3, 0],
        "top_p": [1.0, 1.0],
        "min_p": [0.0, 0.1],
        "seed": [2**63 - 1, 0],
        "position": [7, 2**40],
    }


def test_a_temperature_too_low_to_divide_by_is_zero() -> None:
    params = [SamplingParams(temperature=5e-324), SamplingParams(temperature=1e-100)]
    assert [row.is_greedy for row in params] == [True, False]
    assert sampling_arrays(params, np.array([1, 2]))["temperature"].tolist() == [0.0, 1e-100]
