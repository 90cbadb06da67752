"""Timers of a loop that stands still at times."""

from __future__ import annotations

import asyncio
import time

import pytest
from waiting import PATIENCE_S

from stemma.server.protocol import awake_timer
from stemma.server.protocol.awake_timer import AwakeTimer

STEP_S = 0.01


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awake_timer, "STEP_S", STEP_S)


def test_time_in_which_the_loop_stood_still_does_not_count() -> None:
    async def stand_still() -> float:
        timer, over = AwakeTimer(asyncio.get_running_loop()), asyncio.Event()
        timer.start(100 * STEP_S, over.set)
        time.sleep(120 * STEP_S)
        for _ in range(3):
            await asyncio.sleep(0)
        assert timer.is_running and not over.is_set()
        left_s = timer.stop()
        timer.start(left_s / 50, over.set)
        await asyncio.wait_for(over.wait(), PATIENCE_S)
        assert not timer.is_running and timer.stop() == 0
        return left_s

    left_s = asyncio.run(stand_still())
    assert 90 * STEP_S < left_s <= 100 * STEP_S


def test_what_was_started_last_is_called_alone() -> None:
    async def calls() -> list[str]:
        timer, called, over = AwakeTimer(asyncio.get_running_loop()), [], asyncio.Event()
        timer.start(STEP_S, lambda: called.append("first"))
        timer.start(3 * STEP_S, over.set)
        await asyncio.wait_for(over.wait(), PATIENCE_S)
        return called

    assert asyncio.run(calls()) == []
