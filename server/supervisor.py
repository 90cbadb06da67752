"""Runs an engine beside the HTTP server: starts it, detects its death, restarts it.

One thread manages one engine after another. A second one waits for the current process, so that all
requests in it learn of its death at once: the system reports it. A lost connection is no death; it
is opened anew. Only an engine that runs and does not answer is killed: its loop sends between any
two steps, so its silence is that of one that hangs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from enum import Enum

from ..errors import EngineError, StemmaError
from ..frontend.client.client import Connection
from ..frontend.client.engine_process import START_TIMEOUT_S, EngineProcess
from ..frontend.client.peer_process import PeerProcess
from ..frontend.client.transport import RuntimeSilent
from ..frontend.protocol.wire import DRAIN_ORDER

log = logging.getLogger(__name__)

BACKOFF_S = (0.0, 1.0, 2.0, 5.0, 10.0)  # before the next start; the last one from then on
PATIENCE_S = 60.0  # that programs which outlive an engine wait for the next one
NAP_S = 0.05
RECONNECT_AFTER_S = 0.5  # a connection that cannot be opened, e.g. for want of sockets
STEADY_S = 60.0  # an engine that was ready for so long did not die of its start
_STOPPED = "the server is being stopped"


class EngineState(Enum):
    """An engine's state, as its supervisor sees it."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINING = "draining"  # running, and accepting no new programs
    STOPPED = "stopped"


