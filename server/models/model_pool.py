"""Which of a server's models are loaded: on demand, and within a bound on memory and number.

Where there is no room for a model, of those with neither requests nor programs the one is unloaded
whose last request is the longest ago. While all have some, the wanted one waits; after TURN_S the
model that was used least recently lets no more requests in until it was unloaded, so that one which
always has something to do does not keep others out for ever.

A model whose requests told how long it is to stay is unloaded so long after the last one, also
where nobody needs its room.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from ...errors import ModelLoadError, StemmaError
from ..access.drain import DrainState
from ..protocol.failures import Refusal
from .model_slot import LoadFailure, ModelSlot

log = logging.getLogger(__name__)

TURN_S = 10.0  # guess
POLL_S = 0.25  # between looks for programs, whose end nobody tells
VITALS_S = 2.0
RETRY_PAUSES_S = (0.0, 2.0, 5.0, 10.0, 30.0)  # after so many failures in a row; then the last one
RETRY_AFTER_S = "5"  # told to who waited in vain (guess)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """What may be loaded at a time, and how long a request waits for it."""

    max_models: int
    max_bytes: int | None  # None: any number
    load_timeout_s: float
    drain_s: float  # that programs may take to end


class ModelPool:
    """Lives on the server's event loop. Invariant: what is there fits `limits`, of models that are
    too large for them alone one."""

    def __init__(
        self, slots: Sequence[ModelSlot], limits: PoolLimits, drain_state: DrainState
    ) -> None:
        self.slots = slots
        self._limits = limits
        self._drain_state = drain_state
        self._loads: dict[ModelSlot, asyncio.Task[None]] = {}
        self._seeking: set[ModelSlot] = set()  # those that wait for room
        self._unloads: dict[ModelSlot, asyncio.Task[None]] = {}
        self._expiries: dict[ModelSlot, asyncio.Task[None]] = {}
        self._turns = asyncio.Lock()  # who seeks room, in order
        self._joint_turns = asyncio.Lock()  # who waits for several models,
        self._joint: Sequence[ModelSlot] = ()  # which are these
        self._change = asyncio.Event()
        self._threads = ThreadPoolExecutor(2 * len(slots), "models")

    async def enter(
        self, slot: ModelSlot, patience_s: float | None = None, keep_alive_s: float | None = None
    ) -> None:
        """Count a request in, once the model is loaded. `patience_s`: how long it waits at most,
        within `load_timeout_s`; `keep_alive_s`: how long the model stays loaded afterwards, None:
        as it was told before.

        Raises Refusal where that takes too long or the server is stopped, ModelLoadError where it
        cannot be loaded.
        """
        if not slot.is_open:
            await self._await_open(slot, patience_s)
        slot.num_running += 1
        slot.last_used_s = _now()
        if keep_alive_s is not None:
            self._keep_alive(slot, keep_alive_s)

    async def enter_all(self, slots: Sequence[ModelSlot], patience_s: float | None = None) -> None:
        """The same for models that a request needs together. It is in none of them before all are
        there: who needs the room of one that it was in, and it for another, would wait for each
        other. One such request at a time waits, or they would unload each other's models."""
        try:
            async with asyncio.timeout(self._patience_s(patience_s)):
                if not all(slot.is_open for slot in slots):
                    await self._await_all(slots, patience_s)
        except TimeoutError:
            awaited = next((slot for slot in slots if not slot.is_open), slots[0])
            raise self._overdue(awaited) from None
        for slot in slots:
            await self.enter(slot)  # at once

    async def _await_all(self, slots: Sequence[ModelSlot], patience_s: float | None) -> None:
        async with self._joint_turns:
            self._joint = slots
            try:
                while missing := [slot for slot in slots if not slot.is_open]:
                    await self._await_open(missing[0], patience_s)
            finally:
                self._joint = ()

    def leave(self, slot: ModelSlot) -> None:
        """The request is over."""
        slot.num_running -= 1
        slot.last_used_s = _now()
        if not slot.num_running:
            self.tell()

    def let_go(self, slot: ModelSlot) -> None:
        """End the model's engine as soon as it has nothing to do."""
        if slot.is_loaded:
            self._keep_alive(slot, 0.0)

    async def unload(self, slot: ModelSlot) -> None:
        """End the model's engine. Raises Refusal where it has something to do."""
        if not slot.is_there:
            return
        if not slot.is_unloading:
            if not slot.is_loaded:
                raise Refusal(409, f"model {slot.name!r} is being loaded", field="model")
            if not await self._is_idle(slot):
                raise Refusal(409, f"model {slot.name!r} has requests or programs", field="model")
            self._begin_unload(slot)
        await self._until_gone(slot)

    def tell(self) -> None:
        """Something has changed: all who wait look again."""
        self._change.set()
        self._change = asyncio.Event()

    # --- who waits ------------------------------------------------------------------------------

    async def _await_open(self, slot: ModelSlot, patience_s: float | None) -> None:
        failure = slot.failure
        if failure is not None and _now() < failure.retry_at_s:
            raise _not_loaded(slot, failure)
        slot.num_waiting += 1
        try:
            async with asyncio.timeout(self._patience_s(patience_s)):
                while not slot.is_open:
                    if slot.failure is not failure and slot.failure is not None:
                        raise _not_loaded(slot, slot.failure)
                    self._drain_state.require_open()
                    if not slot.is_leaving:
                        self._begin_load(slot)
                    await self._change.wait()
        except TimeoutError:
            raise self._overdue(slot) from None
        finally:
            slot.num_waiting -= 1
            if not slot.num_waiting:
                self._stop_seeking(slot)

    def _patience_s(self, patience_s: float | None) -> float:
        most_s = self._limits.load_timeout_s
        return most_s if patience_s is None else min(patience_s, most_s)

    def _overdue(self, slot: ModelSlot) -> Refusal:
        others = [repr(each.name) for each in self.slots if each.is_there and each is not slot]
        reason = "it is still being loaded"
        if others and (slot in self._seeking or slot.is_leaving or slot not in self._loads):
            reason = f"there is no room for it while {', '.join(others)} have something to do"
        return Refusal(
            503,
            f"model {slot.name!r} is not there in time: {reason}; try again later",
            code="model_not_loaded",
            headers={"retry-after": RETRY_AFTER_S},
        )

    async def _until_gone(self, slot: ModelSlot) -> None:
        """Wait until its engine has been ended, where it is being ended."""
        while slot.is_unloading:
            await self._change.wait()

    # --- loading --------------------------------------------------------------------------------

    def _begin_load(self, slot: ModelSlot) -> None:
        if slot not in self._loads:
            self._loads[slot] = asyncio.create_task(self._load(slot))

    async def _load(self, slot: ModelSlot) -> None:
        own = asyncio.current_task()
        try:
            await self._until_gone(slot)
            if not slot.is_there and not await self._start(slot):
                return
            await self._in_thread(slot.wait_started)
        except Exception as error:  # whatever it is, those who wait are told
            if not isinstance(error, (StemmaError, OSError, RuntimeError)):
                log.exception("model %r could not be loaded", slot.name)
            await self._in_thread(slot.stop)
            _note_failure(slot, error)
        else:
            slot.failure, slot.num_failures = None, 0
            slot.loaded_s = _now()
        finally:
            if self._loads.get(slot) is own:
                del self._loads[slot]
            self.tell()

    async def _start(self, slot: ModelSlot) -> bool:
        """Begin; False where nobody waits for it any more. Raises StemmaError where it cannot be
        loaded."""
        prepared = await self._in_thread(slot.spec.prepare)
        slot.note(prepared)
        if not slot.num_waiting:
            return False
        self._seeking.add(slot)
        try:
            async with self._turns:
                await self._make_room(slot, prepared.num_bytes)
                slot.start(prepared)
            return True
        finally:
            self._seeking.discard(slot)

    def _stop_seeking(self, slot: ModelSlot) -> None:
        """Nobody waits for it any more: others need not make room."""
        if slot in self._seeking and (task := self._loads.pop(slot, None)) is not None:
            task.cancel()

    # --- room -----------------------------------------------------------------------------------

    async def _make_room(self, slot: ModelSlot, num_bytes: int) -> None:
        began_s = _now()
        try:
            while not self._has_room(num_bytes):
                victim = await self._idle_one(slot)
                if victim is not None:
                    self._begin_unload(victim)
                    await self._until_gone(victim)
                    continue
                if _now() - began_s > TURN_S:
                    self._have_one_leave(slot)
                await self._wait()
        finally:
            for each in self.slots:
                each.is_leaving = False
            self.tell()

    def _has_room(self, num_bytes: int) -> bool:
        there = [each for each in self.slots if each.is_there]
        if len(there) >= self._limits.max_models:
            return False
        most = self._limits.max_bytes
        return not there or most is None or num_bytes + sum(s.num_bytes for s in there) <= most

    async def _idle_one(self, wanted: ModelSlot) -> ModelSlot | None:
        """Of the idle models that may make room for `wanted` the one used least recently."""
        for each in self._by_last_use(wanted):
            is_needed = each.num_waiting or each in self._joint
            is_awaited = is_needed and not each.is_leaving  # by who may go in now, or soon
            if not is_awaited and await self._is_idle(each) and each.is_loaded:
                return each
        return None

    def _have_one_leave(self, wanted: ModelSlot) -> None:
        """Not one whose turn has just begun, nor before those are in who waited for it."""
        loaded = self._by_last_use(wanted)
        had_turn = [
            each
            for each in loaded
            if each not in self._loads and not each.num_waiting and _now() - each.loaded_s > TURN_S
        ]
        if had_turn and not any(each.is_leaving for each in loaded):
            had_turn[0].is_leaving = True

    def _by_last_use(self, wanted: ModelSlot) -> list[ModelSlot]:
        """Those that are loaded, but for what is needed together with `wanted`."""
        kept = self._joint if wanted in self._joint else ()
        loaded = [each for each in self.slots if each.is_loaded and each not in kept]
        return sorted(loaded, key=lambda each: each.last_used_s)

    async def _is_idle(self, slot: ModelSlot) -> bool:
        """Whether it has no request and, on its engine, no program."""
        if slot.num_running:
            return False
        return not await self._num_programs(slot) and not slot.num_running

    async def _num_programs(self, slot: ModelSlot) -> int:
        """An engine that says nothing, in a long step perhaps, may have one."""
        return await self._in_thread(lambda: slot.num_programs(VITALS_S, if_silent=1))

    async def _wait(self, most_s: float | None = POLL_S) -> None:
        """Until something changes; programs end without a word."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._change.wait(), most_s)

    # --- idle models --------------------------------------------------------------------------

    def _keep_alive(self, slot: ModelSlot, seconds: float) -> None:
        slot.keep_alive_s = seconds
        if slot not in self._expiries and not math.isinf(seconds):
            self._expiries[slot] = asyncio.create_task(self._expire(slot))
        self.tell()  # it may be sooner than it was

    async def _expire(self, slot: ModelSlot) -> None:
        """Unload it once it has had no request for `keep_alive_s`, and has no program."""
        try:
            while slot.is_loaded and not math.isinf(slot.keep_alive_s):
                remaining_s = None if slot.num_running else slot.remaining_s(_now())
                if remaining_s is None or remaining_s > 0:
                    await self._wait(remaining_s)
                elif not await self._is_idle(slot):
                    await self._wait(max(POLL_S, slot.keep_alive_s))
                elif not slot.remaining_s(_now()):
                    self._begin_unload(slot)
        finally:
            del self._expiries[slot]

    # --- unloading ------------------------------------------------------------------------------

    def _begin_unload(self, slot: ModelSlot) -> None:
        if not slot.is_loaded:
            return  # somebody else has begun, or it is gone
        slot.describe()  # what the engine says, for as long as there is none
        slot.is_unloading = True
        self._unloads[slot] = asyncio.create_task(self._unload(slot))

    async def _unload(self, slot: ModelSlot) -> None:
        """A program that began meanwhile goes on until it ends, for `drain_s`."""
        try:
            slot.drain()
            async with asyncio.timeout(self._limits.drain_s):
                while await self._num_programs(slot):
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            slot.abandon("the model was unloaded")
        finally:
            await self._in_thread(slot.stop)
            slot.num_unloads += 1
            slot.is_unloading = slot.is_leaving = False
            slot.keep_alive_s = math.inf
            del self._unloads[slot]
            self.tell()

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _note_failure(slot: ModelSlot, error: Exception) -> None:
    slot.num_failures += 1
    slot.num_failed_loads += 1
    pause_s = RETRY_PAUSES_S[min(slot.num_failures, len(RETRY_PAUSES_S)) - 1]
    slot.failure = LoadFailure(str(error) or type(error).__name__, _now() + pause_s)


def _not_loaded(slot: ModelSlot, failure: LoadFailure) -> ModelLoadError:
    return ModelLoadError(f"model {slot.name!r} cannot be loaded: {failure.reason}")
