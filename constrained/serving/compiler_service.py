"""Compiles grammars off the engine's loop: two lanes with a worker process each, and a cache.

    ask -> cache -> quick lane (0.5 s) -- too slow --> patient lane (2 s) -> collect, between steps

A fast compilation never waits behind a slow one: a grammar that exceeds the quick lane's limit is
restarted in the patient lane, unless it has waited too long for that. Limits are of CPU time, so
that a busy machine changes no verdict. A worker that exceeds a limit, or dies of a grammar, is
replaced; the grammar is refused, and such refusals are cached. Failures that are not the grammar's
(a worker that was killed, or got no time to run) are not: the next request tries again. Tenants
take turns in each lane, and share how many grammars may wait. A lane is a thread that waits for
its process; everything else here is called by the engine's own thread. A grammar that only a parser
follows is then opened in a process of its own (`parsers.py`), beside all others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import selectors
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ...errors import EngineError, InvalidGrammar
from ...shared_limit import SharedLimit
from ...turn_queue import TurnQueue
from ..compiled_grammar import CompiledGrammar
from ..matcher import BoundGrammar, Path
from ..spec import Backend, GrammarSpec
from ..vocabulary import Vocabulary
from .follower import FollowedGrammar
from .frames import (
    DEFAULT_GRAMMAR_TIMEOUT_S,
    ENGINE_STACK_BYTES,
    Check,
    Job,
    Refusal,
    named,
    start_thread,
)
from .grammar_files import LONG_S, GrammarFiles, file_name
from .grammar_state import GrammarFailure, PendingGrammar
from .light_grammar import LightGrammar, OpenProcess
from .parsers import ParsedGrammar, Parsers
from .worker_process import WorkerLost, WorkerProcess

log = logging.getLogger(__name__)

QUICK_LIMIT_S = 0.5  # of CPU time: 30 times what 95% of schemas take
JOIN_S = 2.0  # for a lane's thread, once its process has been killed
MAX_WAITING = 512  # pending grammars; one tenant alone may have half
# In both lanes' queues: what the patient lane would begin later than that has to be retried.
MAX_WAIT_S = 5.0
MAX_CACHED_BYTES = 256 * 2**20
MAX_CACHED = 10_000  # grammars and refusals
ENTRY_BYTES = 4800  # of a cached grammar besides its tables (measured by a process's growth)

_Key = tuple[Hashable, GrammarSpec]  # the namespace, and its grammar


@dataclass(slots=True)
class CompilerStats:
    """Counters since the start."""

    num_hits: int = 0  # requested again, compiled or pending
    num_compiled: int = 0
    num_refused: int = 0
    num_fsm: int = 0  # of the compiled ones, by what they are matched
    num_lazy: int = 0
    num_pushdown: int = 0
    num_llguidance: int = 0
    num_outlines: int = 0
    compile_s: float = 0.0  # from request to collection, summed

    def count(self, path: Path) -> None:
        """One more that was compiled."""
        self.num_compiled += 1
        name = f"num_{path}"
        setattr(self, name, getattr(self, name) + 1)


@dataclass(slots=True, eq=False)
class _Entry:
    """A grammar that is cached or pending."""

    key: _Key
    tenant: Hashable  # who requested it first
    pending: PendingGrammar = field(default_factory=PendingGrammar)
    asked_s: float = field(default_factory=time.perf_counter)
    queued_s: float = 0.0  # since when it waits
    waited_s: float = 0.0  # in total
    num_bytes: int = 0  # when it was last counted

    @property
    def spec(self) -> GrammarSpec:
        return self.key[1]

    def count_bytes(self) -> int:
        """Count again what it holds; by how much that is more than before."""
        pending, before = self.pending, self.num_bytes
        texts = (
            self.spec.source,
            pending.schema or "",
            pending.failure and pending.failure.message,
        )
        bound = 0 if pending.bound is None else pending.bound.num_bytes
        self.num_bytes = ENTRY_BYTES + bound + sum(len(text or "") for text in texts)
        return self.num_bytes - before


@dataclass(frozen=True, slots=True)
class _Outcome:
    """A lane's result for a grammar."""

    entry: _Entry
    result: BoundGrammar | CompiledGrammar | FollowedGrammar | GrammarFailure
    is_final: bool = True  # a retry would give the same
    schema: str | None = None  # see PendingGrammar


@dataclass(slots=True, eq=False)
class _Validation:
    """A text to validate; `errors` when that is done."""

    schema: str
    text: str
    tenant: Hashable
    on_done: Callable[[tuple[str, ...]], None]
    errors: tuple[str, ...] = ()


