"""A batch whose results come as they are done, from inputs of any number, perhaps kept in a store.

inputs --(at most max_in_flight at a time)--> programs --> store --> results
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import threading
import time
from collections import Counter
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sized,
)
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ...errors import InvalidProgram
from ..client.program import TokenCounts
from ..client.progress import BatchProgress, batch_progress
from .beside_loop import as_failure, run_beside
from .result import Result, failed_result, result_of
from .result_key import run_key
from .result_store import ResultStore
from .state import ProgramState
from .time_limit import time_limit_async

DEFAULT_IN_FLIGHT = 256
_MAX_WAITING = 1024  # results that a thread has not taken yet

Run = Callable[[ProgramState, Any, ThreadPoolExecutor], Awaitable[None]]
Start = Callable[[int], ProgramState]
Inputs = Iterable[Any] | AsyncIterable[Any]


@dataclass(slots=True)
class BatchSummary:
    """What a batch has done so far. `cost`: of `tokens`, in the unit of the prices."""

    num_done: int = 0
    num_failed: int = 0  # of these
    num_stored: int = 0  # of these: found in the store, and not run again
    tokens: TokenCounts = field(default_factory=TokenCounts)
    wall_s: float = 0.0
    cost: float | None = None  # None: no prices were given

    def add(self, result: Result, prices: Prices | None) -> None:
        """One more."""
        self.num_done += 1
        self.num_failed += result.error() is not None
        self.num_stored += result.is_stored
        if not result.is_stored:
            self.tokens = self.tokens + result.tokens
        if prices is not None:
            self.cost = prices.of(self.tokens)

    def __str__(self) -> str:
        tokens, rate = self.tokens, self.tokens.completion / self.wall_s if self.wall_s else 0.0
        share = tokens.cached / tokens.prompt if tokens.prompt else 0.0
        cost = "" if self.cost is None else f", cost {self.cost:.6g}"
        return (
            f"{self.num_done} done in {self.wall_s:.1f} s ({self.num_failed} failed, "
            f"{self.num_stored} from the store); {tokens.prompt} prompt tokens ({share:.0%} "
            f"cached), {tokens.completion} generated ({rate:.0f}/s){cost}"
        )


@dataclass(frozen=True, slots=True)
class Prices:
    """Of a million tokens; `cached` is that of prompt tokens that were cached."""

    prompt: float
    completion: float
    cached: float | None = None  # None: as the others of a prompt

    def of(self, tokens: TokenCounts) -> float:
        """What these cost."""
        cached = self.prompt if self.cached is None else self.cached
        fresh = (tokens.prompt - tokens.cached) * self.prompt
        return (fresh + tokens.cached * cached + tokens.completion * self.completion) / 1e6


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """`max_in_flight`: programs at a time; `num_threads`: for plain functions while they run.
    `store` is closed at the end."""

    max_in_flight: int = DEFAULT_IN_FLIGHT
    num_threads: int = 64
    store: ResultStore | None = None
    prices: Prices | None = None
    progress_bar: bool = False
    title: str = ""
    timeout_s: float | None = None  # of each program


class BatchStream(Iterator[Result], AsyncIterator[Result]):
    """Results as they come: `for result in stream`, or `async for`; `result.index` is its input's
    place. One that failed has `result.error()`. Closed or dropped, it cancels what is under way."""

    def __init__(
        self, inputs: Inputs, start: Start, run: Run, program: str, options: BatchOptions
    ) -> None:
        """`start` makes the program at an index, `run` carries it out with an input; `program`
        names it in the store."""
        if isinstance(inputs, str | Mapping) or not isinstance(inputs, Iterable | AsyncIterable):
            allowed = "arguments of each program: a mapping or a list, of any iterable"
            raise InvalidProgram.of("batch_kwargs", inputs, allowed)
        self.summary = BatchSummary()
        self._inputs = inputs
        self._start, self._run, self._program = start, run, program
        self._options = options
        self._results: AsyncIterator[Result] | None = None
        self._thread: _ThreadedStream | None = None
        self._starting = threading.Lock()

    def __aiter__(self) -> BatchStream:
        return self

    async def __anext__(self) -> Result:
        if self._results is None:
            self._results = self._all()
        return await anext(self._results)

    async def aclose(self) -> None:
        """Cancel what is under way."""
        if self._results is not None:
            await self._results.aclose()  # type: ignore[attr-defined]

    def __next__(self) -> Result:
        with self._starting:  # several threads may read one stream
            if self._thread is None:
                self._thread = _ThreadedStream(self._all())
        return self._thread.next()

    def close(self) -> None:
        """Cancel what is under way; yields nothing more."""
        if self._thread is not None:
            self._thread.close()

    def __del__(self) -> None:
        thread = getattr(self, "_thread", None)
        if thread is not None:
            thread.close_soon()

    async def _all(self) -> AsyncIterator[Result]:
        options = self._options
        began_s = time.perf_counter()
        total = len(self._inputs) if isinstance(self._inputs, Sized) else None
        running: set[asyncio.Task[Result]] = set()
        seen: Counter[bytes] = Counter()
        threads = ThreadPoolExecutor(options.num_threads, "stemma-batch")
        with batch_progress(total, options.title, options.progress_bar) as progress:

            def told(result: Result) -> Result:
                self.summary.add(result, options.prices)
                self.summary.wall_s = time.perf_counter() - began_s
                _show(progress, self.summary)
                return result

            inputs: asyncio.Queue[_Taken] = asyncio.Queue(1)
            taker = asyncio.create_task(_take_all(self._inputs, inputs))
            taking: asyncio.Task[_Taken] | None = asyncio.create_task(inputs.get())
            try:
                while taking is not None or running:
                    if taking is None or len(running) >= options.max_in_flight:
                        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    else:
                        await asyncio.wait({taking, *running}, return_when=asyncio.FIRST_COMPLETED)
                    for result in _done_of(running):
                        yield told(result)
                    if taking is None or not taking.done() or len(running) >= options.max_in_flight:
                        continue
                    if (taken := taking.result().taken()) is None:
                        taking = None
                        continue
                    taking = asyncio.create_task(inputs.get())
                    index, given = taken
                    try:
                        key, found = await self._stored(given, seen)
                    except InvalidProgram as error:
                        yield told(failed_result(None, error, index))
                        continue
                    if found is not None:
                        yield told(found.numbered(index, is_stored=True))
                        continue
                    one = self._one(index, given, key, threads)
                    running.add(asyncio.create_task(one))
            finally:
                under_way = [taker, *running, *([] if taking is None else [taking])]
                for task in under_way:
                    task.cancel()
                await asyncio.gather(*under_way, return_exceptions=True)
                threads.shutdown(wait=False)  # a function that blocks outlives its program
                if options.store is not None:
                    options.store.close()

    async def _stored(self, given: Any, seen: Counter[bytes]) -> tuple[bytes, Result | None]:
        """Its key, and what is known of it. Equal inputs are runs of their own. Raises
        InvalidProgram for one that has no key."""
        store = self._options.store
        if store is None:
            return b"", None
        args, kwargs = ([], given) if isinstance(given, Mapping) else (given, {})
        plain = run_key(self._program, args, kwargs)
        key = run_key(self._program, args, kwargs, seen[plain])
        seen[plain] += 1
        return key, await asyncio.to_thread(store.get, key)

    async def _one(self, index: int, given: Any, key: bytes, threads: ThreadPoolExecutor) -> Result:
        state: ProgramState | None = None
        try:
            state = self._start(index)
            async with time_limit_async(self._options.timeout_s):
                await self._run(state, given, threads)
                await state._program.wait_done_async()
            result = result_of(state, index)
            if self._options.store is not None:
                await asyncio.to_thread(self._options.store.put, key, result)
            return result
        except BaseException as error:
            if state is not None:
                state.cancel()
            if _is_cancelled(error):
                raise
            return failed_result(state, as_failure(error), index)


def _show(progress: BatchProgress, summary: BatchSummary) -> None:
    tokens = summary.tokens
    hits = tokens.cached / tokens.prompt if tokens.prompt else 0.0
    rate = tokens.completion / summary.wall_s if summary.wall_s else 0.0
    progress.advance(f"{hits:.0%} hits, {rate:.0f} tokens/s")


async def _numbered(inputs: Inputs) -> AsyncIterator[tuple[int, Any]]:
    index = 0
    if isinstance(inputs, AsyncIterable):
        async for given in inputs:
            yield index, given
            index += 1
        return
    if isinstance(inputs, list | tuple | range):
        for index, given in enumerate(inputs):
            yield index, given
        return
    items, end = iter(inputs), object()
    while (given := await run_beside(next, items, end)) is not end:  # it may block
        yield index, given
        index += 1


@dataclass(frozen=True, slots=True)
class _Taken:
    """An input with its number, or None after the last; or what taking it raised."""

    item: tuple[int, Any] | None = None
    error: BaseException | None = None

    def taken(self) -> tuple[int, Any] | None:
        """The item. Raises what taking it raised."""
        if self.error is not None:
            raise self.error
        return self.item


async def _take_all(inputs: Inputs, taken: asyncio.Queue[_Taken]) -> None:
    """In one task, whose is what an async generator holds open from one input to the next. Raises
    nothing, but for where it is cancelled: SystemExit in a task would end its loop."""
    last = _Taken()
    try:
        async for item in _numbered(inputs):
            await taken.put(_Taken(item))
    except BaseException as error:
        if _is_cancelled(error):
            raise
        last = _Taken(error=as_failure(error))
    await taken.put(last)


def _done_of(running: set[asyncio.Task[Result]]) -> list[Result]:
    """Raises what is to end more than a program, such as SystemExit."""
    done = [task for task in running if task.done()]
    running.difference_update(done)
    results = [task.result() for task in done]
    for error in (result.error() for result in results):
        if error is not None and not isinstance(error, Exception):
            raise error
    return results


def _is_cancelled(error: BaseException) -> bool:
    """Whether it is from without, and not the function's own."""
    task = asyncio.current_task()
    is_asked = task is not None and task.cancelling() > 0
    return is_asked and isinstance(error, asyncio.CancelledError)


