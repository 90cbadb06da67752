"""A running program as its client sees it: the results of its ops, as they come back.

Owned by the author's thread and the connection's I/O thread together; one condition guards it.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from ..errors import EngineError, InvalidProgram, ProgramError
from . import ir, wire
from .channel import Channel
from .trace import observer


class Pending:
    """The result of one op: not there, streaming, or done. Guarded by its program's condition."""

    __slots__ = (
        "branch",
        "chunks",
        "done_s",
        "is_done",
        "meta",
        "name",
        "replace",
        "seq",
        "text",
        "value",
    )

    def __init__(self, branch: int, seq: int, name: str | None) -> None:
        self.branch = branch
        self.seq = seq
        self.name = name
        self.value: Any = None
        self.text = ""  # what the op appended to its branch's text
        self.replace = False  # whether `text` is the branch's whole text so far
        self.meta: Any = {}  # a list of dicts where the value is a list of samples
        self.chunks: list[str] = []
        self.is_done = False
        self.done_s: float | None = None  # when it came, by time.perf_counter()


class Program:
    """One running program: its branches, and the results that come back for them."""

    def __init__(
        self,
        channel: Channel,
        *,
        seed: int,
        instance: int = 0,
        stream: bool = False,
        defaults: ir.GenParams | None = None,
        name: str = "program",
    ) -> None:
        """`name` is for reports."""
        self._channel = channel
        self.defaults = defaults or ir.GenParams()
        self.changed = threading.Condition()
        self.is_streaming = stream
        self.is_ended = False
        self._pending: dict[tuple[int, int], Pending] = {}
        self._errors: dict[int, tuple[int, ProgramError]] = {}  # branch -> (seq, error)
        self._seen_errors: set[int] = set()
        self._disconnect: Exception | None = None
        self._num_branches = 0
        self._is_done = False
        self.runner: int | None = None  # the thread of a streaming run's function
        self.name = name
        self.log: list[tuple[float, ir.Op]] = []  # (time.perf_counter(), op) as they were sent
        self.started_s = time.perf_counter()
        self.started_ns = time.time_ns()
        self.ended_s: float | None = None  # by time.perf_counter()
        create: dict[str, object] = {"seed": seed, "instance": instance, "stream": stream}
        self.id = channel.open_program(self, create)
        observer.program_started(self)

    @property
    def model(self) -> str:
        """The name of the model it runs on."""
        return str(self._channel.info.get("model", ""))

    # --- called by branches ----------------------------------------------------------------------

    def new_branch(self) -> int:
        """The next branch number."""
        with self.changed:
            self._num_branches += 1
            return self._num_branches - 1

    def send(self, op: ir.Op, name: str | None = None) -> Pending:
        """Send an op; the returned Pending is filled when the runtime answers."""
        pending = Pending(op.branch, op.seq, name)
        with self.changed:
            if self.is_ended:
                raise InvalidProgram("the program has ended; nothing can be appended to it")
            if not isinstance(op, ir.Text):
                self._pending[op.branch, op.seq] = pending
        self._channel.send_op(self.id, op)
        self.log.append((time.perf_counter(), op))
        return pending

    def begin_wait(self, pending: Pending) -> None:
        """Somebody waits for `pending`: have all that was appended carried out now."""
        self._channel.flush(self.id)

    def wait(self, pending: Pending) -> Pending:
        """Wait for an op's result. Raises ProgramError or EngineError."""
        self.begin_wait(pending)
        with self.changed:
            self.changed.wait_for(lambda: pending.is_done or self._failure_of(pending) is not None)
            if not pending.is_done:
                self._raise_failure(pending)
        return pending

    def wait_chunks(self, pending: Pending, num_seen: int) -> list[str]:
        """Wait for chunks after the first `num_seen`; none when the result is done."""
        self.begin_wait(pending)
        with self.changed:
            self.changed.wait_for(
                lambda: (
                    len(pending.chunks) > num_seen
                    or pending.is_done
                    or self._failure_of(pending) is not None
                )
            )
            fresh = pending.chunks[num_seen:]
            if not fresh and not pending.is_done:
                self._raise_failure(pending)
            return fresh

    def _failure_of(self, pending: Pending) -> Exception | None:
        failed = self._errors.get(pending.branch)
        if failed is not None and pending.seq >= failed[0]:
            return failed[1]
        if self._disconnect is None and self._is_done:  # refused as a whole
            refused = self._errors.get(0)
            return refused[1] if refused else EngineError("the program ended before this op")
        return self._disconnect

    def _raise_failure(self, pending: Pending) -> None:
        error = self._failure_of(pending)
        assert error is not None
        if isinstance(error, ProgramError):
            self._seen_errors.add(pending.branch)
        raise _copied(error)

    def failure_of_branch(self, branch: int) -> Exception | None:
        """The error that stopped a branch, or None. Asking counts as having seen it."""
        with self.changed:
            if branch in self._errors:
                self._seen_errors.add(branch)
                return self._errors[branch][1]
            return self._disconnect

    def announce(self) -> None:
        """Wake who iterates over a branch's text: something was appended."""
        with self.changed:
            self.changed.notify_all()

    def is_run_by_another_thread(self) -> bool:
        """Whether values may still come that the calling thread does not make itself."""
        return self.runner is not None and self.runner != threading.get_ident()

    def raise_disconnect(self) -> None:
        """Raise what ended the program as a whole, if anything did."""
        if self._disconnect is not None:
            raise _copied(self._disconnect)

    # --- the end ---------------------------------------------------------------------------------

    def end(self) -> None:
        """No op follows."""
        with self.changed:
            if self.is_ended:
                return
            self.is_ended = True
            self.changed.notify_all()
        self._channel.flush(self.id, end=True)

    def wait_done(self) -> None:
        """Wait until all branches have run; raise the first error that nobody has seen."""
        with self.changed:
            self.changed.wait_for(lambda: self._is_done or self._disconnect is not None)
            for branch, (_, error) in sorted(self._errors.items()):
                if branch not in self._seen_errors:
                    raise _copied(error)
            if not self._is_done and self._disconnect is not None:
                raise _copied(self._disconnect)

    def cancel(self) -> None:
        """Stop everything that still runs for this program."""
        with self.changed:
            self.is_ended = True
            if self._disconnect is None and not self._is_done:
                self._disconnect = EngineError("the program was cancelled")
            self.changed.notify_all()
        self._channel.close_program(self.id)
        self._note_end()

    def fail(self, error: Exception) -> None:
        """Cancel because the author's own code raised `error`; every wait raises it."""
        with self.changed:
            if not self._is_done:
                self._disconnect = error
        self.cancel()

    @property
    def is_done(self) -> bool:
        """Whether nothing more will come for this program."""
        return self._is_done or self._disconnect is not None

    # --- events (on the connection's I/O thread) -------------------------------------------------

    def handle_event(self, branch: int, seq: int, kind: str, payload: Any) -> None:
        with self.changed:
            if kind == wire.DONE:
                self._is_done = True
            elif kind == wire.FAILED:
                self._errors[branch] = (seq, _error_from(payload))
            else:
                self._fill(self._pending[branch, seq], kind, payload)
            self.changed.notify_all()
        if kind == wire.DONE:
            self._note_end()

    def _fill(self, pending: Pending, kind: str, payload: Any) -> None:
        if kind == wire.DELTA:
            pending.chunks.append(payload)
            return
        pending.value = payload.get("value")
        pending.text = payload.get("text", "")
        pending.replace = payload.get("replace", False)
        pending.meta = payload.get("meta", {})
        pending.is_done = True
        pending.done_s = time.perf_counter()

    def handle_disconnect(self, error: EngineError) -> None:
        with self.changed:
            self._disconnect = self._disconnect or error
            self.changed.notify_all()
        self._note_end()

    def _note_end(self) -> None:
        """Tell who watches, once."""
        with self.changed:
            if self.ended_s is not None:
                return
            self.ended_s = time.perf_counter()
        observer.program_ended(self)


def _error_from(payload: dict[str, Any]) -> ProgramError:
    return ProgramError(
        payload["message"],
        op=payload.get("op", ""),
        source=payload.get("source"),
        kind=payload.get("kind", "ProgramError"),
    )


def _copied(error: Exception) -> Exception:
    """A fresh exception for each raise, so that tracebacks do not pile up on one object; an
    author's own is raised as it is."""
    if type(error) is ProgramError:
        return ProgramError(error.message, op=error.op, source=error.source, kind=error.kind)
    return EngineError(str(error)) if isinstance(error, EngineError) else error
