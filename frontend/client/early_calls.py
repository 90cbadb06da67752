"""Calls of pure tools, made before the program has asked for them.

    the gen      |...........................|
    told likely         ^ reads: lookup("Ulm")
    early call          |-----------------------------|
    true call                                ^ lookup("Ulm"): waits for the rest alone

A runtime tells what a gen probably will say (`wire.LIKELY`); the author's code reads the calls in
that which it would make, and those of pure tools begin. The program goes on as ever, and where it
makes a call with equal arguments, of the same types, it has the early one's value. Each early call
serves one true call at most: a tool that is called twice is carried out twice. One that raises
counts as never made, so that the true call raises whatever it raises where the program runs. So a
wrong guess costs the work of a tool, and nothing that a program sees.

Threads: guesses come on the connection's thread, which only begins another one; calls are taken
where the program runs.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

MAX_RUNNING = 8  # of a program, at a time
MAX_KEPT = 16  # that nobody has asked for yet; the oldest is forgotten (guess)
MAX_THREADS = 64  # of a process, for all its programs' early calls

ReadCalls = Callable[[str], Iterable["LikelyCall"]]
"""The calls that a program makes if its gen says this."""

log = logging.getLogger(__name__)

_threads = threading.BoundedSemaphore(MAX_THREADS)


@dataclass(frozen=True, slots=True)
class LikelyCall:
    """A call that a program may make: `run(*args, **kwargs)`, which for an async function returns
    a coroutine. `key`: what a true call of the same function has."""

    key: object
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    is_async: bool = False


@dataclass(slots=True, eq=False)
class EarlyCall:
    """A call that has begun. `future`: (its value,), or None where it has raised or was cancelled;
    never an exception, as not each can be one of a future in an event loop."""

    call: LikelyCall
    began_s: float  # by time.perf_counter()
    future: Future[tuple[Any] | None] = field(default_factory=Future)
    ended_s: float | None = None
    cancel: Callable[[], object] | None = None  # of a coroutine

    def left_s(self, expected_s: float | None) -> float | None:
        """How long it still takes if such calls take so long; None: that is not known."""
        if self.future.done():
            return 0.0
        if expected_s is None:
            return None
        return max(0.0, expected_s - (time.perf_counter() - self.began_s))


@dataclass(frozen=True, slots=True)
class EarlyCallCounts:
    """What became of a program's early calls."""

    num_begun: int = 0
    num_used: int = 0  # whose value a true call has had
    num_failed: int = 0  # that raised, whereupon the true call was made
    num_unread: int = 0  # likely outputs that the author's code could not read
    saved_s: float = 0.0  # for which used ones had run before they were asked for

    def more(self, **counts: float) -> EarlyCallCounts:
        """These, and so many more."""
        return replace(self, **{name: getattr(self, name) + by for name, by in counts.items()})


