"""`python -m stemma.constrained.serving.worker`: compiles grammars, validates texts, within limits.

Started and read by `worker_process.py`; exchanges frames over standard input and output. A
grammar may trigger its compiler's worst case, so the kernel bounds CPU time, memory and stack: an
unhandled alarm ends the process, as does a full stack; a full address space ends the compilation.
When its parent ends, its input ends, and so does it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import signal
import sys

from ...errors import InvalidGrammar, UnsupportedSchema
from ...native_panic import panic_raises
from ...piped_process import read_frame, write_frame
from ..compiled_grammar import CompiledGrammar
from ..compiler import Limits, compile_grammar
from ..native.bindings import why_not_native
from ..regular import letter_case, unicode_classes

# Imported before the limits are set: the compiler itself imports it only for a schema.
from ..schema import schema_grammar  # noqa: F401
from .frames import (
    WORKER_STACK_BYTES,
    Check,
    Job,
    Refusal,
    named,
    start_thread,
)

MAX_EXTRA_BYTES = 500 * 2**20  # beyond what importing the compiler maps
# Past this growth a worker is replaced, so that one grammar's leftovers do not take the next one's
# memory.
MAX_GROWTH_BYTES = 150 * 2**20
AUTOMATON_SHARE = 0.5  # of the time; the rest is for the parser that takes over


def main() -> int:
    """Serve until standard input ends."""
    start_thread(_serve, WORKER_STACK_BYTES).join()
    return 0


def _serve() -> None:
    with contextlib.suppress(BrokenPipeError):  # the engine has died, and nobody reads replies
        _reply_to_jobs()


def _reply_to_jobs() -> None:
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # library output must not come between frames
    _prepare()
    num_bytes = _mapped_bytes()
    if num_bytes is not None:
        limit = num_bytes + MAX_EXTRA_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    write_frame(replies, b"ready")
    while (frame := read_frame(sys.stdin.buffer)) is not None:
        job: Job | Check = pickle.loads(frame)
        signal.setitimer(signal.ITIMER_PROF, job.limit_s)
        try:
            reply = pickle.dumps(_compile(job) if isinstance(job, Job) else _errors(job))
        except MemoryError:
            reply = pickle.dumps(_too_much_memory(job))
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_frame(replies, reply)
        if num_bytes is not None and (_mapped_bytes() or 0) > num_bytes + MAX_GROWTH_BYTES:
            break


def _prepare() -> None:
    """What would otherwise be charged to the first grammar that needs it."""
    why_not_native()  # on a fresh machine it compiles C++
    unicode_classes.prepare()
    letter_case.case_variants()


def _compile(job: Job) -> CompiledGrammar | Refusal:
    kind = job.spec.kind
    try:
        return _compiled(job)
    except UnsupportedSchema as error:
        return Refusal(named(kind, error), UnsupportedSchema.__name__)
    except InvalidGrammar as error:  # including its subclasses
        return Refusal(named(kind, error), InvalidGrammar.__name__)
    except RecursionError:
        return Refusal(f"{kind}: nested too deeply", InvalidGrammar.__name__)
    except MemoryError:
        raise
    except Exception as error:
        message = f"{kind}: cannot be compiled: {type(error).__name__}: {error}"
        return Refusal(message, InvalidGrammar.__name__)


@panic_raises(InvalidGrammar, "its parser failed")
def _compiled(job: Job) -> CompiledGrammar:
    return compile_grammar(job.spec, Limits(max_cpu_s=job.limit_s * AUTOMATON_SHARE))


def _errors(check: Check) -> tuple[str, ...]:
    from ..validation import validation_errors  # import takes 0.1 s, and few workers need it

    try:
        return validation_errors(check.schema, check.text)
    except Exception as error:
        return (f"/: cannot be validated: {type(error).__name__}: {error}",)


def _too_much_memory(job: Job | Check) -> Refusal | tuple[str, ...]:
    limit = f"more than {MAX_EXTRA_BYTES >> 20} MB"
    if isinstance(job, Check):
        return (f"/: cannot be validated: it takes {limit}",)
    return Refusal(f"{job.spec.kind}: compiling it takes {limit}", InvalidGrammar.__name__)


def _mapped_bytes() -> int | None:
    """None where the system does not report it (macOS): only time is bounded there."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[0]) * resource.getpagesize()
    except OSError:
        return None


if __name__ == "__main__":
    sys.exit(main())
