"""What became of a work's programs on an engine, call by call."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from .scripts import Script, Work


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One call as it ran; times in seconds since the work began."""

    prompt: array[int]
    output: array[int]
    num_cached: int  # prompt tokens that needed no computing when it was admitted
    sent_s: float
    ended_s: float
    queue_s: float | None = None  # until it was admitted; None: not reported by the engine
    prefill_s: float | None = None  # from then to the first token
    decode_s: float | None = None  # and to the last one

    @property
    def admitted_s(self) -> float:
        """When it was admitted, or sent if that is unknown."""
        return self.sent_s + (self.queue_s or 0.0)


@dataclass(frozen=True, slots=True)
class ProgramRecord:
    """One program; `completion_s` from its start to its end, its pauses included."""

    script: Script
    completion_s: float
    calls: tuple[CallRecord, ...]


@dataclass(frozen=True, slots=True)
class Counters:
    """An engine's own counters since its start; None where it does not report them."""

    num_computed: int | None = None  # tokens
    num_preemptions: int | None = None
    num_resident: int | None = None  # tokens in the device's pool now


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run of a work; counters are the run's increments."""

    work: Work
    wall_s: float
    programs: tuple[ProgramRecord, ...]
    added: Counters

    @property
    def calls(self) -> list[CallRecord]:
        """All calls in the order in which they were admitted."""
        found = [call for program in self.programs for call in program.calls]
        return sorted(found, key=lambda call: call.admitted_s)


class Player(Protocol):
    """An engine that runs scripts."""

    name: str

    def play(self, script: Script, origin_s: float) -> list[CallRecord]:
        """Run one script; called concurrently, each in its own thread.

        Times are counted from `origin_s`, of time.perf_counter().
        """

    def counters(self) -> Counters:
        """The counters now."""

    def close(self) -> None:
        """End the engine."""


def carry_out(player: Player, work: Work) -> RunRecord:
    """Run all scripts, each from its start time on."""
    before, origin_s = player.counters(), time.perf_counter()

    def carry_out_one(script: Script) -> ProgramRecord:
        starts_s = origin_s + script.start_s
        time.sleep(max(0.0, starts_s - time.perf_counter()))
        calls = player.play(script, origin_s)
        return ProgramRecord(script, time.perf_counter() - starts_s, tuple(calls))

    with ThreadPoolExecutor(len(work.scripts)) as pool:
        programs = tuple(pool.map(carry_out_one, work.scripts))
    wall_s = time.perf_counter() - origin_s
    return RunRecord(work, wall_s, programs, _difference(player.counters(), before))


def _difference(after: Counters, before: Counters) -> Counters:
    values: Sequence[int | None] = [
        None if late is None or early is None else late - early
        for late, early in (
            (after.num_computed, before.num_computed),
            (after.num_preemptions, before.num_preemptions),
            (after.num_resident, before.num_resident),
        )
    ]
    return Counters(*values)
