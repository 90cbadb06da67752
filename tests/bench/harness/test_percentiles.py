"""Percentiles by the nearest rank."""

from __future__ import annotations

import pytest

from stemma.bench.harness.report import percentile


@pytest.mark.parametrize(("percent", "expected"), [(0, 1), (1, 1), (50, 50), (99, 99), (100, 100)])
def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed(
    percent: int, expected: int
) -> None:
    assert percentile(range(1, 101), percent) == expected
    assert percentile([7.0], percent) == 7.0
