"""Pools that run short: what tests of preemption switch off."""

from __future__ import annotations

import pytest

from stemma.runtime.schedule.queue.step_costs import StepCosts
from stemma.runtime.schedule.scheduler import Scheduler


def admit_all(patch: pytest.MonkeyPatch, scheduler: Scheduler) -> None:
    """Requests are admitted whether or not there is room for what they will say, in the order that
    follows from them alone: what steps take, on this machine and now, limits no prompt."""
    patch.setattr(scheduler.admission, "_require_room", lambda *_: None)
    patch.setattr(StepCosts, "note", lambda *_, **__: None)
