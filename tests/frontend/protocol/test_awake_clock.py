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