class GrammarCompiler:
    """Owns the compiled grammars of an engine and the processes that compile them.

    Invariant: equal specs are compiled once; the cache holds at most `max_cached_bytes` of finished
    grammars, and at most `max_cached` of them. A grammar grows as outputs follow it: it is counted
    when it comes and whenever it is requested again. Lifetime: until `close`; the first grammar, or
    `start`, starts the processes.
    """

    def __init__(
        self,
        make_vocabulary: Callable[[], Vocabulary],
        *,
        timeout_s: float = DEFAULT_GRAMMAR_TIMEOUT_S,
        max_cached_bytes: int = MAX_CACHED_BYTES,
        max_cached: int = MAX_CACHED,
        backend: Backend = "stemma",
        files: GrammarFiles | None = None,
    ) -> None:
        """`make_vocabulary` is called once, off the engine's loop, before the first grammar;
        `backend`: whose compiler; `files`: where grammars are kept between runs. Raises
        MissingDependency."""
        if backend != "stemma":
            from ..backends import require_backend  # an engine without it needs none of it

            require_backend(backend)
        self.stats = CompilerStats()
        self._backend: Backend = backend
        self._max_cached_bytes = max_cached_bytes
        self._max_cached = max_cached
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()
        self._num_bytes = 0
        self._waiting = SharedLimit()  # grammars that are pending
        self._outcomes: deque[_Outcome | _Validation] = deque()  # appended to by the lanes
        self._closing = threading.Lock()
        self._is_closed = False
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_r, False)
        os.set_blocking(self._wake_w, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_r, selectors.EVENT_READ)
        vocabulary = self._vocabulary = _SharedVocabulary(make_vocabulary)
        self.parsers = Parsers(self._selector, vocabulary.prepared)
        shared = (files, self.parsers.open)
        patient = _Lane(timeout_s, vocabulary, self._deliver, None, *shared, niceness=10)
        quick_s = min(QUICK_LIMIT_S, timeout_s)
        quick = _Lane(quick_s, vocabulary, self._deliver, patient, *shared, niceness=0)
        self._lanes = (quick, patient)

    @property
    def is_ready(self) -> bool:
        """Whether `collect` has work."""
        return bool(self._outcomes) or self.parsers.is_ready

    def fileno(self) -> int:
        """Readable when there is something to collect: for the poller of the engine's loop."""
        return self._selector.fileno()

    def start(self) -> None:
        """Start the processes ahead of the first grammar."""
        self._lanes[0].start()
        self.parsers.start()

    def ask(
        self, spec: GrammarSpec, namespace: Hashable = "", tenant: Hashable = ""
    ) -> PendingGrammar:
        """The grammar of this spec, perhaps still pending. Each namespace has its own: the latency
        of a shared one would reveal who has requested it before. `tenant`: whose turn it takes."""
        key = (namespace, replace(spec, backend=self._backend))
        entry = self._entries.get(key)
        if entry is not None:
            self.stats.num_hits += 1
            self._entries.move_to_end(key)
            if entry.pending.is_done:
                self._recount(entry)
            return entry.pending
        if self._waiting.num_missing(tenant, 1, MAX_WAITING):
            return PendingGrammar(failure=self._refusal(tenant))
        entry = self._entries[key] = _Entry(key, tenant)
        self._waiting.take(tenant, 1)
        self._lanes[0].put(entry)
        return entry.pending

    def collect(self, patience_s: float = 0.0) -> None:
        """Deliver what the lanes have finished, and the parsers, for which it may wait so long."""
        self.parsers.collect(patience_s)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_r, 4096)
        while self._outcomes:
            outcome = self._outcomes.popleft()
            if isinstance(outcome, _Validation):
                outcome.on_done(outcome.errors)
            else:
                self._take(outcome)

    def validate(
        self,
        schema: str,
        text: str,
        on_done: Callable[[tuple[str, ...]], None],
        tenant: Hashable = "",
    ) -> None:
        """Call `on_done` with what makes `text` invalid under `schema`, from `collect`."""
        self._lanes[1].put(_Validation(schema, text, tenant, on_done))

    def describe(self) -> dict[str, Any]:
        """Counters as plain data."""
        counts = {name: getattr(self.stats, name) for name in self.stats.__slots__}
        return {
            "backend": self._backend,
            **counts,
            "num_cached": len(self._entries),
            "cached_bytes": self._num_bytes,
            "mask_bytes": self._vocabulary.num_mask_bytes,
            "num_parsers": len(self.parsers),
        }

    def close(self) -> None:
        """End the processes; pending grammars never complete."""
        for lane in self._lanes:
            lane.stop()
        self.parsers.close()
        for lane in self._lanes:
            lane.join()
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                self._selector.close()
                os.close(self._wake_r)
                os.close(self._wake_w)

    def _refusal(self, tenant: Hashable) -> GrammarFailure:
        own = self._waiting.used_by(tenant)
        return GrammarFailure(
            f"{self._waiting.num_used} grammars wait to be compiled, {own} of them yours, and "
            f"{MAX_WAITING} may; each may have as many as are left free; try again later",
            EngineError.__name__,
        )

    def _take(self, outcome: _Outcome) -> None:
        entry = outcome.entry
        if isinstance(outcome.result, CompiledGrammar):
            self.parsers.open(outcome.result, partial(self._take_opened, outcome))
            return
        self._waiting.give_back(entry.tenant, 1)
        self.stats.compile_s += time.perf_counter() - entry.asked_s
        if isinstance(outcome.result, GrammarFailure):
            self.stats.num_refused += 1
            entry.pending.failure = outcome.result
        else:
            self.stats.count(outcome.result.path)
            entry.pending.bound, entry.pending.schema = outcome.result, outcome.schema
        if not outcome.is_final:
            del self._entries[entry.key]
            return
        self._recount(entry)

    def _take_opened(
        self, outcome: _Outcome, opened: ParsedGrammar | InvalidGrammar | EngineError
    ) -> None:
        if isinstance(opened, ParsedGrammar):
            self._take(replace(outcome, result=opened))
            return
        message = named(outcome.entry.spec.kind, opened)
        failure = GrammarFailure(message, type(opened).__name__)
        is_final = isinstance(opened, InvalidGrammar)
        self._take(replace(outcome, result=failure, is_final=is_final))

    def _recount(self, entry: _Entry) -> None:
        """Note what an entry holds now. Drops the least recently used; their holders keep them."""
        self._num_bytes += entry.count_bytes()
        while self._num_bytes > self._max_cached_bytes or len(self._entries) > self._max_cached:
            oldest = next((e for e in self._entries.values() if e.pending.is_done), None)
            if oldest is None:
                return
            self._num_bytes -= oldest.num_bytes
            del self._entries[oldest.key]

    def _deliver(self, outcome: _Outcome | _Validation) -> None:
        """Called by the lanes."""
        self._outcomes.append(outcome)
        with self._closing, contextlib.suppress(BlockingIOError):  # full of earlier wake-ups
            if not self._is_closed:
                os.write(self._wake_w, b"\0")


