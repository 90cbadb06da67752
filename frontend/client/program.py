"""A running program as its client sees it: the results of its ops, as they come back.

The author's thread sends ops, the channel's thread fills in results and wakes those who wait.
A result is marked done last, so that reading needs no lock.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from ...errors import EngineError, InvalidProgram, ProgramError
from ..protocol import ir, wire
from .channel import Channel
from .early_calls import EarlyCalls
from .streamed import Streamed
from .waiting import Condition, Waiters


class Pending:
    """The result of one op: absent, streaming, or done."""

    __slots__ = (
        "_typed",
        "done_s",
        "is_done",
        "meta",
        "more_meta",
        "on_likely",
        "op",
        "read",
        "replace",
        "streamed",
        "text",
        "value",
    )

    def __init__(self, op: ir.Op) -> None:
        self.op = op
        self.value: Any = None
        self.text = ""  # what the op appended to its branch's text
        self.replace = False  # whether `text` is the branch's whole text so far
        self.meta: Any = {}  # a list of dicts where the value is a list of samples
        self.more_meta: Mapping[str, Any] = {}  # known here only
        self.streamed: Streamed | None = None
        self.is_done = False
        self.done_s: float | None = None  # when it came, by time.perf_counter()
        self.read: Callable[[str], Any] | None = None  # a text as the value that it stands for
        self.on_likely: Callable[[str], None] | None = None  # told what the text probably will be
        self._typed: Any = None  # `value` as read

    @property
    def chunks(self) -> Sequence[str]:
        """What was streamed of its text."""
        return () if self.streamed is None else self.streamed.chunks

    @property
    def branch(self) -> int:
        return self.op.branch

    @property
    def seq(self) -> int:
        return self.op.seq

    @property
    def name(self) -> str | None:
        return getattr(self.op, "name", None) or None

    @property
    def typed_value(self) -> Any:
        """`value` as `read` has it. Raises ProgramError of kind "InvalidOutput" for a text that
        stands for none, such as one that was cut off."""
        if self.read is None:
            return self.value
        if self._typed is None:
            texts = self.value if isinstance(self.value, list) else [self.value]
            typed = [self._read(text) for text in texts]
            self._typed = typed if isinstance(self.value, list) else typed[0]
        return self._typed

    def _read(self, text: str) -> Any:
        assert self.read is not None
        try:
            return self.read(text)
        except ValueError as error:
            metas = self.meta if isinstance(self.meta, list) else [self.meta]
            is_cut = any(meta.get("finish_reason") == "length" for meta in metas)
            cut = (
                " (it was cut off: more max_tokens, or a longer context, may do)" if is_cut else ""
            )
            message = f"the output {text[:200]!r} cannot be read{cut}: {error}"
            source = self.op.source
            raise ProgramError(
                message, op=self.name or "gen", source=source, kind="InvalidOutput"
            ) from error


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of prompts, those of them that were cached, and tokens generated."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(
            self.prompt + other.prompt,
            self.cached + other.cached,
            self.completion + other.completion,
        )


class Defaults:
    """Default parameters of a run's gens, for what they leave open; shared by a whole batch."""

    def __init__(self, params: ir.GenParams) -> None:
        self.params = params
        self._merged: dict[int, tuple[ir.GenParams, ir.GenParams]] = {}  # by id of the first

    def applied_to(self, params: ir.GenParams) -> ir.GenParams:
        """`params` with open fields filled in; the same object for the same input."""
        found = self._merged.get(id(params))
        if found is None:
            if len(self._merged) >= 256:
                self._merged.clear()
            found = self._merged[id(params)] = (params, params.with_defaults(self.params))
        return found[1]


class Relay(Protocol):
    """Runs other programs on this thread while it waits."""

    def released(self) -> AbstractContextManager[None]:
        """For the duration of a wait."""


@dataclass(frozen=True, slots=True)
class LostOps:
    """The ops that a branch lost when one failed and it went on: they count as never appended."""

    first: int  # that one, or where the message around it begins
    end: int
    failed: int
    error: ProgramError


