"""Histograms of requests: what is counted where."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stemma.runtime.schedule.request import FinishReason, Request, Scoring
from stemma.runtime.schedule.sampling_params import SamplingParams
from stemma.runtime.schedule.stats import Histogram, Latencies


@given(st.lists(st.floats(0, 20, allow_nan=False), max_size=50))
def test_a_value_counts_below_the_first_bound_that_is_not_less(values: list[float]) -> None:
    histogram = Histogram((1, 5, 10))
    for value in values:
        histogram.note(value)
    below = [sum(value <= bound for value in values) for bound in (1, 5, 10)]
    counts = histogram.counts
    assert [sum(counts[: i + 1]) for i in range(3)] == below
    assert sum(counts) == len(values)
    assert histogram.total == pytest.approx(sum(values))


def ended(reason: FinishReason, num_output: int = 5, scoring: Scoring | None = None) -> Request:
    request = Request(1, array("i", range(7)), SamplingParams(), listener=None, scoring=scoring)  # type: ignore[arg-type]
    request.token_ids.extend(range(num_output))
    request.created_s, request.admitted_s = 10.0, 10.5
    request.first_token_s, request.finished_s = 11.0, 13.0
    request.finish_reason = reason
    return request


def test_phases_add_up_to_the_latency_and_a_mean_counts_for_each_token() -> None:
    latencies = Latencies()
    latencies.note(ended(FinishReason.LENGTH))
    said = latencies.describe()
    sums = {name: each["sum"] for name, each in said["histograms"].items()}
    assert sums["queue"] + sums["prefill"] + sums["decode"] == sums["latency"] == 3.0
    assert sums["time_to_first_token"] == 1.0
    assert sums["prompt_tokens"] == 7 and sums["output_tokens"] == 5
    assert sum(said["histograms"]["inter_token"]["counts"]) == 4
    assert sums["inter_token"] == pytest.approx(2.0)


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_what_did_not_end_well_has_a_reason_and_no_latency(reason: FinishReason) -> None:
    latencies = Latencies()
    latencies.note(ended(reason))
    said = latencies.describe()
    assert said["num_ended"] == {r.value: int(r is reason) for r in FinishReason}
    assert not any(sum(each["counts"]) for each in said["histograms"].values())


def test_scoring_is_no_generation() -> None:
    latencies = Latencies()
    latencies.note(ended(FinishReason.STOP, 0, Scoring(0, (1,))))
    assert not any(latencies.describe()["num_ended"].values())
