"""Compiles grammars off the engine's loop: two lanes with a worker process each, and a cache.

    ask -> cache -> quick lane (0.5 s) -- too slow --> patient lane (2 s) -> collect, between steps

A fast compilation never waits behind a slow one: a grammar that exceeds the quick lane's limit is
restarted in the patient lane, unless it has waited too long for that. A worker that exceeds a
limit, or dies of a grammar, is replaced; the grammar is refused, and refusals are cached too. A
lane is a thread that waits for its process; everything else here is called by the engine's own
thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from ...errors import EngineError, InvalidGrammar
from ..compiler import CompiledGrammar, prepare
from ..matcher import BoundGrammar
from ..spec import GrammarSpec
from ..vocabulary import Vocabulary
from .frames import (
    DEFAULT_GRAMMAR_TIMEOUT_S,
    ENGINE_STACK_BYTES,
    Check,
    Job,
    Refusal,
    named,
    read_frame,
    start_thread,
    write_frame,
)
from .grammar_state import GrammarFailure, PendingGrammar

log = logging.getLogger(__name__)

QUICK_LIMIT_S = 0.5  # 30 times what 95% of schemas take
GRACE_S = 2.0  # for a reply, past the time when the worker's own alarm should have ended it
START_TIMEOUT_S = 60.0  # of a worker on a very busy machine, which must compile C++ first
MAX_WAITING = 256  # pending grammars
# In both lanes' queues: what the patient lane would begin later than that has to be retried.
MAX_WAIT_S = 5.0
MAX_CACHED_BYTES = 256 * 2**20
ENTRY_BYTES = 2048  # of a cached grammar besides its tables (guess)

_Key = tuple[Hashable, GrammarSpec]  # the namespace, and its grammar


@dataclass(slots=True)
class CompilerStats:
    """Counters since the start."""

    num_hits: int = 0  # requested again, compiled or pending
    num_compiled: int = 0
    num_refused: int = 0
    compile_s: float = 0.0  # from request to collection, summed


@dataclass(slots=True, eq=False)
class _Entry:
    """A grammar that is cached or pending."""

    key: _Key
    pending: PendingGrammar = field(default_factory=PendingGrammar)
    asked_s: float = field(default_factory=time.perf_counter)
    queued_s: float = 0.0  # since when it waits
    waited_s: float = 0.0  # in total
    num_bytes: int = 0

    @property
    def spec(self) -> GrammarSpec:
        return self.key[1]


@dataclass(frozen=True, slots=True)
class _Outcome:
    """A lane's result for a grammar."""

    entry: _Entry
    result: BoundGrammar | GrammarFailure
    num_bytes: int = 0
    is_final: bool = True  # a retry would give the same
    schema: str | None = None  # see PendingGrammar


@dataclass(slots=True, eq=False)
class _Validation:
    """A text to validate; `errors` when that is done."""

    schema: str
    text: str
    on_done: Callable[[tuple[str, ...]], None]
    errors: tuple[str, ...] = ()