class EngineSupervisor:
    """The engine behind an HTTP server (`service.EngineLink`); thread-safe.

    Lifetime: from `start` to `stop`. An engine that dies before it was ever ready is not restarted:
    its configuration cannot work. One that dies while draining is not restarted either.
    """

    def __init__(
        self,
        launch: Callable[[], EngineProcess],
        *,
        timeout_s: float,
        backoff_s: tuple[float, ...] = BACKOFF_S,
        programs_outlive: bool = False,
    ) -> None:
        """`launch` starts an engine process, each time with the same flags and addresses;
        `timeout_s`: silence after which an engine that is not stopped is killed;
        `programs_outlive`: what runs goes on on the next one when it ends."""
        self._launch = launch
        self._timeout_s = timeout_s
        self._backoff_s = backoff_s
        self._programs_outlive = programs_outlive
        self._lock = threading.Lock()
        self._has_changed = threading.Condition(self._lock)  # the process, or the state
        self._state = EngineState.STARTING
        self._process: EngineProcess | None = None
        self._connection: Connection | None = None
        self._lasting: Connection | None = None  # the same over several processes,
        self._successor: EngineProcess | None = None  # of which it was told of this one last
        self._why_none = "the engine is starting"
        self._num_restarts = 0
        self._begun_s = 0.0  # when the current engine was started,
        self._ready_s: float | None = None  # and since when it has been ready
        self._is_stopping = threading.Event()
        self._has_started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stemma-supervisor", daemon=True)

    # --- for routes -----------------------------------------------------------------------------

    @property
    def connection(self) -> Connection:
        """The connection to the running engine. Raises EngineError where none runs."""
        connection = self._connection
        if connection is None:
            raise EngineError(self._why_none)
        return connection

    @property
    def state(self) -> EngineState:
        """The state now."""
        return self._state

    @property
    def num_restarts(self) -> int:
        """Engines started after the first one."""
        return self._num_restarts

    @property
    def pid(self) -> int | None:
        """The engine's process id, None while there is none."""
        process = self._process
        return None if process is None else process.pid

    # --- for the command ------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to start the engine. Raises EngineError where the system has no thread left."""
        try:
            self._thread.start()
        except RuntimeError as error:
            raise EngineError(f"the engine cannot be looked after: {error}") from error

    def wait_started(self) -> Connection:
        """The connection of the first engine, once it is ready. Raises EngineError where it never
        will be."""
        self._has_started.wait()
        return self.connection

    def drain(self) -> None:
        """Accept no new programs, from anyone; running ones continue."""
        with self._lock:
            if self._state is not EngineState.STOPPED:
                self._state = EngineState.DRAINING
            process = self._process
        if process is not None:
            process.order(DRAIN_ORDER)

    def num_programs(self, timeout_s: float, if_silent: int = 0) -> int:
        """Programs of all clients; `if_silent`: of an engine that runs and does not respond; 0
        where none runs."""
        try:
            connection = self.connection
        except EngineError:
            return 0
        try:
            return int(connection.call("vitals", timeout_s)["num_programs"])
        except EngineError:
            return if_silent

    def abandon(self, reason: str) -> None:
        """Fail everything that HTTP requests still wait for."""
        connection = self._connection
        if connection is not None:
            connection.abandon(EngineError(reason))

    def stop(self) -> None:
        """End the engine; safe to call twice and at any time."""
        self._is_stopping.set()
        with self._lock:
            connection, process = self._lasting or self._connection, self._process
            self._end(_STOPPED)
        if connection is not None:
            connection.close()
        if process is not None:
            process.stop()
        if self._thread.is_alive():
            self._thread.join()

    # --- its thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        num_deaths = 0  # in a row
        while not self._is_over():
            self._ready_s = None
            reason = self._live()
            is_steady = self._ready_s is not None and time.monotonic() - self._ready_s > STEADY_S
            num_deaths = 1 if is_steady else num_deaths + 1
            delay_s = self._backoff_s[min(num_deaths, len(self._backoff_s)) - 1]
            if self._bury(reason, num_deaths, delay_s):
                self._is_stopping.wait(delay_s)

    def _is_over(self) -> bool:
        with self._lock:
            if self._is_leaving:
                self._end(_STOPPED)
            return self._state is EngineState.STOPPED

    def _live(self) -> str:
        """Run one engine from its start to its end; returns why it died."""
        self._begun_s = time.monotonic()
        try:
            process = self._launch()
        except (OSError, StemmaError) as error:  # out of memory or processes, no place for a socket
            return f"the engine's process cannot be started: {error}"
        try:
            with self._lock:
                self._process = process  # from here on `stop` ends it
                self._has_changed.notify_all()
            threading.Thread(target=self._mourn, args=(process,), daemon=True).start()
            return self._keep_connected(process)
        except RuntimeError as error:  # there is no thread left
            return f"the engine cannot be looked after: {error}"
        finally:
            if self._state in (EngineState.READY, EngineState.RESTARTING):
                process.kill()  # it hangs, or has left child processes behind
            process.stop()

    def _keep_connected(self, process: EngineProcess) -> str:
        """Open a connection whenever there is none, until the engine has ended or does not answer;
        returns why."""
        while not self._is_stopping.is_set():
            try:
                error = self._be_connected(process)
            except Exception as failure:  # also out of threads, sockets or files
                error = failure
            reason = process.peer.death() or str(error)
            is_hung = isinstance(error, RuntimeSilent)
            if (
                process.peer.death()
                or is_hung
                or self._is_leaving
                or not self._has_started.is_set()
            ):
                return reason
            log.warning("the engine runs, but the connection to it was lost: %s", reason)
            self._is_stopping.wait(RECONNECT_AFTER_S)
        return _STOPPED

    def _be_connected(self, process: EngineProcess) -> Exception:
        """Connect to an engine until the connection ends; returns or raises why."""
        connection = self._lasting
        if connection is None or connection.error is not None:
            connection = self._connect(process)
            self._lasting = connection if self._programs_outlive else None
        elif not self._is_succeeded(process, connection):
            return connection.error or EngineError(str(process.peer.death()))
        self._become_ready(process, connection)
        if self._lasting is None:
            return connection.wait_ended()
        while connection.error is None and not process.wait(RECONNECT_AFTER_S):
            pass
        return connection.error or EngineError(str(process.peer.death()))

    def _is_succeeded(self, process: EngineProcess, connection: Connection) -> bool:
        """Whether a connection that outlived another process has a session with this one, once that
        is known."""
        connection.call_soon(lambda: None)  # it looks at once whether its process lives
        while process.peer.death() is None and connection.error is None:
            with self._lock:
                is_taken = self._successor is process
            if is_taken and connection.wait_welcomed(RECONNECT_AFTER_S):
                return connection.error is None
            if not is_taken and self._is_stopping.wait(NAP_S):
                return False
        return False

    def _next_process(self) -> tuple[str, PeerProcess]:
        """On the connection's thread: the process after the one that has ended. Raises
        EngineError."""

        def is_known() -> bool:
            if self._state is EngineState.STOPPED:
                return True
            return self._process is not None and self._process.peer.death() is None

        with self._lock:
            if not self._has_changed.wait_for(is_known, PATIENCE_S):
                raise EngineError(f"no engine was there again within {PATIENCE_S:g} s")
            if self._state is EngineState.STOPPED:
                raise EngineError(self._why_none)
            assert self._process is not None, "that is what is known"
            self._successor = self._process
            return self._process.endpoint, self._process.peer

    def _connect(self, process: EngineProcess) -> Connection:
        return Connection(
            process.endpoint,
            timeout_s=START_TIMEOUT_S if self._ready_s is None else self._timeout_s,
            process=process.peer,
            silence_s=self._timeout_s,
            outlives_runtime=self._programs_outlive,
            successor=self._next_process if self._programs_outlive else None,
        )

    def _mourn(self, process: EngineProcess) -> None:
        """Notify all who wait for an engine when its process ends."""
        process.wait()
        goes_on = "" if self._is_leaving else "; another one is being started"
        with self._lock:
            connection = self._connection if self._process is process else None
            is_over = self._lasting is None or self._is_leaving
        if connection is not None and is_over:
            connection.abandon(EngineError(f"{process.peer.death()}{goes_on}"))

    def _become_ready(self, process: EngineProcess, connection: Connection) -> None:
        with self._lock:
            if self._is_stopping.is_set():
                connection.close()
                return
            self._connection = connection
            if self._ready_s is None:
                self._note_ready()
            if self._state is EngineState.DRAINING:
                process.order(DRAIN_ORDER)
            else:
                self._state = EngineState.READY
        self._has_started.set()

    def _note_ready(self) -> None:
        self._ready_s = time.monotonic()
        if self._num_restarts:
            log.warning("the engine is ready again after %.1f s", self._ready_s - self._begun_s)

    def _bury(self, reason: str, num_deaths: int, delay_s: float) -> bool:
        """Record an engine's end; returns whether to start another one."""
        with self._lock:
            self._connection = self._process = None
            if self._is_leaving or not self._has_started.is_set():
                self._end(_STOPPED if self._is_leaving else reason)
                return False
            self._state = EngineState.RESTARTING
            self._num_restarts += 1
            if num_deaths > 1:
                reason = f"{reason}, {num_deaths} times in a row now"
            self._why_none = f"the engine is being restarted: {reason}"
        log.warning("%s; starting another one in %g s", reason, delay_s)
        return True

    @property
    def _is_leaving(self) -> bool:
        return self._is_stopping.is_set() or self._state is EngineState.DRAINING

    def _end(self, reason: str) -> None:
        self._state = EngineState.STOPPED
        self._connection = None
        self._why_none = reason
        self._has_started.set()
        self._has_changed.notify_all()