class _ThreadedStream:
    """An async iterator's results for a thread: it runs on a loop of its own."""

    def __init__(self, results: AsyncIterator[Result]) -> None:
        self._queue: queue.Queue[Result | BaseException | None] = queue.Queue(_MAX_WAITING)
        self._loop = asyncio.new_event_loop()
        self._is_closed = False
        self._task: asyncio.Task[None] | None = None
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._run, results), name="stemma-batch-loop", daemon=True
        )
        self._thread.start()

    def next(self) -> Result:
        item = None if self._is_closed else self._queue.get()
        if isinstance(item, Result):
            return item
        self._is_closed = True
        with contextlib.suppress(queue.Full):  # another thread may wait for a result
            self._queue.put_nowait(None)
        if item is not None:
            raise item
        raise StopIteration

    def close(self) -> None:
        self.close_soon()
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):  # it may wait for room
                self._queue.get(timeout=0.05)
        with contextlib.suppress(queue.Full):  # another thread may wait for a result
            self._queue.put_nowait(None)

    def close_soon(self) -> None:
        self._is_closed = True
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _run(self, results: AsyncIterator[Result]) -> None:
        with contextlib.closing(self._loop):
            self._task = self._loop.create_task(self._pass_on(results))
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._task)

    async def _pass_on(self, results: AsyncIterator[Result]) -> None:
        last: BaseException | None = None
        try:
            async for result in results:
                await self._put(result)
        except BaseException as error:  # whoever waits for a result is to have it
            last = error
        await results.aclose()  # type: ignore[attr-defined]
        await self._put(last)

    async def _put(self, item: Result | BaseException | None) -> None:
        while not self._is_closed:
            try:
                self._queue.put_nowait(item)
                return
            except queue.Full:
                await asyncio.sleep(0.01)
