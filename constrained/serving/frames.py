"""The messages between an engine and its grammar workers, and the stack sizes of both:
llguidance's parser of grammars recurses natively, as deep as they nest.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass

from ..spec import GrammarSpec

# A worker tries what an engine binds, on a smaller stack: what does not fit ends only the
# worker. 200 levels of a schema need 3 MB (measured: 300 fit into 4 MB, 150 into 2 MB).
WORKER_STACK_BYTES = 4 * 2**20
ENGINE_STACK_BYTES = 4 * WORKER_STACK_BYTES

DEFAULT_GRAMMAR_TIMEOUT_S = 2.0  # of CPU time, for one grammar

# Where a process runs out of stack, or of memory in native code.
CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)

_stack_size_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Job:
    """A grammar to compile within `limit_s` seconds of CPU time."""

    spec: GrammarSpec
    limit_s: float


@dataclass(frozen=True, slots=True)
class Check:
    """A text to validate against a JSON Schema, both as text, within `limit_s` of CPU time."""

    schema: str
    text: str
    limit_s: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why it cannot be compiled; `kind` names the class of the error."""

    message: str
    kind: str


def named(kind: str, error: Exception) -> str:
    """An error's message, preceded by its subject."""
    message = str(error)
    return message if message.startswith(kind) else f"{kind}: {message}"


def start_thread(run: Callable[[], None], stack_bytes: int) -> threading.Thread:
    """A daemon with this stack size whatever `ulimit -s` says."""
    thread = threading.Thread(target=run, name="stemma-grammar", daemon=True)
    with _stack_size_lock:  # the setting applies to all threads that start
        before = threading.stack_size(stack_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return thread
