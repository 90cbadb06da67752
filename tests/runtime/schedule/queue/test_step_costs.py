"""What a step costs, as a router is told of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stemma.runtime.schedule.queue.step_costs import StepCosts


def plan(*lengths: int) -> Any:
    return SimpleNamespace(rows=[SimpleNamespace(known_end=length, start=0) for length in lengths])


def costs(*num_rows: int) -> StepCosts:
    """Of a device on which a step takes 10 ms, and a row 1 ms more; a prompt's token 0.5 ms."""
    found = StepCosts()
    found.note(plan(100), 0.050, 0.0)
    for at_s, num in enumerate(num_rows):
        found.note(plan(*[1] * num), 0.010 + 0.001 * num, float(at_s))
    return found


def test_one_more_row_costs_what_steps_of_other_sizes_tell() -> None:
    assert costs(4, 8, 16, 32, 8).describe()["added_row_tokens"] == pytest.approx(2.0)


def test_where_all_steps_are_alike_a_share_of_a_large_one_is_what_is_known() -> None:
    assert costs(*[48] * 9).describe()["added_row_tokens"] == pytest.approx(2.0 * 58 / 48)
    assert costs(*[4] * 9).describe()["added_row_tokens"] == 0.0, "it may be all the step's own"


def test_nothing_is_told_before_a_prompt_was_computed() -> None:
    assert StepCosts().describe() == {}


def test_what_nobody_has_asked_for_teaches_what_a_token_costs_and_is_no_load() -> None:
    asked, ahead = StepCosts(), StepCosts()
    asked.note(plan(100), 0.050, 0.0)
    ahead.note(plan(100), 0.050, 0.0, is_load=False)
    assert asked.prompt_token_s == ahead.prompt_token_s == pytest.approx(0.0005)
    assert asked.load(0.0) > 0.0 == ahead.load(0.0)
