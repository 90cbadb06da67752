"""One of a server's models: its engine while it is loaded, and what is known of it while it is not.

Its counts are for the event loop; the engine may be started, asked and ended on any thread.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import EngineError
from ...frontend.client.client import Connection
from ...frontend.client.engine_process import EngineProcess
from ..supervisor import EngineState, EngineSupervisor

_OPEN = (EngineState.READY, EngineState.RESTARTING)
_RUNNING = (*_OPEN, EngineState.DRAINING)
_UNKNOWN: dict[str, Any] = {
    "model_path": "",
    "max_model_len": None,
    "revisions": [],
    "architecture": "",
    "dtype": "",
    "quantization": "none",
    "device": "cpu",
    "has_lora": False,
    "vocab_size": 0,
    "embedding": {"size": 0},
    "scores": None,
    "generates": True,
}  # of a model whose files could not be read


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model that can be loaded."""

    launch: Callable[[], EngineProcess]
    num_bytes: int  # of memory that its engine takes
    description: Mapping[str, Any]  # what its engine will say of itself, as far as files tell


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as the command line names it."""

    name: str
    endpoint: str  # of its engine, for programs
    prepare: Callable[[], Prepared]  # may be slow; raises ModelLoadError or InvalidRequest


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """Why a model could not be loaded, and when that is tried again."""

    reason: str
    retry_at_s: float  # on the event loop's clock


class ModelSlot:
    """The `EngineLink` of one model. Lifetime: from the first `start` to `close`, with any number
    of engines, one at a time."""

    def __init__(self, spec: ModelSpec, engine_timeout_s: float) -> None:
        self.spec = spec
        self.num_bytes = 0  # of memory that is its own now
        self.num_running = 0  # requests that have been let in,
        self.num_waiting = 0  # and that wait until it is loaded
        self.last_used_s = 0.0
        self.loaded_s = 0.0  # since when it has been loaded, on the event loop's clock
        self.keep_alive_s = math.inf  # that it stays loaded from then on; inf: until room is needed
        self.is_leaving = False  # lets no more requests in, and is unloaded once it is idle
        self.is_unloading = False
        self.failure: LoadFailure | None = None  # of the last attempts,
        self.num_failures = 0  # so many in a row
        self.num_loads = self.num_unloads = self.num_failed_loads = 0
        self._timeout_s = engine_timeout_s
        self._lock = threading.Lock()
        self._is_closed = False
        self._supervisor: EngineSupervisor | None = None
        self._num_restarts = 0  # of the engines before
        self._description: dict[str, Any] = {**_UNKNOWN, "model": self.name}

    @property
    def name(self) -> str:
        """By which requests choose it."""
        return self.spec.name

    # --- for routes -----------------------------------------------------------------------------

    @property
    def connection(self) -> Connection:
        """The connection to its engine. Raises EngineError where none runs."""
        supervisor = self._supervisor
        if supervisor is None:
            raise EngineError(
                f"model {self.name!r} is not loaded; a request that names it, or POST /models/load,"
                " loads it"
            )
        return supervisor.connection

    @property
    def num_restarts(self) -> int:
        """Engines that were started for one that had died."""
        supervisor = self._supervisor
        return self._num_restarts + (0 if supervisor is None else supervisor.num_restarts)

    def describe(self) -> dict[str, Any]:
        """What its engine says of itself; while there is none what the last one said, or else what
        its files tell."""
        supervisor = self._supervisor
        if supervisor is not None and supervisor.state in _OPEN:
            with contextlib.suppress(EngineError):  # it has just died
                self._description = supervisor.connection.info
        return self._description

    @property
    def is_there(self) -> bool:
        """Whether it has an engine, be it one that is being started or ended."""
        return self._supervisor is not None

    @property
    def is_loaded(self) -> bool:
        """Whether its engine has started and is not being ended."""
        supervisor = self._supervisor
        return supervisor is not None and supervisor.state in _OPEN and not self.is_unloading

    @property
    def is_running(self) -> bool:
        """The same, also while the server is being stopped."""
        supervisor = self._supervisor
        return supervisor is not None and supervisor.state in _RUNNING and not self.is_unloading

    @property
    def is_open(self) -> bool:
        """Whether a request may go to its engine now."""
        return self.is_loaded and not self.is_leaving

    @property
    def status(self) -> str:
        """As llama.cpp's router words it."""
        if self.is_running:
            return "loaded"
        return "loading" if self.is_there and not self.is_unloading else "unloaded"

    def remaining_s(self, now_s: float) -> float:
        """How long it will stay loaded, if it has no further requests."""
        used_s = now_s if self.num_running else self.last_used_s
        return max(0.0, used_s + self.keep_alive_s - now_s)

    # --- its engine -----------------------------------------------------------------------------

    def note(self, prepared: Prepared) -> None:
        """What its files tell, where no engine has said it."""
        if not self.num_loads:
            self._description = {**_UNKNOWN, **prepared.description, "model": self.name}

    def start(self, prepared: Prepared) -> None:
        """Begin to start an engine. Raises EngineError."""
        supervisor = EngineSupervisor(prepared.launch, timeout_s=self._timeout_s)
        with self._lock:
            if self._is_closed:
                raise EngineError("the server is being stopped")
            assert self._supervisor is None, "one engine at a time"
            supervisor.start()
            self._supervisor, self.num_bytes = supervisor, prepared.num_bytes
            self.num_loads += 1

    def wait_started(self) -> None:
        """Return once its engine is ready. Raises EngineError where it never will be."""
        if (supervisor := self._supervisor) is None:
            raise EngineError("the server is being stopped")
        supervisor.wait_started()

    def num_programs(self, timeout_s: float, if_silent: int = 0) -> int:
        """Programs of all clients; `if_silent`: of an engine that does not answer."""
        supervisor = self._supervisor
        return 0 if supervisor is None else supervisor.num_programs(timeout_s, if_silent)

    def drain(self) -> None:
        """Have its engine accept no new programs."""
        if (supervisor := self._supervisor) is not None:
            supervisor.drain()

    def abandon(self, reason: str) -> None:
        """Fail everything that requests still wait for."""
        if (supervisor := self._supervisor) is not None:
            supervisor.abandon(reason)

    def stop(self) -> None:
        """End its engine, and wait for its end; another one may be started then."""
        if (supervisor := self._supervisor) is None:
            return
        supervisor.stop()
        with self._lock:
            if self._supervisor is supervisor:
                self._num_restarts += supervisor.num_restarts
                self._supervisor, self.num_bytes = None, 0

    def close(self) -> None:
        """End its engine for good."""
        with self._lock:
            self._is_closed = True
        self.stop()