class EarlyCalls:
    """The early calls of one program. Invariant: at most MAX_RUNNING run, and at most MAX_KEPT are
    kept. Nothing begins after `close`; what runs then is a daemon's thread, whose value nobody
    takes."""

    def __init__(self) -> None:
        self.counts = EarlyCallCounts()
        self._lock = threading.Lock()
        self._kept: deque[EarlyCall] = deque()
        self._running: set[EarlyCall] = set()
        self._is_closed = False

    def __bool__(self) -> bool:
        """Whether one may be taken."""
        return bool(self._kept)

    def watcher(
        self, read: ReadCalls, loop: asyncio.AbstractEventLoop | None
    ) -> Callable[[str], None]:
        """What a gen's likely outputs are told to, on any thread. Made where the program runs: its
        context variables are those of the calls. `loop`: that of an async program, in which its
        coroutines run; None: each has one of its own."""
        return partial(self._watch, read, contextvars.copy_context(), loop)

    def take(self, key: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> EarlyCall | None:
        """The early call that is equal to this true one, which now has it alone."""
        with self._lock:
            for early in self._kept:
                call = early.call
                if call.key == key and _are_same((call.args, call.kwargs), (args, kwargs)):
                    self._kept.remove(early)
                    return early
        return None

    def note_use(self, early: EarlyCall, asked_s: float) -> None:
        """A true call, made at `asked_s`, has waited for it."""
        ended_s = time.perf_counter()
        with self._lock:
            if early.future.result() is None:
                self.counts = self.counts.more(num_failed=1)
                return
            saved_s = min(asked_s, early.ended_s or ended_s) - early.began_s
            self.counts = self.counts.more(num_used=1, saved_s=saved_s)

    def close(self) -> None:
        """The program has ended: what has not begun never will, coroutines are cancelled."""
        with self._lock:
            self._is_closed = True
            running = list(self._running)
            self._kept.clear()
        for early in running:
            if early.cancel is not None:
                early.cancel()

    # --- beginning ------------------------------------------------------------------------------

    def _watch(
        self,
        read: ReadCalls,
        context: contextvars.Context,
        loop: asyncio.AbstractEventLoop | None,
        text: str,
    ) -> None:
        """A gen will probably say this: read it, and begin its calls, on a thread of its own."""
        if not self._is_closed and _threads.acquire(blocking=False):
            _start(partial(self._begin_all, read, context, loop, text))

    def _begin_all(
        self,
        read: ReadCalls,
        context: contextvars.Context,
        loop: asyncio.AbstractEventLoop | None,
        text: str,
    ) -> None:
        """Begin its calls, the last plain one on this thread."""
        try:
            calls = list(context.copy().run(read, text))
        except Exception as error:  # a guess may be no text that it would ever be given
            log.debug("a likely output cannot be read: %s: %s", type(error).__name__, error)
            with self._lock:
                self.counts = self.counts.more(num_unread=1)
            return
        begun = [early for early in map(self._begun, calls) if early is not None]
        plain = [early for early in begun if not early.call.is_async or loop is None]
        for early in begun:
            if early.call.is_async and loop is not None:
                self._run_in(loop, early)
        for early in plain[:-1]:
            if _threads.acquire(blocking=False):
                nothing = partial(self._end, early, None)
                _start(partial(context.copy().run, self._run, early), nothing)
            else:
                self._end(early, None)
        for early in plain[-1:]:
            context.copy().run(self._run, early)

    def _begun(self, call: LikelyCall) -> EarlyCall | None:
        """Keep a call, unless an equal one waits already; None: it is not to run."""
        with self._lock:
            if self._is_closed or len(self._running) >= MAX_RUNNING:
                return None
            for early in self._kept:
                other = early.call
                same = _are_same((other.args, other.kwargs), (call.args, call.kwargs))
                if other.key == call.key and same:
                    return None
            early = EarlyCall(call, time.perf_counter())
            early.future.set_running_or_notify_cancel()  # who waits in vain cancels nothing
            self._kept.append(early)
            if len(self._kept) > MAX_KEPT:
                self._kept.popleft()
            self._running.add(early)
            self.counts = self.counts.more(num_begun=1)
            return early

    def _run(self, early: EarlyCall) -> None:
        call, outcome = early.call, None
        try:
            value = call.run(*call.args, **call.kwargs)
            outcome = (asyncio.run(value) if call.is_async else value,)
        except BaseException as error:  # whoever takes it calls again
            log.debug("an early call raised %s: %s", type(error).__name__, error)
        finally:
            self._end(early, outcome)

    def _run_in(self, loop: asyncio.AbstractEventLoop, early: EarlyCall) -> None:
        """A coroutine function, in the program's event loop."""
        call = early.call

        async def run() -> None:
            outcome = None
            try:
                outcome = (await call.run(*call.args, **call.kwargs),)
            except Exception as error:
                log.debug("an early call raised %s: %s", type(error).__name__, error)
            finally:
                self._end(early, outcome)

        work = run()
        try:
            early.cancel = asyncio.run_coroutine_threadsafe(work, loop).cancel
            if self._is_closed:  # perhaps before that was known
                early.cancel()
        except RuntimeError:  # the loop is closed
            work.close()
            self._end(early, None)

    def _end(self, early: EarlyCall, outcome: tuple[Any] | None) -> None:
        early.ended_s = time.perf_counter()
        with self._lock:
            self._running.discard(early)
        early.future.set_result(outcome)


def _start(work: Callable[[], None], otherwise: Callable[[], None] = lambda: None) -> None:
    """On a thread that no process waits for at its end; one of `_threads` has been acquired."""
    try:
        target = partial(_given_back, work)
        threading.Thread(target=target, name="stemma-early", daemon=True).start()
    except RuntimeError:  # no more threads, or the interpreter ends
        _threads.release()
        otherwise()


def _given_back(work: Callable[[], None]) -> None:
    try:
        work()
    finally:
        _threads.release()


def _are_same(one: Any, other: Any) -> bool:
    """Equal, and of the same types all through: 1, 1.0 and True are different arguments."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return (
            isinstance(one, list) == isinstance(other, list)
            and len(one) == len(other)
            and all(map(_are_same, one, other))
        )
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_are_same(one[k], other[k]) for k in one)
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:  # what cannot be compared, as arrays, is not known to be the same
        return False
