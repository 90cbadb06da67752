"""Programs that have to end within a time."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence

from ..client.program import Program
from .state import ProgramState


class TimeLimit:
    """Cancels the programs that have not ended `timeout_s` after it was made: what waits for them
    raises TimeoutError. None: never. Holds no program; `stop` once all have ended."""

    def __init__(self, timeout_s: float | None, states: Sequence[ProgramState]) -> None:
        self.has_passed = False
        self._timeout_s = timeout_s
        self._programs = [weakref.ref(state._program) for state in states]
        self._timer: threading.Timer | None = None
        if timeout_s is not None:
            self._timer = threading.Timer(timeout_s, self._pass)
            self._timer.daemon = True
            self._timer.start()

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Whatever the block, a program's function, raises once it was cut off is TimeoutError."""
        try:
            yield
        except Exception as error:
            if not self.has_passed or isinstance(error, TimeoutError):
                raise
            raise _error(self._timeout_s) from error

    def stop(self) -> None:
        """It ends nothing any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _pass(self) -> None:
        self.has_passed = True
        for reference in self._programs:
            program: Program | None = reference()
            if program is not None and not program.is_done:
                program.fail(_error(self._timeout_s))


@contextlib.contextmanager
def time_limit(timeout_s: float | None, state: ProgramState) -> Iterator[None]:
    """For the block, on a thread."""
    limit = TimeLimit(timeout_s, [state])
    try:
        with limit.named():
            yield
    finally:
        limit.stop()


@contextlib.asynccontextmanager
async def time_limit_async(timeout_s: float | None) -> AsyncIterator[None]:
    """For the block, in a task."""
    try:
        async with asyncio.timeout(timeout_s) as timeout:
            yield
    except TimeoutError as error:
        raise (_error(timeout_s) if timeout.expired() else error) from None


def _error(timeout_s: float | None) -> TimeoutError:
    return TimeoutError(f"the program has not ended within timeout={timeout_s:g} s")
