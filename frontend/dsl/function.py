"""`@function`: a Python function whose first parameter is the program's state becomes a program;
so does a method, with the state behind its `self`.

The file is long because all ways to run one are methods of one class, and share how it is carried
out and how a run's options are told from the function's arguments.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from ...errors import BatchError, InvalidProgram
from ..backend import await_backend
from ..client.backend import Backend
from ..client.program import Defaults, Program
from ..client.progress import progress_bar as show_progress
from ..protocol.ir import GenParams
from ..protocol.numbers import MAX_INT, Range, plain
from ..trace import observer
from .batch import Batch, Execute, ExecuteAsync, FinishedStates
from .batch_stream import DEFAULT_IN_FLIGHT, BatchOptions, BatchStream, Inputs, Prices
from .beside_loop import run_beside
from .options import RUN_OPTIONS, RunOptions, checked_seed
from .prefix import cache_prefix
from .result import Result, result_of
from .result_key import program_key, run_key
from .result_store import ResultStore
from .state import ProgramState
from .time_limit import TimeLimit, time_limit, time_limit_async

if TYPE_CHECKING:
    from ..trace.graph import Graph

MAX_THREADS = 64
_NUM_THREADS = Range(1, MAX_INT, is_whole=True)

_NO_RESULTS = frozenset(("backend", "timeout", "use_thread"))  # options that change none

_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

Arguments = Mapping[str, Any] | Sequence[Any]  # of one program of a batch

# The name of the program whose function runs here.
_running: contextvars.ContextVar[str | None] = contextvars.ContextVar("running", default=None)


class Function:
    """A program that can be run, streamed, and run over a batch; also of an `async def`.

    One that is made of a method, in the body of its class, is bound as the method would be: the
    attribute of an instance is the program of that instance.

    Options of `run`, `run_batch`, `stream` and their async twins (a parameter of the function with
    the same name takes precedence, also over an option that only one of them has): `backend`;
    `seed`, which fixes all draws; `timeout`, seconds after which a program that has not ended is
    cancelled and raises TimeoutError (a plain function where it waits or appends); and defaults for
    gens that do not set them: `max_tokens` (or `max_new_tokens`), `min_tokens`, `n`, `stop`,
    `stop_token_ids`, `stop_regex`, `temperature`,
    `top_p`, `top_k`, `min_p`, `frequency_penalty`, `presence_penalty`, `repetition_penalty`,
    `ignore_eos`, `priority`, `return_logprob`, `logprob_start_len`, `top_logprobs_num`. SGLang's
    `use_thread` and `return_text_in_logprobs` have no effect: no program needs a thread, and the
    text is always included.
    """

    TOLD_BY = ("_fn", "_bound")  # in the key of a result

    def __init__(
        self,
        fn: Callable[..., Any],
        bound: Mapping[str, object] | None = None,
        num_api_spec_tokens: int | None = None,
        cache: str | Path | None = None,
    ) -> None:
        self._fn = fn
        self._cache_path = cache
        self._cache: ResultStore | None = None
        self._bound = dict(bound or {})
        self._num_api_spec_tokens = num_api_spec_tokens
        self._class: type | None = None  # whose method it is, not bound
        self.__name__ = getattr(fn, "__name__", "program")
        self.__doc__ = fn.__doc__
        self.is_async = inspect.iscoroutinefunction(fn)
        parameters = list(inspect.signature(fn).parameters.values())
        if not parameters:
            where = ", behind self, or @staticmethod above" if inspect.ismethod(fn) else ""
            raise InvalidProgram(f"{self.__name__}() needs the state as its first parameter{where}")
        if _is_generator(fn) or _is_generator(getattr(fn, "__call__", None)):  # noqa: B004
            raise InvalidProgram(
                f"{self.__name__}() contains `yield`: called, such a function runs nothing of its "
                "body. A program appends to its state and returns; who runs it reads the text as "
                f"it comes from {self.__name__}.stream(...).text_iter()"
            )
        self._state_name = parameters[0].name
        self._argument_names = [p.name for p in parameters[1:]]
        self._required = [
            p.name for p in parameters[1:] if p.kind in _BY_KEYWORD and p.default is p.empty
        ]
        self._keywords = {p.name for p in parameters[1:] if p.kind in _BY_KEYWORD}
        self._run_options = RUN_OPTIONS - self._keywords

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """With a state first: run inside that program (await an async function), and return what
        the function returns. Otherwise the same as `run`."""
        if self._class is not None and args and isinstance(args[0], self._class):
            return self.__get__(args[0])(*args[1:], **kwargs)  # as Agent.go(agent, s, ...)
        state = args[0] if args else kwargs.get(self._state_name)
        if isinstance(state, ProgramState):
            return self._fn(*args, **{**self._bound, **kwargs})
        if (outer := _running.get()) is not None:
            warnings.warn(
                f"{self.__name__}() is called within {outer}() without its state, so it runs as a "
                "program of its own, of which nothing is appended here. Write "
                f"{self.__name__}({self._state_name}, ...) to run it inside {outer}(), or "
                f"{self.__name__}.run(...) if its own is what you want",
                stacklevel=2,
            )
        return self.run(*args, **kwargs)

    def __set_name__(self, owner: type, name: str) -> None:
        """A function that was written elsewhere is no method of the class that it is put in."""
        is_own = getattr(self._fn, "__qualname__", "").startswith(f"{owner.__qualname__}.")
        self._class = owner if is_own and not isinstance(self._fn, staticmethod) else None

    def __get__(self, instance: object, owner: type | None = None) -> Function:
        """The program of a method of `instance`."""
        if instance is None or self._class is None:
            return self
        method = types.MethodType(self._fn, instance)
        return Function(method, self._bound, self._num_api_spec_tokens, self._cache_path)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of all parameters except the state, in their order."""
        return tuple(self._argument_names)

    @property
    def required(self) -> tuple[str, ...]:
        """Those that have neither a default nor a value by `bind`."""
        return tuple(name for name in self._required if name not in self._bound)

    def check(self, /, *args: Any, **kwargs: Any) -> None:
        """Raises InvalidProgram for arguments of `run` that the function does not take, or without
        those that it needs."""
        signature = inspect.signature(self._fn)
        try:
            signature.bind(None, *args, **{**self._bound, **self._divide(kwargs)[1]})
        except TypeError as error:
            own = list(signature.parameters.values())[1:]
            shown = signature.replace(parameters=own, return_annotation=signature.empty)
            raise InvalidProgram(f"{self.__name__}{shown}: {error}") from error

    def bind(self, /, **kwargs: object) -> Function:
        """The same program with some arguments fixed."""
        unknown = sorted(set(kwargs).difference(self._argument_names))
        if unknown:
            allowed = f"a parameter of {self.__name__}"
            raise InvalidProgram.of(unknown[0], kwargs[unknown[0]], allowed)
        bound = {**self._bound, **kwargs}
        return Function(self._fn, bound, self._num_api_spec_tokens, self._cache_path)

    # --- one run ---------------------------------------------------------------------------------

    def run(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run once and return the state; raises what failed inside, also in unread forks.

        With `stream=True` it returns at once, see `stream`. A function with a cache returns a
        `Result` that it may have kept.
        """
        if self._take(kwargs, "stream", False):
            return self.stream(*args, **kwargs)
        if self._cache_path is not None:
            key, found = self._kept(args, kwargs)
            return self._keep(key, self._run(args, kwargs)) if found is None else found
        return self._run(args, kwargs)

    def _run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> ProgramState:
        if self.is_async:
            done: ProgramState = _run_loop(self._arun, args, kwargs)
            return done
        options, kwargs = self._split(kwargs)
        state = options.start()
        with time_limit(options.timeout_s, state):
            self._execute(state, args, kwargs)
            try:
                state._program.wait_done()
            except BaseException:  # also Ctrl-C: leave nothing running
                state.cancel()
                raise
        return state

    async def arun(self, /, *args: Any, **kwargs: Any) -> Any:
        """`run` for async code. A plain function runs on a thread, an async one needs none."""
        await self._await_backend(kwargs)
        if self._cache_path is not None:
            key, found = self._kept(args, kwargs)
            return self._keep(key, await self._arun(args, kwargs)) if found is None else found
        return await self._arun(args, kwargs)

    async def _arun(self, args: Sequence[Any], kwargs: dict[str, Any]) -> ProgramState:
        await self._await_backend(kwargs)
        options, kwargs = self._split(kwargs)
        state = options.start()
        async with time_limit_async(options.timeout_s):
            try:
                await self._execute_async(state, args, kwargs)
                await state._program.wait_done_async()
            except BaseException:  # also a cancelled task
                state.cancel()
                raise
        return state

    def _kept(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[bytes, Result | None]:
        """The key of a run, and what is known of it."""
        if self._cache is None:
            self._cache = ResultStore(self._cache_path or "")
        given, own = self._divide(kwargs)
        program = self._key(self._options(given).backend, given, {})
        key = run_key(program, args, own)
        found = self._cache.get(key)
        return key, None if found is None else found.numbered(0, is_stored=True)

    def _keep(self, key: bytes, state: ProgramState) -> Result:
        assert self._cache is not None
        result = result_of(state)
        self._cache.put(key, result)
        return result

    def stream(self, /, *args: Any, **kwargs: Any) -> ProgramState:
        """Start and return at once; `state.text_iter()` yields the text as it comes.

        The program is cancelled once the returned state is garbage collected.
        """
        options, kwargs = self._split(kwargs)
        state = options.start(stream=True)
        TimeLimit(options.timeout_s, [state])
        reader = _reader_of(state)
        target = self._execute_quietly
        runner = threading.Thread(target=target, args=(state, args, kwargs), daemon=True)
        runner.start()
        state._program.runner = runner.ident
        return reader

    async def astream(self, /, *args: Any, **kwargs: Any) -> ProgramState:
        """`stream` for async code; read `state.text_async_iter()`."""
        await self._await_backend(kwargs)
        if not self.is_async:
            return self.stream(*args, **kwargs)
        options, kwargs = self._split(kwargs)
        state = options.start(stream=True)
        TimeLimit(options.timeout_s, [state])
        running = self._execute_async_quietly(state, args, kwargs)
        state._program.runner = asyncio.get_running_loop().create_task(running)
        return _reader_of(state)

    # --- batches ---------------------------------------------------------------------------------

    def run_batch(self, /, batch_kwargs: Sequence[Arguments], **kwargs: Any) -> Any:
        """Run once for each set of arguments, a mapping or a list; all are in flight together.

        Returns the states in the same order; with `generator_style=True` an iterator that yields
        each as soon as it and all before it are done. At most `num_threads` ("auto": 64) functions
        wait at a time; functions that never wait, and async ones, need no thread. All instances
        finish before one BatchError names those that failed and has the states of the others; with
        `raise_errors=False` nothing is raised and `state.error()` reports it. `progress_bar=True`
        shows how many are done.

        With `store`, a path, results are kept on disk as they come, and what is there is not run
        again: a batch that was interrupted goes on. With it, with `max_in_flight` (programs at a
        time) or `prices`, or where the inputs are no list, it returns `Result`s, see
        `stream_batch`.
        """
        if self._is_streamed(batch_kwargs, kwargs):
            return self._streamed_batch(batch_kwargs, kwargs)
        threads = self._num_threads(kwargs)
        generator_style = self._take(kwargs, "generator_style", False)
        if self.is_async and not generator_style:
            return _run_loop(self.arun_batch, batch_kwargs, **kwargs)
        progress_bar = self._take(kwargs, "progress_bar", False)
        raise_errors = self._take(kwargs, "raise_errors", True)
        batch, execute, execute_async = self._batch(batch_kwargs, kwargs)

        def run() -> None:
            try:
                if self.is_async:
                    asyncio.run(batch.run_async(execute_async, lambda: None))
                else:
                    batch.run(execute, threads)
            except BaseException as error:
                batch.interrupt(error)

        states = self._finished(batch, progress_bar, raise_errors)
        finished = FinishedStates(batch, states)
        if not generator_style:
            run()
            return list(finished)
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(run,), name="stemma-batch", daemon=True).start()
        return finished

    def stream_batch(self, /, batch_kwargs: Inputs, **kwargs: Any) -> BatchStream:
        """Run once for each input of any iterable, also an async one; `for` or `async for` gives a
        `Result` each as it comes, failed ones too.

        Options besides those of `run`: `store`, a path of an SQLite file where results are kept and
        found; `max_in_flight`, programs at a time (256), which are begun as inputs are taken;
        `num_threads` for plain functions while they run ("auto": 64); `progress_bar`; `prices`, an
        `st.Prices`. `timeout` is that of each program. `stream.summary` has what it took.
        """
        threads = self._num_threads(kwargs)
        path = self._take(kwargs, "store", None)
        store = None if path is None else ResultStore(path)
        prices = self._take(kwargs, "prices", None)
        if prices is not None and not isinstance(prices, Prices):
            raise InvalidProgram.of("prices", prices, "an st.Prices, of a million tokens")
        in_flight = self._take(kwargs, "max_in_flight", DEFAULT_IN_FLIGHT)
        batch = BatchOptions(
            _NUM_THREADS.checked("max_in_flight", in_flight),
            threads,
            store,
            prices,
            bool(self._take(kwargs, "progress_bar", False)),
            self.__name__,
        )
        given, shared = self._divide(kwargs)
        options = self._options(given)
        program = self._key(options.backend, given, shared)
        if store is not None and given.get("seed") is None:
            options.seed = store.seed_of(program)

        async def run(state: ProgramState, item: Any, pool: ThreadPoolExecutor) -> None:
            args, own = _arguments(item)
            if self.is_async:
                await self._execute_async(state, args, {**shared, **own})
                return
            await run_beside(self._execute, state, args, {**shared, **own}, threads=pool)

        batch = replace(batch, timeout_s=options.timeout_s)
        return BatchStream(batch_kwargs, options.start, run, program, batch)

    def _is_streamed(self, batch_kwargs: object, kwargs: Mapping[str, Any]) -> bool:
        asked = {"store", "max_in_flight", "prices"} - self._keywords
        return not isinstance(batch_kwargs, Sequence) or not asked.isdisjoint(kwargs)

    def _streamed_batch(self, batch_kwargs: Any, kwargs: dict[str, Any]) -> Any:
        raise_errors = self._take(kwargs, "raise_errors", True)
        generator_style = self._take(kwargs, "generator_style", False)
        stream = self.stream_batch(batch_kwargs, **kwargs)
        if generator_style:
            return stream
        results = sorted(stream, key=lambda result: result.index)
        errors = {r.index: error for r in results if (error := r.error()) is not None}
        if errors and raise_errors:
            raise BatchError(errors, len(results), results) from errors[min(errors)]
        return results

    def _num_threads(self, kwargs: dict[str, Any]) -> int:
        num_threads = self._take(kwargs, "num_threads", "auto")
        threads = MAX_THREADS if num_threads == "auto" else plain(num_threads)
        if not _NUM_THREADS.holds(threads):
            raise InvalidProgram.of("num_threads", num_threads, '"auto" or an integer >= 1')
        return int(threads)

    def _key(self, backend: Backend, given: Mapping[str, Any], shared: Mapping[str, Any]) -> str:
        """What names its results under these options; see `result_store`."""
        own = {name: value for name, value in given.items() if name not in _NO_RESULTS}
        named = [self._bound, own, shared]
        info = backend.channel.info
        model = ":".join([str(info.get("model", "")), *map(str, info.get("revisions") or ())])
        return f"{self._program_key}:{model}" + run_key("", named, {}).hex()

    @functools.cached_property
    def _program_key(self) -> str:
        """As it is when first asked for: what it closes over may be what it writes to."""
        return program_key(self._fn)

    async def arun_batch(
        self, /, batch_kwargs: Sequence[Arguments], **kwargs: Any
    ) -> list[ProgramState]:
        """`run_batch` for async code; async functions run as tasks, plain ones on threads. It has
        only the options `progress_bar` and `raise_errors`."""
        progress_bar = self._take(kwargs, "progress_bar", False)
        raise_errors = self._take(kwargs, "raise_errors", True)
        await self._await_backend(kwargs)
        batch, execute, execute_async = self._batch(batch_kwargs, kwargs)
        with show_progress(len(batch.states), self.__name__, progress_bar) as advance:
            if self.is_async:
                await batch.run_async(execute_async, advance)
            else:
                await batch.run_beside(execute, MAX_THREADS, advance)
        return list(FinishedStates(batch, self._finished(batch, False, raise_errors)))

    def _batch(
        self, batch_kwargs: Sequence[Arguments], kwargs: Mapping[str, Any]
    ) -> tuple[Batch, Execute, ExecuteAsync]:
        """The programs, and how to run the function in one of them."""
        options, shared = self._split(kwargs)

        def execute(index: int, state: ProgramState) -> None:
            args, given = _arguments(batch_kwargs[index])
            self._execute(state, args, {**shared, **given} if shared else given)

        async def execute_async(index: int, state: ProgramState) -> None:
            args, given = _arguments(batch_kwargs[index])
            await self._execute_async(state, args, {**shared, **given})

        states = [options.start(instance=index) for index in range(len(batch_kwargs))]
        return Batch(states, TimeLimit(options.timeout_s, states)), execute, execute_async

    def _finished(
        self, batch: Batch, progress_bar: bool, raise_errors: bool
    ) -> Generator[ProgramState, None, None]:
        with show_progress(len(batch.states), self.__name__, progress_bar) as advance:
            for state in batch.finished():
                advance()
                yield state
        if batch.errors and raise_errors:
            error = BatchError(batch.errors, len(batch.states), batch.states)
            raise error from batch.errors[min(batch.errors)]

    # --- before running --------------------------------------------------------------------------

    def trace(self, /, *args: Any, **kwargs: Any) -> Graph:
        """The graph of all ops up to the first wait; nothing is sent to a backend."""
        from .capture import trace_of

        self._take(kwargs, "backend", None)  # SGLang's
        return trace_of(self._fn, args, {**self._bound, **kwargs})

    def cache(self, backend: Backend | None = None) -> int:
        """Compute, on `backend`, the prefix that all runs of this program share whatever their
        arguments, so that later runs find it cached; returns the number of tokens.

        The function runs without a backend, with unknown arguments, up to where the text depends on
        one or the model is called. Its own code up to there also runs.
        """
        missing = [name for name in self._argument_names if name not in self._bound]
        return cache_prefix(self._fn, self._bound, missing, self._options({"backend": backend}))

    # --- carrying out ----------------------------------------------------------------------------

    def _execute(self, state: ProgramState, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if self.is_async:  # in a thread of a batch or a stream, which runs no other loop
            asyncio.run(self._execute_async(state, args, kwargs))
            return
        outer = _running.set(self.__name__)
        try:
            given = {**self._bound, **kwargs} if self._bound else kwargs
            state.ret_value = self._fn(state, *args, **given)
        except Exception as error:
            state._program.fail(error)
            raise
        except BaseException:  # Ctrl-C
            state._program.cancel()
            raise
        finally:
            _running.reset(outer)
        state._program.end()

    async def _execute_async(
        self, state: ProgramState, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        if not self.is_async:
            await run_beside(self._execute, state, args, kwargs)
            return
        program = state._program
        program.loop_thread = threading.get_ident()
        outer = _running.set(self.__name__)
        try:
            state.ret_value = await self._fn(state, *args, **{**self._bound, **kwargs})
        except Exception as error:
            program.fail(error)
            raise
        except BaseException:  # a cancelled task
            program.cancel()
            raise
        finally:
            program.loop_thread = None
            _running.reset(outer)
        program.end()

    def _execute_quietly(
        self, state: ProgramState, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """For a streaming thread: reading the stream raises the error."""
        with contextlib.suppress(Exception):
            self._execute(state, args, kwargs)

    async def _execute_async_quietly(
        self, state: ProgramState, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        with contextlib.suppress(Exception):
            await self._execute_async(state, args, kwargs)

    def _take(self, given: dict[str, Any], name: str, default: Any) -> Any:
        """Pop an option from `given`, unless the function has a parameter of that name."""
        return default if name in self._keywords else given.pop(name, default)

    def _split(self, kwargs: Mapping[str, Any]) -> tuple[RunOptions, dict[str, Any]]:
        """Separates the run's options from the function's arguments."""
        given, rest = self._divide(kwargs)
        return self._options(given), rest

    def _divide(self, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        given = {name: value for name, value in kwargs.items() if name in self._run_options}
        rest = {name: value for name, value in kwargs.items() if name not in self._run_options}
        return given, rest

    async def _await_backend(self, kwargs: Mapping[str, Any]) -> None:
        """Before `_split`, which would keep an event loop waiting. Raises EngineError."""
        await await_backend(kwargs.get("backend") if "backend" in self._run_options else None)

    def _options(self, given: Mapping[str, Any]) -> RunOptions:
        spec = self._num_api_spec_tokens
        return RunOptions(given, name=self.__name__, num_api_spec_tokens=spec)


def _is_generator(fn: object) -> bool:
    return inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn)


def _reader_of(state: ProgramState) -> ProgramState:
    """The state that a streaming run returns: a second object, since the running function holds the
    original. When it is garbage collected, the program is cancelled."""
    reader = ProgramState.__new__(ProgramState)
    reader.__dict__ = state.__dict__
    weakref.finalize(reader, state._program.cancel_soon).atexit = False
    return reader


def _arguments(given: Arguments) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if isinstance(given, dict | Mapping):  # the quick check for a dict
        return (), given
    if isinstance(given, Sequence) and not isinstance(given, str):
        return given, {}
    raise InvalidProgram.of("batch_kwargs", given, "a mapping or a list of arguments each")


def _run_loop(run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run a coroutine function to completion, where no event loop runs."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(run(*args, **kwargs))
    named = run.__name__.lstrip("_")
    raise InvalidProgram(f"an event loop runs here already: await fn.{named}(...) instead")


def open_program(
    backend: Backend,
    *,
    seed: int = 0,
    instance: int = 0,
    stream: bool = False,
    defaults: GenParams | None = None,
    name: str = "program",
) -> ProgramState:
    """Start a program by hand, without a function; end it with `state.end()`."""
    program = Program(
        backend.channel,
        seed=checked_seed(seed),
        instance=instance,
        stream=stream,
        defaults=None if defaults is None else Defaults(defaults),
        name=name,
    )
    observer.program_started(program)
    return ProgramState(program)


@overload
def function(
    fn: Callable[..., Any],
    num_api_spec_tokens: int | None = None,
    cache: str | Path | None = None,
) -> Function: ...
@overload
def function(
    fn: None = None, num_api_spec_tokens: int | None = None, cache: str | Path | None = None
) -> Callable[[Callable[..., Any]], Function]: ...
def function(
    fn: Callable[..., Any] | None = None,
    num_api_spec_tokens: int | None = None,
    cache: str | Path | None = None,
) -> Function | Callable[[Callable[..., Any]], Function]:
    """Make a program of a function whose first parameter is the state, of a method whose second
    is, behind `self`. `@function` or `@function()`.

    `num_api_spec_tokens`: on a backend that asks a server call by call, request this many extra
    tokens and reuse those that fit the text that follows; saves calls and changes no result.
    `cache`: the path of an SQLite file where results of `run` and `arun` are kept; a run with the
    same arguments, options and model, of the same source, returns the `Result` that is there.
    """
    if fn is None:
        return lambda fn: Function(fn, None, num_api_spec_tokens, cache)
    return Function(fn, None, num_api_spec_tokens, cache)