class GrammarCompiler:
    """Owns the compiled grammars of an engine and the processes that compile them.

    Invariant: equal specs are compiled once; the cache holds at most `max_cached_bytes` of finished
    grammars. Lifetime: until `close`; the first grammar, or `start`, starts the processes.
    """

    def __init__(
        self,
        make_vocabulary: Callable[[], Vocabulary],
        *,
        timeout_s: float = DEFAULT_GRAMMAR_TIMEOUT_S,
        max_cached_bytes: int = MAX_CACHED_BYTES,
    ) -> None:
        """`make_vocabulary` is called once, off the engine's loop, before the first grammar."""
        self.stats = CompilerStats()
        self._max_cached_bytes = max_cached_bytes
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()
        self._num_bytes = 0
        self._num_waiting = 0
        self._outcomes: deque[_Outcome | _Validation] = deque()  # appended to by the lanes
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_r, False)
        os.set_blocking(self._wake_w, False)
        bind = _Binder(make_vocabulary)
        patient = _Lane(timeout_s, bind, self._deliver, None, niceness=10)
        quick_s = min(QUICK_LIMIT_S, timeout_s)
        self._lanes = (_Lane(quick_s, bind, self._deliver, patient, niceness=0), patient)

    @property
    def is_ready(self) -> bool:
        """Whether `collect` has work."""
        return bool(self._outcomes)

    def fileno(self) -> int:
        """Readable when there is something to collect: for the poller of the engine's loop."""
        return self._wake_r

    def start(self) -> None:
        """Start the quick lane's process ahead of the first grammar."""
        self._lanes[0].start()

    def ask(self, spec: GrammarSpec, namespace: Hashable = "") -> PendingGrammar:
        """The grammar of this spec, perhaps still pending. Each namespace has its own: the latency
        of a shared one would reveal who has requested it before."""
        key = (namespace, spec)
        entry = self._entries.get(key)
        if entry is not None:
            self.stats.num_hits += 1
            self._entries.move_to_end(key)
            return entry.pending
        if self._num_waiting >= MAX_WAITING:
            message = f"{self._num_waiting} grammars wait to be compiled; try again later"
            return PendingGrammar(failure=GrammarFailure(message, EngineError.__name__))
        entry = self._entries[key] = _Entry(key)
        self._num_waiting += 1
        self._lanes[0].put(entry)
        return entry.pending

    def collect(self) -> None:
        """Deliver what the lanes have finished."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_r, 4096)
        while self._outcomes:
            outcome = self._outcomes.popleft()
            if isinstance(outcome, _Validation):
                outcome.on_done(outcome.errors)
            else:
                self._take(outcome)

    def validate(self, schema: str, text: str, on_done: Callable[[tuple[str, ...]], None]) -> None:
        """Call `on_done` with what makes `text` invalid under `schema`, from `collect`."""
        self._lanes[1].put(_Validation(schema, text, on_done))

    def describe(self) -> dict[str, Any]:
        """Counters as plain data."""
        counts = {name: getattr(self.stats, name) for name in self.stats.__slots__}
        return {**counts, "num_cached": len(self._entries), "cached_bytes": self._num_bytes}

    def close(self) -> None:
        """End the processes; pending grammars never complete."""
        for lane in self._lanes:
            lane.stop()
        for lane in self._lanes:
            lane.join()

    def _take(self, outcome: _Outcome) -> None:
        entry = outcome.entry
        self._num_waiting -= 1
        self.stats.compile_s += time.perf_counter() - entry.asked_s
        if isinstance(outcome.result, GrammarFailure):
            self.stats.num_refused += 1
            entry.pending.failure = outcome.result
        else:
            self.stats.num_compiled += 1
            entry.pending.bound, entry.pending.schema = outcome.result, outcome.schema
        if not outcome.is_final:
            del self._entries[entry.key]
            return
        entry.num_bytes = outcome.num_bytes + len(entry.spec.source) + ENTRY_BYTES
        self._num_bytes += entry.num_bytes
        self._evict()

    def _evict(self) -> None:
        """Drop the least recently used; their holders keep them."""
        for key, entry in list(self._entries.items()):
            if self._num_bytes <= self._max_cached_bytes:
                return
            if entry.pending.is_done:
                self._num_bytes -= entry.num_bytes
                del self._entries[key]

    def _deliver(self, outcome: _Outcome | _Validation) -> None:
        """Called by the lanes."""
        self._outcomes.append(outcome)
        with contextlib.suppress(BlockingIOError):  # full of earlier wake-ups
            os.write(self._wake_w, b"\0")


class _Binder:
    """Binds grammars to the vocabulary, which it builds on first use."""

    def __init__(self, make_vocabulary: Callable[[], Vocabulary]) -> None:
        self._make = make_vocabulary
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None

    def __call__(self, compiled: CompiledGrammar) -> BoundGrammar:
        return compiled.bind(self.prepared())

    def prepared(self) -> Vocabulary:
        """The vocabulary, with all that would delay the first grammar."""
        with self._lock:
            if self._vocabulary is None:
                vocabulary = self._make()
                prepare(vocabulary)
                self._vocabulary = vocabulary
        return self._vocabulary


class _WorkerLost(Exception):
    """The process has ended, and not at its limit; the message gives the cause.

    `is_of_grammar`: the grammar caused it, by running out of stack or memory where that cannot be
    caught.
    """

    def __init__(self, message: str, *, is_of_grammar: bool = False) -> None:
        super().__init__(message)
        self.is_of_grammar = is_of_grammar


class _Lane:
    """A queue of grammars, the process that compiles them, and the thread that waits for it."""

    def __init__(
        self,
        limit_s: float,
        bind: _Binder,
        deliver: Callable[[_Outcome | _Validation], None],
        patient: _Lane | None,
        *,
        niceness: int,
    ) -> None:
        """`patient`: the lane that takes over what exceeds the limit here."""
        self._limit_s = limit_s
        self._bind = bind
        self._deliver = deliver
        self._patient = patient
        self._niceness = niceness
        self._queue: queue.SimpleQueue[_Entry | _Validation | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._worker: _Worker | None = None
        self._up_since_s: float | None = None  # when its first process was ready
        self._is_closed = False

    def start(self) -> None:
        if self._thread is None:
            self._thread = start_thread(self._run, ENGINE_STACK_BYTES)

    def put(self, item: _Entry | _Validation) -> None:
        self.start()
        if isinstance(item, _Entry):
            item.queued_s = time.perf_counter()
        self._queue.put(item)

    def stop(self) -> None:
        """Stop the lane; queued grammars stay queued."""
        self._is_closed = True
        self._queue.put(None)
        if self._worker is not None:
            self._worker.kill()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join(GRACE_S)

    def _run(self) -> None:
        if self._patient is not None:
            self._prepare()
        while not self._is_closed:
            with contextlib.suppress(_WorkerLost):  # retried, and reported, when a grammar comes
                self._ready_worker()
            item = self._queue.get()
            if item is None or self._is_closed:
                break
            try:
                outcome = self._compile(item) if isinstance(item, _Entry) else self._check(item)
            except Exception as error:  # a bug of ours must not leave requests waiting forever
                log.exception("a grammar could not be compiled")
                outcome = _failed(item, f"{type(error).__name__}: {error}")
            if outcome is not None and not self._is_closed:
                self._deliver(outcome)
        if self._worker is not None:
            self._worker.end()

    def _prepare(self) -> None:
        """Before the first grammar comes; a failure here is repeated, and reported, with it."""
        try:
            self._bind.prepared()
        except Exception as error:
            log.warning("no grammars with this tokenizer: %s", error)

    def _compile(self, entry: _Entry) -> _Outcome | None:
        """None where another lane has taken over."""
        if self._has_waited_too_long(entry):
            message = f"{entry.spec.kind}: the compiler is busy with other grammars; try again"
            failure = GrammarFailure(message, EngineError.__name__)
            return _Outcome(entry, failure, is_final=False)
        try:
            reply = self._ask(Job(entry.spec, self._limit_s))
        except _WorkerLost as lost:
            kind = InvalidGrammar if lost.is_of_grammar else EngineError
            failure = GrammarFailure(f"{entry.spec.kind}: {lost}", kind.__name__)
            return _Outcome(entry, failure, is_final=lost.is_of_grammar)
        if reply is None and self._patient is not None:
            self._patient.put(entry)
            return None
        if reply is None:
            message = f"{entry.spec.kind}: compiling it took more than {self._limit_s:g} s"
            return _Outcome(entry, GrammarFailure(message, InvalidGrammar.__name__))
        compiled: CompiledGrammar | Refusal = pickle.loads(reply)
        if isinstance(compiled, Refusal):
            return _Outcome(entry, GrammarFailure(compiled.message, compiled.kind))
        return self._bound(entry, compiled, len(reply))

    def _has_waited_too_long(self, entry: _Entry) -> bool:
        """Counts only waiting for others, not the start of a lane's first process."""
        now = time.perf_counter()
        since = entry.queued_s if self._up_since_s is None else self._up_since_s
        entry.waited_s += now - max(since, entry.queued_s)
        return self._patient is None and entry.waited_s > MAX_WAIT_S

    def _check(self, item: _Validation) -> _Validation:
        try:
            reply = self._ask(Check(item.schema, item.text, self._limit_s))
        except _WorkerLost as lost:
            item.errors = (f"/: cannot be validated: {lost}",)
            return item
        late = (f"/: cannot be validated: it takes more than {self._limit_s:g} s",)
        item.errors = late if reply is None else pickle.loads(reply)
        return item

    def _ask(self, job: Job | Check) -> bytes | None:
        """See `_Worker.ask`; a worker killed from outside is replaced once."""
        try:
            return self._ready_worker().ask(job)
        except _WorkerLost as lost:
            if lost.is_of_grammar or self._is_closed:
                raise
        return self._ready_worker().ask(job)

    def _bound(self, entry: _Entry, compiled: CompiledGrammar, num_bytes: int) -> _Outcome:
        try:
            return _Outcome(entry, self._bind(compiled), num_bytes, schema=compiled.schema)
        except InvalidGrammar as error:
            return _Outcome(entry, GrammarFailure(named(entry.spec.kind, error)))

    def _ready_worker(self) -> _Worker:
        if self._worker is None or self._worker.has_ended:
            self._worker = _Worker(self._niceness)
            self._up_since_s = self._up_since_s or time.perf_counter()
        return self._worker


