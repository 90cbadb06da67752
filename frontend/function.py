"""`@function`: a Python function whose first parameter is the program's state becomes a program."""

from __future__ import annotations

import contextlib
import inspect
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, overload

from ..errors import BatchError, InvalidProgram
from .backend import Backend, get_default_backend
from .ir import GenParams
from .program import Program
from .progress import progress_bar as show_progress
from .state import ProgramState

if TYPE_CHECKING:
    from .trace.graph import Graph

MAX_THREADS = 64
MAX_SEED = 2**63 - 1


class Function:
    """A program that can be run, streamed, and run over a batch.

    Options of `run`, `run_batch` and `stream` (a parameter of the function's own with the same name
    wins): `backend`, and defaults for every gen that does not say itself: `max_tokens`,
    `temperature`, `top_p`, `top_k`, `min_p`, `frequency_penalty`, `presence_penalty`,
    `repetition_penalty`, `stop`. `seed` fixes all draws of the program.
    """

    def __init__(self, fn: Callable[..., Any], bound: Mapping[str, object] | None = None) -> None:
        self._fn = fn
        self._bound = dict(bound or {})
        self.__name__ = getattr(fn, "__name__", "program")
        self.__doc__ = fn.__doc__
        names = [p.name for p in inspect.signature(fn).parameters.values()]
        if not names:
            raise InvalidProgram(f"{self.__name__}() needs the state as its first parameter")
        self._parameters = frozenset(names[1:])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """With a state first: run inside that program. Else the same as `run`."""
        if args and isinstance(args[0], ProgramState):
            return self._fn(*args, **{**self._bound, **kwargs})
        return self.run(*args, **kwargs)

    @property
    def parameters(self) -> frozenset[str]:
        """Names of all parameters but the state."""
        return self._parameters

    def bind(self, **kwargs: object) -> Function:
        """The same program with some arguments fixed."""
        unknown = sorted(set(kwargs) - self._parameters)
        if unknown:
            allowed = f"a parameter of {self.__name__}"
            raise InvalidProgram.of(unknown[0], kwargs[unknown[0]], allowed)
        return Function(self._fn, {**self._bound, **kwargs})

    def run(self, *args: Any, stream: bool = False, **kwargs: Any) -> ProgramState:
        """Run once and return the state; raises what failed inside, also in forks nobody read.

        With `stream=True` it returns at once; read `state.text_iter()`.
        """
        options, kwargs = self._split(kwargs)
        state = options.start(self.__name__, instance=0, stream=stream)
        if stream:
            runner = threading.Thread(
                target=self._execute_quietly, args=(state, args, kwargs), daemon=True
            )
            runner.start()
            state._program.runner = runner.ident
            return state
        self._execute(state, args, kwargs)
        try:
            state._program.wait_done()
        except BaseException:  # also Ctrl-C: leave nothing running
            state.cancel()
            raise
        return state

    def stream(self, *args: Any, **kwargs: Any) -> ProgramState:
        """Start and return at once; `state.text_iter()` yields the text as it comes."""
        return self.run(*args, stream=True, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Graph:
        """What it sends before it first waits, without a backend: see docs/tracing.md."""
        from .trace.capture import trace_of

        return trace_of(self._fn, args, {**self._bound, **kwargs})

    def run_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any]],
        *,
        progress_bar: bool = False,
        num_threads: int | str = "auto",
        raise_errors: bool = True,
        **kwargs: Any,
    ) -> list[ProgramState]:
        """Run once for each set of arguments; states come back in the same order.

        All instances are finished before one BatchError names those that failed; with
        `raise_errors=False` nothing is raised and `state.error()` tells.
        """
        options, shared = self._split(kwargs)
        threads = MAX_THREADS if num_threads == "auto" else int(num_threads)
        if threads < 1:
            raise InvalidProgram.of("num_threads", num_threads, '"auto" or an integer >= 1')
        errors: dict[int, BaseException] = {}
        states = [options.start(self.__name__, instance=i) for i in range(len(batch_kwargs))]

        def execute(index: int) -> None:
            try:
                self._execute(states[index], (), {**shared, **batch_kwargs[index]})
            except Exception as error:
                states[index].cancel()
                errors[index] = error

        with show_progress(len(states), self.__name__, progress_bar) as advance:
            self._run_all(states, execute, min(threads, len(states)), errors, advance)
        if errors and raise_errors:
            raise BatchError(errors, len(states)) from errors[min(errors)]
        return states

    @staticmethod
    def _run_all(
        states: list[ProgramState],
        execute: Callable[[int], None],
        threads: int,
        errors: dict[int, BaseException],
        advance: Callable[[], None],
    ) -> None:
        """A program that never waits frees its thread at once; the runtime goes on with it."""
        if not states:
            return
        with ThreadPoolExecutor(threads, thread_name_prefix="stemma-batch") as pool:
            futures = [pool.submit(execute, index) for index in range(len(states))]
            try:
                for index, future in enumerate(futures):
                    future.result()
                    if index not in errors:
                        try:
                            states[index]._program.wait_done()
                        except Exception as error:
                            errors[index] = error
                    advance()
            except BaseException:  # Ctrl-C: leave nothing running
                pool.shutdown(wait=False, cancel_futures=True)
                for state in states:
                    state.cancel()
                raise

    def _execute(
        self, state: ProgramState, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        try:
            state.ret_value = self._fn(state, *args, **{**self._bound, **kwargs})
        except Exception as error:
            state._program.fail(error)
            raise
        except BaseException:  # Ctrl-C
            state._program.cancel()
            raise
        state._program.end()

    def _execute_quietly(
        self, state: ProgramState, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """For a streaming thread: the error is raised where the stream is read."""
        with contextlib.suppress(Exception):
            self._execute(state, args, kwargs)

    def _split(self, kwargs: Mapping[str, Any]) -> tuple[_RunOptions, dict[str, Any]]:
        """Options of the run apart from arguments of the function."""
        names = set(_RUN_OPTIONS) - self._parameters
        given = {name: value for name, value in kwargs.items() if name in names}
        rest = {name: value for name, value in kwargs.items() if name not in names}
        return _RunOptions(given), rest


_GEN_DEFAULTS = (
    "frequency_penalty",
    "min_p",
    "presence_penalty",
    "repetition_penalty",
    "temperature",
    "top_k",
    "top_p",
)
_RUN_OPTIONS = ("backend", "max_new_tokens", "max_tokens", "seed", "stop", *_GEN_DEFAULTS)


class _RunOptions:
    """Backend, seed and defaults for the gens of one run or batch."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.backend: Backend | None = given.get("backend")
        if self.backend is not None and not isinstance(self.backend, Backend):
            raise InvalidProgram.of("backend", self.backend, "an Engine or a Runtime")
        seed = given.get("seed")
        self.seed = secrets.randbits(62) if seed is None else seed
        stop = given.get("stop")
        self.defaults = GenParams(
            max_tokens=given.get("max_tokens", given.get("max_new_tokens")),
            stop=(stop,) if isinstance(stop, str) else None if stop is None else tuple(stop),
            **{name: given.get(name) for name in _GEN_DEFAULTS},
        )

    def start(self, name: str, instance: int, stream: bool = False) -> ProgramState:
        backend = self.backend or get_default_backend()
        self.backend = backend
        return open_program(
            backend,
            seed=self.seed,
            instance=instance,
            stream=stream,
            defaults=self.defaults,
            name=name,
        )


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
    if not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
        raise InvalidProgram.of("seed", seed, f"an integer in [0, {MAX_SEED}]")
    program = Program(
        backend.connection,
        seed=seed,
        instance=instance,
        stream=stream,
        defaults=defaults,
        name=name,
    )
    return ProgramState(program)


@overload
def function(fn: Callable[..., Any]) -> Function: ...
@overload
def function(fn: None = None) -> Callable[[Callable[..., Any]], Function]: ...
def function(
    fn: Callable[..., Any] | None = None,
) -> Function | Callable[[Callable[..., Any]], Function]:
    """Make a program of a function whose first parameter is the state. `@function` or
    `@function()`."""
    return Function(fn) if fn is not None else Function