class _SharedVocabulary:
    """The vocabulary, built on first use."""

    def __init__(self, make_vocabulary: Callable[[], Vocabulary]) -> None:
        self._make = make_vocabulary
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None

    def __call__(self, compiled: CompiledGrammar) -> BoundGrammar:
        return compiled.bind(self.prepared())

    @property
    def num_mask_bytes(self) -> int:
        """Of the cached masks of all grammars, kept or not."""
        return 0 if self._vocabulary is None else self._vocabulary.masks.num_bytes

    def prepared(self) -> Vocabulary:
        """The vocabulary, with all that would delay the first grammar."""
        with self._lock:
            if self._vocabulary is None:
                from ..compiler import prepare  # an engine without grammars needs none of it

                vocabulary = self._make()
                prepare(vocabulary)
                self._vocabulary = vocabulary
        return self._vocabulary


class _Lane:
    """A queue of grammars, the process that compiles them, and the thread that waits for it."""

    def __init__(
        self,
        limit_s: float,
        bind: _SharedVocabulary,
        deliver: Callable[[_Outcome | _Validation], None],
        patient: _Lane | None,
        files: GrammarFiles | None,
        open_: OpenProcess,
        *,
        niceness: int,
    ) -> None:
        """`patient`: the lane that takes over what exceeds the limit here; `open_` is
        `Parsers.open`."""
        self._files = files
        self._open = open_
        self._limit_s = limit_s
        self._bind = bind
        self._deliver = deliver
        self._patient = patient
        self._niceness = niceness
        self._queue: TurnQueue[_Entry | _Validation] = TurnQueue()
        self._thread: threading.Thread | None = None
        self._worker: WorkerProcess | None = None
        self._up_since_s: float | None = None  # when its first process was ready
        self._is_closed = False
        self._starting = threading.Lock()

    def start(self) -> None:
        """Called by any thread: the quick lane's own puts into the patient one."""
        with self._starting:
            if self._thread is None:
                self._thread = start_thread(self._run, ENGINE_STACK_BYTES)

    def put(self, item: _Entry | _Validation) -> None:
        try:
            self.start()
        except RuntimeError as error:  # the system has no thread left
            self._deliver(_failed(item, str(error)))
            return
        if isinstance(item, _Entry):
            item.queued_s = time.perf_counter()
        self._queue.put(item, item.tenant)

    def stop(self) -> None:
        """Stop the lane; queued grammars stay queued."""
        self._is_closed = True
        self._queue.close()
        if self._worker is not None:
            self._worker.kill()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        if self._patient is not None:
            self._prepare()
        while not self._is_closed:
            with contextlib.suppress(WorkerLost):  # retried, and reported, when a grammar comes
                self._ready_worker()
            item = self._queue.take()
            if item is None:
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
            return _to_be_retried(entry, "the compiler is busy with other grammars; try again")
        kept = None if self._files is None else self._files.get(self._file_name(entry))
        if kept is not None:
            return self._bound(entry, kept)
        began_s = time.perf_counter()
        try:
            reply = self._ask(Job(entry.spec, self._limit_s))
        except (WorkerLost, TimeoutError) as lost:
            if isinstance(lost, WorkerLost) and lost.is_of_grammar:
                return _refused(entry, str(lost))
            return _to_be_retried(entry, str(lost))
        if reply is None and self._patient is not None:
            self._patient.put(entry)
            return None
        if reply is None:
            return _refused(entry, f"compiling it took more than {self._limit_s:g} s of CPU time")
        compiled: CompiledGrammar | Refusal = pickle.loads(reply)
        if isinstance(compiled, Refusal):
            return _Outcome(entry, GrammarFailure(compiled.message, compiled.kind))
        if self._files is not None and time.perf_counter() > began_s + LONG_S:
            self._files.put(self._file_name(entry), reply)
        return self._bound(entry, compiled)

    def _file_name(self, entry: _Entry) -> str:
        """Of both lanes: what the quick one compiles matches the same."""
        namespace, spec = entry.key
        return file_name(spec, namespace, (self._patient or self)._limit_s)

    def _has_waited_too_long(self, entry: _Entry) -> bool:
        """Counts only waiting for others, not the start of a lane's first process."""
        now = time.perf_counter()
        since = entry.queued_s if self._up_since_s is None else self._up_since_s
        entry.waited_s += now - max(since, entry.queued_s)
        return self._patient is None and entry.waited_s > MAX_WAIT_S

    def _check(self, item: _Validation) -> _Validation:
        try:
            reply = self._ask(Check(item.schema, item.text, self._limit_s))
        except (WorkerLost, TimeoutError) as lost:
            item.errors = (f"/: cannot be validated: {lost}",)
            return item
        late = (f"/: cannot be validated: it takes more than {self._limit_s:g} s of CPU time",)
        item.errors = late if reply is None else pickle.loads(reply)
        return item

    def _ask(self, job: Job | Check) -> bytes | None:
        """See `WorkerProcess.ask`; a worker killed or stopped from outside is replaced once."""
        try:
            return self._ready_worker().ask(job)
        except WorkerLost as lost:
            if lost.is_of_grammar or self._is_closed:
                raise
        return self._ready_worker().ask(job)

    def _bound(self, entry: _Entry, compiled: CompiledGrammar) -> _Outcome:
        """What is no automaton is bound in a process of its own, by `Parsers.open`; what may take
        little here, first."""
        if compiled.may_be_light:
            with contextlib.suppress(InvalidGrammar):  # its process says why, or takes longer
                vocabulary = self._bind.prepared()
                bound = compiled.bind_light(vocabulary)
                light = LightGrammar(compiled, bound, vocabulary.num_words, self._open)
                return _Outcome(entry, light, schema=compiled.schema)
        if compiled.dfa is None:
            return _Outcome(entry, compiled, schema=compiled.schema)
        try:
            return _Outcome(entry, self._bind(compiled), schema=compiled.schema)
        except InvalidGrammar as error:
            return _Outcome(entry, GrammarFailure(named(entry.spec.kind, error)))

    def _ready_worker(self) -> WorkerProcess:
        if self._worker is None or self._worker.has_ended:
            self._worker = WorkerProcess(self._niceness)
            self._up_since_s = self._up_since_s or time.perf_counter()
        return self._worker


def _failed(item: _Entry | _Validation, message: str) -> _Outcome | _Validation:
    if isinstance(item, _Validation):
        item.errors = (f"/: cannot be validated: {message}",)
        return item
    return _to_be_retried(item, message)


def _refused(entry: _Entry, message: str) -> _Outcome:
    """By a property of the grammar, whoever asks and when."""
    failure = GrammarFailure(f"{entry.spec.kind}: {message}", InvalidGrammar.__name__)
    return _Outcome(entry, failure)


def _to_be_retried(entry: _Entry, message: str) -> _Outcome:
    """A failure that says nothing of the grammar."""
    failure = GrammarFailure(f"{entry.spec.kind}: {message}", EngineError.__name__)
    return _Outcome(entry, failure, is_final=False)