def _failed(item: _Entry | _Validation, message: str) -> _Outcome | _Validation:
    if isinstance(item, _Validation):
        item.errors = (f"/: cannot be validated: {message}",)
        return item
    failure = GrammarFailure(f"{item.spec.kind}: {message}", EngineError.__name__)
    return _Outcome(item, failure, is_final=False)


class _Worker:
    """A worker process. Raises _WorkerLost when it does not start."""

    def __init__(self, niceness: int) -> None:
        command = [sys.executable, "-P", "-m", "stemma.constrained.serving.worker"]
        # Reserved address space counts as memory: an arena per thread is 64 MB of it.
        single = {"MALLOC_ARENA_MAX": "1", "RAYON_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **single},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # its parent handles Ctrl-C
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        if niceness:
            os.setpriority(os.PRIO_PROCESS, self._process.pid, niceness)
        try:
            is_ready = self._answer(START_TIMEOUT_S) == b"ready"
        except TimeoutError:
            is_ready = False
        if not is_ready:
            self.end()
            raise _WorkerLost("the compiler's process does not start")

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def ask(self, job: Job | Check) -> bytes | None:
        """The reply, or None where the limit was exceeded. Raises _WorkerLost."""
        try:
            write_frame(self._input, pickle.dumps(job))
            reply = self._answer(job.limit_s + GRACE_S)
        except TimeoutError:
            self.end()
            return None
        except OSError:  # it has ended
            reply = None
        if reply is not None:
            return reply
        status = self.end()
        if status == -signal.SIGALRM:
            return None
        if status in (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS):
            message = "nested too deeply, or beyond what the compiler can take"
            raise _WorkerLost(message, is_of_grammar=True)
        raise _WorkerLost(f"the compiler's process ended (exit code {status})")

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> int:
        """The exit code; a process that still runs is killed, since it has nothing to lose."""
        if not self._is_ending():
            self._process.kill()
        status = self._process.wait()
        for stream in (self._input, self._output):
            with contextlib.suppress(OSError):
                stream.close()
        return status

    def _is_ending(self) -> bool:
        """Whether its output has ended, so that it is about to exit."""
        try:
            self._process.wait(0.2)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _answer(self, timeout_s: float) -> bytes | None:
        """A frame, or None at its output's end. Raises TimeoutError."""
        if not select.select([self._output], [], [], timeout_s)[0]:
            raise TimeoutError
        return read_frame(self._output)