class Program:
    """One running program: its branches and their results."""

    def __init__(
        self,
        channel: Channel,
        *,
        seed: int,
        instance: int = 0,
        stream: bool = False,
        defaults: Defaults | None = None,
        name: str = "program",
        num_api_spec_tokens: int | None = None,
        lora_path: str | None = None,
    ) -> None:
        """`name` is for reports. `num_api_spec_tokens` only matters to a channel that asks a server
        call by call; the result is the same without. `lora_path` names the default adapter of its
        calls."""
        self._channel = channel
        self.defaults = defaults
        self.name = name
        self.is_streaming = stream
        self.is_ended = False
        self.log: list[tuple[float, ir.Op]] = []  # (time.perf_counter(), op) as they were sent
        self.started_s = time.perf_counter()
        self.started_ns = time.time_ns()
        self.ended_s: float | None = None  # by time.perf_counter()
        self.on_end: Callable[[Program], None] | None = None  # called at its end, perhaps twice
        self.waiters = Waiters()
        self.early_calls = EarlyCalls()
        self._pending: dict[tuple[int, int], Pending] = {}
        self._errors: dict[int, tuple[int, ProgramError]] = {}  # branch -> (seq, error)
        self._lost: dict[int, list[LostOps]] = {}  # by branch, of failures that it went on from
        self._seen_errors: set[int] = set()
        self._caught: set[int] = set()  # branches whose failure the program's function has seen
        self._dropped: deque[tuple[int, int]] = deque()
        self._num_waits = 0  # of the program's function
        self._disconnect: Exception | None = None
        self._branches = itertools.count()
        self._is_done = False
        self._is_cancelled = False
        self.runner: object = None  # of a streaming run's function: its thread's ident or its task
        self.loop_thread: int | None = None  # where an async function runs: it must not wait there
        self.relay: Relay | None = None
        create: dict[str, object] = {"seed": seed, "instance": instance, "stream": stream}
        if stream:
            create["token_ids"] = True  # so that each chunk's tokens can be counted
        if num_api_spec_tokens is not None:
            create["num_api_spec_tokens"] = num_api_spec_tokens
        if lora_path is not None:
            create["lora_path"] = lora_path
        self.id = channel.open_program(self, create)

    @property
    def info(self) -> Mapping[str, Any]:
        """What the runtime says of itself and the model."""
        return self._channel.info

    @property
    def model(self) -> str:
        """The name of the model it runs on."""
        return str(self.info.get("model", ""))

    def token_counts(self) -> TokenCounts:
        """What its calls have taken that are done, in all branches."""
        counts = TokenCounts()
        for pending in list(self._pending.values()):
            metas = pending.meta if isinstance(pending.meta, list) else [pending.meta]
            for meta in metas:
                names = ("prompt_tokens", "cached_tokens", "completion_tokens")
                counts += TokenCounts(*(meta.get(name) or 0 for name in names))
        return counts

    # --- called by branches ----------------------------------------------------------------------

    def new_branch(self) -> int:
        """The next branch number."""
        return next(self._branches)

    def send(self, op: ir.Op, on_likely: Callable[[str], None] | None = None) -> Pending:
        """Send an op; the returned Pending is filled when the result arrives. `on_likely`: called
        on the connection's thread with what a gen that foretells probably will say."""
        if self._dropped:
            self._send_dropped()
        self._require_open()
        pending = self._pending[op.branch, op.seq] = Pending(op)
        pending.on_likely = on_likely
        try:
            self._channel.send_op(self.id, op)
        except BaseException:
            del self._pending[op.branch, op.seq]
            raise
        self.log.append((time.perf_counter(), op))
        return pending

    def send_silent(self, op: ir.Op) -> None:
        """Send an op without a result: a text, a pause, an end."""
        if self._dropped:
            self._send_dropped()
        self._require_open()
        self._channel.send_op(self.id, op)
        self.log.append((time.perf_counter(), op))

    def _require_open(self) -> None:
        if self.is_ended:
            self.raise_disconnect()
            raise InvalidProgram("the program has ended; nothing can be appended to it")

    def note_dropped(self, branch: int, seq: int) -> None:
        """`branch` can no longer be read; its log ended before `seq`.

        Safe in a finalizer, on any thread: it takes no lock. The runtime is notified with the next
        op or wait, or at once while the function waits; branches that go with the end of the
        function are not dropped, so none of their errors is lost.
        """
        self._dropped.append((branch, seq))
        if self._num_waits:  # checked after the append: a wait that begins now sees it
            self._channel.call_soon(partial(self._send_dropped_one, (branch, seq)))

    def _send_dropped(self) -> None:
        while not self.is_ended:
            try:
                branch, seq = self._dropped.popleft()
            except IndexError:  # all sent, perhaps by another thread
                return
            self.drop(branch, seq)

    def _send_dropped_one(self, dropped: tuple[int, int]) -> None:
        """Send only this one: the function may have gone on, and branches left at its end stay."""
        try:
            self._dropped.remove(dropped)
        except ValueError:  # sent meanwhile
            return
        if not self.is_ended:
            self.drop(*dropped)
            self._channel.flush(self.id)

    def drop(self, branch: int, seq: int) -> None:
        """Nobody reads this branch any more, whose log ended before `seq`."""
        self._seen_errors.add(branch)
        op = ir.Drop(branch, seq, None)
        try:
            self._channel.send_op(self.id, op)
        except EngineError:  # the next append or wait raises it
            return
        self.log.append((time.perf_counter(), op))

    def flush(self) -> None:
        """Run now all that was appended."""
        if self._dropped:
            self._send_dropped()
        self._channel.flush(self.id)

    # --- waiting ---------------------------------------------------------------------------------

    def begin_wait(self, pending: Pending | None) -> None:
        """A wait for `pending` begins, or for the end."""
        self.flush()

    def wait(self, pending: Pending) -> Pending:
        """Wait for an op's result. Raises ProgramError or EngineError."""
        if not pending.is_done:
            self._refuse_to_stop_a_loop()  # first: what is not sent has no result in between
            self.begin_wait(pending)
            self.wait_until(lambda: self.is_settled(pending))
        return self._checked(pending)

    async def wait_async(self, pending: Pending) -> Pending:
        """The same for a coroutine."""
        if not pending.is_done:
            self.begin_wait(pending)
            with self.released():
                await self.waiters.wait_async(lambda: self.is_settled(pending))
        return self._checked(pending)

    def wait_chunks(self, pending: Pending, num_seen: int) -> Sequence[str]:
        """Wait for chunks after the first `num_seen`; none when the result is done."""
        if not self._has_chunks(pending, num_seen):
            self._refuse_to_stop_a_loop()
            self.begin_wait(pending)
            self.wait_until(lambda: self._has_chunks(pending, num_seen))
        return self._fresh_chunks(pending, num_seen)

    async def wait_chunks_async(self, pending: Pending, num_seen: int) -> Sequence[str]:
        """The same for a coroutine."""
        if not self._has_chunks(pending, num_seen):
            self.begin_wait(pending)
            with self.released():
                await self.waiters.wait_async(lambda: self._has_chunks(pending, num_seen))
        return self._fresh_chunks(pending, num_seen)

    def wait_done(self) -> None:
        """Wait until all branches have run; raise the first error that was not seen yet."""
        if not self.is_done:
            self.wait_until(lambda: self.is_done)
        self._raise_unseen()

    async def wait_done_async(self) -> None:
        """The same for a coroutine."""
        if not self.is_done:
            await self.waiters.wait_async(lambda: self.is_done)
        self._raise_unseen()

    def wait_until(self, condition: Condition) -> None:
        """Wait on this thread. Raises InvalidProgram where that would stop an event loop."""
        if condition():
            return
        self._refuse_to_stop_a_loop()
        with self.released():
            self.waiters.wait(condition)

    def _refuse_to_stop_a_loop(self) -> None:
        if self.loop_thread == threading.get_ident():
            raise InvalidProgram(
                "an async function must not wait like this, all others would wait with it: "
                "await s.aget(name), s.atext(), s.adone(), or iterate over s.text_async_iter()"
            )

    @contextmanager
    def released(self) -> Iterator[None]:
        """For the time in which this program's function only waits: others run meanwhile, and forks
        that can no longer be read are dropped at once."""
        with nullcontext() if self.relay is None else self.relay.released():
            if self.is_run_elsewhere():  # a reader waits, not the function
                yield
                return
            with self.waiters.lock:
                self._num_waits += 1
            try:
                if self._dropped:  # between the last flush and here
                    self.flush()
                yield
            finally:
                with self.waiters.lock:
                    self._num_waits -= 1

    def is_run_elsewhere(self) -> bool:
        """Whether values may still come from a function on another thread or task."""
        runner = self.runner
        if isinstance(runner, asyncio.Task):
            return runner is not _current_task()
        return runner is not None and runner != threading.get_ident()

    def is_settled(self, pending: Pending) -> bool:
        """Whether `wait` for it would return or raise at once."""
        return pending.is_done or self._failure_of(pending) is not None

    def _has_chunks(self, pending: Pending, num_seen: int) -> bool:
        return len(pending.chunks) > num_seen or self.is_settled(pending)

    def _fresh_chunks(self, pending: Pending, num_seen: int) -> Sequence[str]:
        is_done = pending.is_done  # read before the chunks, so that none is lost
        fresh = pending.chunks[num_seen:]
        if not fresh and not is_done:
            self._checked(pending)
        return fresh

    def _checked(self, pending: Pending) -> Pending:
        if not pending.is_done:
            self._raise_failure(pending)
        return pending

    # --- failure ---------------------------------------------------------------------------------

    def _failure_of(self, pending: Pending) -> Exception | None:
        op = pending.op
        failed = self._errors.get(op.branch)  # first: the branch may go on meanwhile
        if failed is not None and op.seq >= failed[0]:
            return failed[1]
        if op.branch in self._lost and (lost := self._lost_with(op.branch, op.seq)) is not None:
            return lost.error
        if self._disconnect is None and self._is_done:  # refused as a whole
            refused = self._errors.get(0)
            return refused[1] if refused else EngineError("the program ended before this op")
        return self._disconnect

    def _raise_failure(self, pending: Pending) -> None:
        error = self._failure_of(pending)
        assert error is not None
        if isinstance(error, ProgramError):
            self._note_seen(pending.op.branch)
        raise _copied(error)

    def _note_seen(self, branch: int) -> None:
        """A failed join also marks its branches' errors as seen."""
        self._seen_errors.add(branch)
        seq, _ = self._errors.get(branch, (-1, None))
        if seq >= 0 and not self.is_run_elsewhere():
            self._caught.add(branch)
        failed = self._pending.get((branch, seq))
        if failed is not None and isinstance(failed.op, ir.Join):
            self._seen_errors.update(failed.op.children)

    def ignore_errors_of(self, branches: tuple[int, ...]) -> None:
        """Some of these branches may fail without `wait_done` raising it."""
        self._seen_errors.update(branches)

    def failure_of_branch(self, branch: int) -> Exception | None:
        """The error that stopped a branch, or None. Asking counts as having seen it."""
        if branch in self._errors:
            self._note_seen(branch)
            return self._errors[branch][1]
        return self._disconnect

    def has_caught(self, branch: int) -> bool:
        """Whether the branch failed, and the program's function knows."""
        return branch in self._caught

    def first_lost(self, branch: int) -> int:
        """From where on a failed branch loses what was appended if it goes on: from the op that
        failed; where that is in a message that was closed since, from the message's begin. Raises
        where the program has ended, as an append does."""
        self._require_open()
        failed, begin = self._errors[branch][0], None
        for _, op in self.log:
            if op.branch != branch or not isinstance(op, ir.RoleBegin | ir.RoleEnd):
                continue
            if op.seq >= failed:
                return begin if begin is not None and isinstance(op, ir.RoleEnd) else failed
            is_begin = isinstance(op, ir.RoleBegin) and self._lost_with(branch, op.seq) is None
            begin = op.seq if is_begin else None
        return failed

    def resume(self, branch: int, seq: int, first_lost: int) -> None:
        """A failed branch goes on, with op `seq`. Raises what `send` raises."""
        failed, error = self._errors[branch]
        self._lost.setdefault(branch, []).append(LostOps(first_lost, seq, failed, error))
        del self._errors[branch]  # after that, see `_failure_of`
        self._caught.discard(branch)
        self._seen_errors.discard(branch)
        self.waiters.wake()  # who waits for an op of the message that is dropped
        self.send_silent(ir.Resume(branch, seq, None, drops_message=first_lost < failed))

    def lost_with(self, pending: Pending) -> LostOps | None:
        """The ops that its branch went on without, if it is one of them."""
        return self._lost_with(pending.branch, pending.seq)

    def failed_ops(self) -> dict[tuple[int, int], ProgramError]:
        """The errors so far by (branch, seq) of the op, also those that were gone on from."""
        failed = {(branch, seq): error for branch, (seq, error) in self._errors.items()}
        for branch, lost in self._lost.items():
            failed.update({(branch, ops.failed): ops.error for ops in lost})
        return failed

    def _lost_with(self, branch: int, seq: int) -> LostOps | None:
        return next((ops for ops in self._lost.get(branch, ()) if ops.first <= seq < ops.end), None)

    def raise_disconnect(self) -> None:
        """Raise what ended the program as a whole, if anything did."""
        if self._disconnect is not None:
            raise _copied(self._disconnect)

    def _raise_unseen(self) -> None:
        if self._errors:
            for branch, (_, error) in sorted(self._errors.items()):
                if branch not in self._seen_errors and error.kind != wire.STOPPED:
                    raise _copied(error)
        if not self._is_done:
            self.raise_disconnect()

    # --- the end ---------------------------------------------------------------------------------

    def end(self) -> None:
        """No op follows."""
        if self.is_ended:
            return
        self.is_ended = True
        self.waiters.wake()
        self._channel.flush(self.id, end=True)

    def cancel(self) -> None:
        """Stop everything that still runs for this program."""
        if self._is_cancelled:
            return
        self._is_cancelled = self.is_ended = True
        if self._disconnect is None and not self._is_done:
            self._disconnect = EngineError("the program was cancelled")
        self._note_end()
        self._channel.close_program(self.id)

    def cancel_soon(self) -> None:
        """`cancel` for a finalizer: it takes no lock, a thread of the channel's does the work."""
        if not self.is_done:
            self.call_soon(self.cancel)

    def call_soon(self, work: Callable[[], None]) -> None:
        """Run `work` on one of the channel's threads; takes no lock."""
        self._channel.call_soon(work)

    def fail(self, error: Exception) -> None:
        """Cancel because of `error`, of the author's code or a time limit: every wait raises it,
        unless the program had failed before, of which this may be a consequence."""
        if not self._is_done:
            self._disconnect = self._disconnect or error
        self.cancel()

    @property
    def is_done(self) -> bool:
        """Whether nothing more will come for this program."""
        return self._is_done or self._disconnect is not None

    # --- events (on the channel's thread) --------------------------------------------------------

    def handle_event(self, branch: int, seq: int, kind: str, payload: Any) -> None:
        if kind == wire.DONE:
            self._is_done = True
            self._note_end()
            return
        if kind == wire.FAILED:
            self._errors[branch] = (seq, _error_from(payload))
        elif kind == wire.LIKELY:
            told = self._pending[branch, seq].on_likely
            if told is not None:
                told(payload["text"])
            return
        elif kind == wire.DELTA:
            pending = self._pending[branch, seq]
            if pending.streamed is None:
                pending.streamed = Streamed()
            pending.streamed.add(payload)
        else:
            _fill(self._pending[branch, seq], payload)
        self.waiters.wake()

    def handle_disconnect(self, error: EngineError) -> None:
        self._disconnect = self._disconnect or error
        self._note_end()

    def _note_end(self) -> None:
        if self.ended_s is None:
            self.ended_s = time.perf_counter()
        self.early_calls.close()
        on_end = self.on_end
        if on_end is not None:
            on_end(self)
        self.waiters.wake()


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs on this thread
        return None


def _fill(pending: Pending, payload: dict[str, Any]) -> None:
    pending.value = payload.get("value")
    pending.text = payload.get("text", "")
    pending.replace = payload.get("replace", False)
    pending.meta = payload.get("meta", {})
    pending.done_s = time.perf_counter()
    pending.is_done = True


def _error_from(payload: dict[str, Any]) -> ProgramError:
    return ProgramError(
        payload["message"],
        op=payload.get("op", ""),
        source=payload.get("source"),
        kind=payload.get("kind", "ProgramError"),
    )


def _copied(error: Exception) -> Exception:
    """A fresh exception for each raise, so that tracebacks do not pile up on one object; an
    exception of the author's code is raised as it is."""
    if type(error) is ProgramError:
        return ProgramError(error.message, op=error.op, source=error.source, kind=error.kind)
    return EngineError(str(error)) if isinstance(error, EngineError) else error
