"""A batch of programs: all in flight together, on as few threads as possible.

The calling thread runs function after function. Only when one has to wait does another thread take
over the rest, so programs that never wait cost no thread and no switch: their functions have
returned before the first result is back. A function that blocks in some other way (a sleep, an HTTP
request) is noticed after `STALL_S`; then more functions may run at once.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import weakref
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial

from .state import ProgramState
from .time_limit import TimeLimit

STALL_S = 0.01  # guess: longer than a function that neither waits nor blocks takes


Execute = Callable[[int, ProgramState], None]
ExecuteAsync = Callable[[int, ProgramState], Awaitable[None]]


class Relay:
    """Calls `execute(0)`, `execute(1)`, ... on at most `max_threads` threads; a thread that does
    not wait takes the next, as long as there is one."""

    def __init__(self, num_items: int, execute: Callable[[int], None], max_threads: int) -> None:
        self._execute = execute
        self._num_items = num_items
        self._max_threads = max_threads
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._next = 0
        self._num_threads = 0
        self._num_running = 0  # threads in a function and not waiting in it
        self._num_allowed = 1  # target of `_num_running`; more once a function has blocked
        self._num_parked = 0
        self._num_called = 0  # parked threads that are to resume
        self._is_stopped = False
        self._ended = threading.Event()  # set when no function is left to begin
        self._context = contextvars.copy_context()

    def run(self) -> None:
        """Run on this thread and others; returns when all functions have, or are stopped."""
        with self._lock:
            self._num_threads = self._num_running = 1
        if self._num_items > 1:
            threading.Thread(target=self._watch, name="stemma-batch-watch", daemon=True).start()
        self._work()
        with self._lock:
            self._changed.wait_for(lambda: self._num_threads == 0 or self._is_stopped)

    def stop(self) -> None:
        """Begin no further function."""
        with self._lock:
            self._is_stopped = True
            self._ended.set()
            self._changed.notify_all()

    @contextmanager
    def released(self) -> Iterator[None]:
        """While the calling function waits, another thread continues with the rest."""
        with self._lock:
            self._num_running -= 1
            self._call_others()
        try:
            yield
        finally:
            with self._lock:
                self._num_running += 1

    @property
    def _has_more(self) -> bool:
        return self._next < self._num_items and not self._is_stopped

    def _work(self) -> None:
        while (index := self._take()) is not None:
            self._execute(index)

    def _take(self) -> int | None:
        """The next function, for a thread that has just ended one; None: no more."""
        with self._lock:
            if self._num_running > self._num_allowed and self._has_more:
                self._park()
            if self._has_more:
                self._next += 1
                return self._next - 1
            self._num_running -= 1
            self._num_threads -= 1
            self._ended.set()
            self._changed.notify_all()
            return None

    def _park(self) -> None:
        """Wait until this thread is called again; it then counts as running."""
        self._num_running -= 1
        self._num_parked += 1
        self._changed.wait_for(lambda: self._num_called or not self._has_more)
        self._num_parked -= 1
        if self._num_called:
            self._num_called -= 1
        else:
            self._num_running += 1

    def _call_others(self) -> None:
        """Bring the running threads up to the target: parked ones, then new ones."""
        while self._num_running < self._num_allowed and self._has_more:
            if self._num_parked > self._num_called:
                self._num_called += 1
                self._changed.notify_all()
            elif self._num_threads >= self._max_threads or not self._start_thread():
                return
            self._num_running += 1

    def _start_thread(self) -> bool:
        thread = threading.Thread(
            target=self._context.copy().run, args=(self._work,), name="stemma-batch", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # the system has no more threads
            return False
        self._num_threads += 1
        return True

    def _watch(self) -> None:
        """Allow more at once whenever no function has begun for a while though one could."""
        seen = -1
        while not self._ended.wait(STALL_S):
            with self._lock:
                if seen == self._next:
                    wanted = min(2 * self._num_running, self._max_threads)
                    self._num_allowed = max(self._num_allowed, wanted)
                    self._call_others()
                seen = self._next


class Batch:
    """Programs of one function, in flight together. `errors` has the failures, by index."""

    def __init__(self, states: list[ProgramState], limit: TimeLimit) -> None:
        """`limit`: of all of them."""
        self.states = states
        self._limit = limit
        self.errors: dict[int, BaseException] = {}
        self._has_run = bytearray(len(states))
        self._interrupt: BaseException | None = None
        self._relay: Relay | None = None

    def run(self, execute: Execute, max_threads: int) -> None:
        """Run `execute` of each on this thread, and on others during waits; does not wait for the
        runtime to finish the rest."""
        num_threads = min(max_threads, len(self.states))
        self._relay = Relay(len(self.states), partial(self._run_one, execute), num_threads)
        for state in self.states:
            state._program.relay = self._relay
        self._relay.run()

    async def run_async(self, execute: ExecuteAsync, advance: Callable[[], None]) -> None:
        """Run `execute` of each as a task, and wait until the runtime has finished."""
        tasks = (self._run_task(execute, advance, index) for index in range(len(self.states)))
        try:
            await asyncio.gather(*tasks)
        except BaseException:  # a cancelled task, Ctrl-C
            self.cancel()
            raise

    async def run_beside(
        self, execute: Execute, max_threads: int, advance: Callable[[], None]
    ) -> None:
        """`run` on threads beside the event loop, and wait until the runtime has finished."""
        try:
            await asyncio.to_thread(self.run, execute, max_threads)
            for state in self.states:
                await state._program.waiters.wait_async(partial(_is_done, state))
                advance()
        except BaseException:  # a cancelled task
            self.cancel()
            raise

    def finished(self) -> Iterator[ProgramState]:
        """Yields each state once it and all before it are done; failures go to `errors`."""
        for index, state in enumerate(self.states):
            if not self._is_over(index):
                state._program.waiters.wait(partial(self._is_over, index))
            self._finish(index)
            yield state
        self._limit.stop()

    def cancel(self) -> None:
        """Stop what is not done yet."""
        if self._relay is not None:
            self._relay.stop()
        for state in self.states:
            if not state._program.is_done:
                state.cancel()

    def cancel_soon(self) -> None:
        """`cancel` for a finalizer: it takes no lock, a thread of the channel's does the work."""
        if self.states:
            self.states[0]._program.call_soon(self.cancel)

    def interrupt(self, error: BaseException) -> None:
        """Stop all; `finished` raises `error`."""
        self._interrupt = error
        self.cancel()

    def _run_one(self, execute: Execute, index: int) -> None:
        state = self.states[index]
        try:
            with self._limit.named():
                execute(index, state)
        except Exception as error:
            state.cancel()
            self.errors[index] = error
        except BaseException as error:  # Ctrl-C or SystemExit, on whichever thread
            self.interrupt(error)
        self._has_run[index] = True
        state._program.waiters.wake()

    async def _run_task(
        self, execute: ExecuteAsync, advance: Callable[[], None], index: int
    ) -> None:
        state = self.states[index]
        try:
            with self._limit.named():
                await execute(index, state)
            await state._program.wait_done_async()
        except Exception as error:
            state.cancel()
            self.errors[index] = error
        advance()
        self._has_run[index] = True
        state._program.waiters.wake()

    def _is_over(self, index: int) -> bool:
        return bool(self._has_run[index]) or self._interrupt is not None

    def _finish(self, index: int) -> None:
        if self._interrupt is not None:
            raise self._interrupt
        program = self.states[index]._program
        program.relay = None
        if index not in self.errors:
            try:
                program.wait_done()
            except Exception as error:
                self.errors[index] = error


class FinishedStates(Iterator[ProgramState]):
    """States of a batch, each as soon as it and all before it are done. Closing it, even before the
    first, or dropping it cancels what is not done yet."""

    def __init__(self, batch: Batch, states: Generator[ProgramState, None, None]) -> None:
        """`states`: yielded by `batch.finished`."""
        self._batch = batch
        self._states = states
        self._finalizer = weakref.finalize(self, batch.cancel_soon)
        self._finalizer.atexit = False

    def __next__(self) -> ProgramState:
        try:
            return next(self._states)
        except BaseException:  # the last was yielded, one failed, Ctrl-C
            self.close()
            raise

    def close(self) -> None:
        """Cancel what is not done yet; yields nothing more."""
        self._states.close()
        if self._finalizer.detach() is not None:
            self._batch.cancel()


def _is_done(state: ProgramState) -> bool:
    return state._program.is_done
