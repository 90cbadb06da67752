"""The clock by which silence is judged."""

from __future__ import annotations

import time

import pytest

from stemma.frontend.protocol.awake_clock import AwakeClock


def test_time_that_its_reader_slept_through_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    clock = AwakeClock(longest_s=0.5)
    readings = []
    for elapsed_s in (0.25, 0.5, 3600.0, 0.0, 0.25):
        now_s += elapsed_s
        readings.append(clock.read())
    assert readings == [0.25, 0.75, 1.25, 1.25, 1.5]


def test_long_steps_of_its_reader_count_and_a_stop_within_one_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    clock = AwakeClock(longest_s=0.5)
    lived = []
    for step_s in (4.0, 0.125, 4.0, 3.0, 3600.0, 2.0):
        now_s += 0.25
        before_s = clock.read()
        now_s += step_s
        lived.append(clock.read_after_step() - before_s)
    assert lived == [0.5, 0.125, 4.0, 3.0, 4.0, 2.0]
