"""A program's state as its author sees it: append expressions, read values, fork and join.

Appending never waits: it sends an op and goes on. Reading (`state["x"]`, `text()`, `sync()`) waits
until the runtime has answered, and raises what went wrong, naming the source line of the failed op.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..errors import InvalidProgram
from . import ir
from .expr import (
    Appendable,
    Expr,
    GenExpr,
    ImageExpr,
    RoleBeginExpr,
    RoleEndExpr,
    SelectExpr,
    Sum,
    TokensExpr,
    VarExpr,
    role,
)
from .forks import Forks, require_no_offsets
from .hints import HintHandle, hint
from .program import Pending, Program
from .reading import BranchReader, Message
from .scopes import PauseScope, RoleScope, VarScope
from .source_lines import source_line
from .values import Known, Piece, Span

if TYPE_CHECKING:
    from .trace.report import Report


class ProgramState(BranchReader):
    """One branch of a running program.

    `state += expr` appends; `state["x"]` waits for a value and returns it; `state.var("x")` is the
    same value without waiting, good only for appending.
    """

    def __init__(self, program: Program, parent: ProgramState | None = None) -> None:
        super().__init__(program)
        self._branch = program.new_branch()
        self._seq = 0
        self._parent = parent
        self._open_role: str | None = None
        self._is_joined = False
        self._own_vars: dict[str, Any] = {}
        if parent is not None:
            self._pieces = list(parent._pieces)
            self._vars = dict(parent._vars)
            self._messages = [message.copy() for message in parent._messages]
            self._open_role = parent._open_role
        self.ret_value: Any = None  # what the program's function returned

    def __del__(self) -> None:
        """Nobody can read this fork any more."""
        if self.__dict__.get("_parent") is not None and not self._is_joined:
            self._program.note_dropped(self._branch, self._seq)

    # --- appending -------------------------------------------------------------------------------

    def __iadd__(self, other: Appendable) -> ProgramState:
        self._append(other, source_line(sys._getframe(1)))
        return self

    def append(self, other: Appendable) -> ProgramState:
        """The same as `state += other`."""
        self._append(other, source_line(sys._getframe(1)))
        return self

    def _append(self, other: Appendable, source: str | None) -> None:
        append = _APPENDERS.get(type(other))
        if append is not None:
            append(self, other, source)
        elif isinstance(other, str):
            self._append_text(other, source)
        elif other is not None:
            raise InvalidProgram.of("state +=", other, "a string or an expression like gen(...)")

    def _append_text(self, text: str, source: str | None) -> None:
        if text:
            self._send_silent(ir.Text(self._branch, self._next(), source, text))
            self._note(text)

    def _append_sum(self, total: Sum, source: str | None) -> None:
        for item in total.items:
            self._append(item, source)

    def _append_tokens(self, ids: TokensExpr, source: str | None) -> None:
        self._note(self._send(ir.Tokens(self._branch, self._next(), source, ids.token_ids)))

    def _append_gen(self, gen: GenExpr, source: str | None) -> None:
        defaults = self._program.defaults
        params = gen.params if defaults is None else defaults.applied_to(gen.params)
        self._bind(gen.name, ir.Gen(self._branch, self._next(), source, gen.name, params))

    def _append_select(self, select: SelectExpr, source: str | None) -> None:
        name, choices, method = select.name, select.choices, select.method
        self._bind(name, ir.Select(self._branch, self._next(), source, name, choices, method))

    def _append_image(self, image: ImageExpr, source: str | None) -> None:
        raise InvalidProgram(f"image: the model {self._program.model} reads only text", "image")

    def _append_var(self, var: VarExpr, source: str | None) -> None:
        if var.program is not self._program:
            raise InvalidProgram("a var of another program cannot be appended; use its value")
        self._note(self._send(ir.Var(self._branch, self._next(), source, var.branch, var.seq)))

    def _next(self) -> int:
        """The number of this branch's next op."""
        if self._is_joined:
            raise InvalidProgram("this branch was joined; nothing can be appended to it")
        return self._seq

    def _send(self, op: ir.Op) -> Pending:
        """Send the next op; if that raises, nothing was appended."""
        pending = self._program.send(op)
        self._seq += 1
        return pending

    def _send_silent(self, op: ir.Op) -> None:
        self._program.send_silent(op)
        self._seq += 1

    def _note(self, piece: Piece) -> None:
        if self._open_role is not None:
            self._messages[-1].pieces.append(piece)
        self._pieces.append(piece)
        self._program.waiters.wake()  # who iterates over the text

    def _note_mark(self, piece: Piece) -> None:
        """A piece that is no part of a message's content."""
        self._pieces.append(piece)
        self._program.waiters.wake()

    def _bind(self, name: str, op: ir.Op) -> None:
        pending = self._send(op)
        if name:
            self._vars[name] = self._own_vars[name] = pending
        self._note(pending)

    def _begin_role(self, begin: RoleBeginExpr, source: str | None) -> None:
        name = begin.role
        if self._open_role is not None:
            raise InvalidProgram(f"{name} message begun inside a {self._open_role} message")
        self._note_mark(self._send(ir.RoleBegin(self._branch, self._next(), source, name)))
        self._open_role = name
        self._messages.append(Message(name))

    def _end_role(self, end: RoleEndExpr, source: str | None) -> None:
        if self._open_role != end.role:
            raise InvalidProgram(f"{end.role}_end() but the open message is {self._open_role}")
        self._note_mark(self._send(ir.RoleEnd(self._branch, self._next(), source)))
        self._open_role = None

    # --- roles and scopes ------------------------------------------------------------------------

    def system(self, content: Appendable = None) -> RoleScope | None:
        """`s.system("...")` appends a message; `with s.system():` opens one for the block."""
        return self._role("system", content)

    def user(self, content: Appendable = None) -> RoleScope | None:
        """`s.user("...")` appends a message; `with s.user():` opens one for the block."""
        return self._role("user", content)

    def assistant(self, content: Appendable = None) -> RoleScope | None:
        """`s.assistant(gen("x"))` appends a message; `with s.assistant():` opens one."""
        return self._role("assistant", content)

    def _role(self, name: str, content: Appendable) -> RoleScope | None:
        source = source_line(sys._getframe(2))
        if content is None:
            return RoleScope(self, name, source)
        self._append(role(name, content), source)
        return None

    def var_scope(self, name: str) -> VarScope:
        """`with s.var_scope("x"):` what is appended within is also the value `x`."""
        return VarScope(self, name)

    def _bind_span(self, name: str, start: int) -> None:
        self._vars[name] = self._own_vars[name] = Span(tuple(self._pieces), start)
        self._program.waiters.wake()

    def pause(self, expected_s: float | None = None, label: str = "") -> PauseScope:
        """`with s.pause(expected_s=2):` this branch works outside for about that long.

        The runtime is told at once: it keeps or moves the branch's KV by that. Also `async with`.
        """
        return PauseScope(self, expected_s, label, source_line(sys._getframe(1)))

    def _send_pause(self, expected_s: float | None, label: str, source: str | None) -> None:
        self._send_silent(ir.Pause(self._branch, self._next(), source, expected_s, label))
        self._program.flush()

    def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`fn(*args, **kwargs)` inside a pause: a tool, or any function; what it raises comes
        through. An async one is to be awaited in an async function, elsewhere it is run."""
        source = source_line(sys._getframe(1))
        expected_s, label = getattr(fn, "expected_s", None), getattr(fn, "__name__", "")
        pause = PauseScope(self, expected_s, label, source)
        if not inspect.iscoroutinefunction(getattr(fn, "fn", fn)):
            with pause:
                return fn(*args, **kwargs)
        called = _awaited(pause, fn, args, kwargs)
        return called if self._program.loop_thread is not None else asyncio.run(called)

    async def acall(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`call` for async functions; a plain function runs on a thread, so that others go on."""
        source = source_line(sys._getframe(1))
        expected_s, label = getattr(fn, "expected_s", None), getattr(fn, "__name__", "")
        async with PauseScope(self, expected_s, label, source):
            if inspect.iscoroutinefunction(getattr(fn, "fn", fn)):
                return await fn(*args, **kwargs)
            return await asyncio.to_thread(fn, *args, **kwargs)

    # --- values ----------------------------------------------------------------------------------

    def __setitem__(self, name: str, value: object) -> None:
        """Bind a plain value to `name`, for this branch and the forks it makes later."""
        self._vars[name] = self._own_vars[name] = Known(value)

    def set_var(self, name: str, value: object) -> None:
        """The same as `state[name] = value`."""
        self[name] = value

    def var(self, name: str) -> Expr:
        """The value called `name` as something to append, without waiting for it."""
        found = self._lookup(name)
        if isinstance(found, Pending):
            return self._var_of(found)
        if isinstance(found, Known):
            return Sum((str(found.value),))
        if isinstance(found, Span):
            return Sum(tuple(map(self._var_of_piece, found.pieces[found.start :])))
        raise InvalidProgram(f"var({name!r}) was gathered by a join and is a list; index it first")

    def _var_of(self, pending: Pending) -> VarExpr:
        return VarExpr(self._program, pending.branch, pending.seq, self)

    def _var_of_piece(self, piece: Piece) -> Expr | str:
        if isinstance(piece, str):
            return piece
        if isinstance(piece.op, ir.Tokens):
            return TokensExpr(piece.op.token_ids)
        if isinstance(piece.op, ir.Gen | ir.Select | ir.Var):
            return self._var_of(piece)
        raise InvalidProgram(f"a var of text with a {piece.op.kind} in it; use its value")

    # --- KV hints --------------------------------------------------------------------------------

    def pin(self, ttl_s: float | None = None) -> HintHandle:
        """Ask that the KV of all that this branch has is kept for `ttl_s` (None: the runtime's)."""
        return self._hint("pin", source_line(sys._getframe(1)), ttl_s=ttl_s)

    def retain(self, priority: int | None = None, ttl_s: float | None = None) -> HintHandle:
        """Ask that it is evicted after what has a lower priority, in [0, 100]."""
        source = source_line(sys._getframe(1))
        return self._hint("retain", source, ttl_s=ttl_s, priority=priority)

    def demote(self, tier: ir.Tier = "host") -> HintHandle:
        """Ask that it is moved to `tier`, "host" or "disk"."""
        return self._hint("demote", source_line(sys._getframe(1)), tier=tier)

    def prefetch(self, tier: ir.Tier = "device") -> HintHandle:
        """Ask that it is brought to `tier`, "device" or "host"."""
        return self._hint("prefetch", source_line(sys._getframe(1)), tier=tier)

    def share(self) -> HintHandle:
        """Say that others will go on from the same text."""
        return self._hint("share", source_line(sys._getframe(1)))

    def _hint(self, action: ir.HintAction, source: str | None, **options: Any) -> HintHandle:
        op = hint(self._branch, self._next(), source, action, **options)
        return HintHandle(self, self._send(op))

    # --- errors, the end -------------------------------------------------------------------------

    def error(self) -> Exception | None:
        """What stopped this branch, or None; does not wait and does not raise."""
        return self._program.failure_of_branch(self._branch)

    def end(self) -> None:
        """Say that nothing more is appended, for a program opened by hand."""
        self._program.end()

    def cancel(self) -> None:
        """Stop the whole program; reading what was not finished raises."""
        self._program.cancel()

    def report(self) -> Report:
        """What each call of the program took: times, tokens, what evicted what."""
        from .trace.report import report_of

        return report_of(self._program)

    # --- forks -----------------------------------------------------------------------------------

    def fork(
        self, size: int = 1, position_ids_offset: Sequence[int] | None = None
    ) -> Forks[ProgramState]:
        """`size` branches, each going on from here; the prefix they share is computed once.

        `position_ids_offset` is SGLang's and has no effect there; here only zeros are taken.
        """
        if not isinstance(size, int) or not 1 <= size <= 65_536:
            raise InvalidProgram.of("size", size, "an integer in [1, 65536]")
        require_no_offsets(position_ids_offset)
        return self._fork(size, source_line(sys._getframe(1)))

    def copy(self, position_ids_offset: Sequence[int] | None = None) -> ProgramState:
        """One branch going on from here. `with s.copy() as t:` joins it at the end of the block, so
        that each value made in it is a list of one on this branch, as in SGLang."""
        require_no_offsets(position_ids_offset)
        return self._fork(1, source_line(sys._getframe(1)))[0]

    def _fork(self, size: int, source: str | None) -> Forks[ProgramState]:
        seq = self._next()
        children = [ProgramState(self._program, self) for _ in range(size)]
        numbers = tuple(child._branch for child in children)
        try:
            self._send(ir.Fork(self._branch, seq, source, numbers))
        except BaseException:
            for child in children:
                child._is_joined = True  # it never began
            raise
        return Forks(self, children)

    def __enter__(self) -> ProgramState:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None and self._parent is not None and not self._is_joined:
            Forks(self._parent, [self]).join()

    def _end(self, source: str | None) -> None:
        if not self._is_joined:
            self._send_silent(ir.End(self._branch, self._next(), source))
            self._is_joined = True


async def _awaited(
    pause: PauseScope, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    async with pause:
        return await fn(*args, **kwargs)


_APPENDERS: dict[type, Callable[[ProgramState, Any, str | None], None]] = {
    str: ProgramState._append_text,
    Sum: ProgramState._append_sum,
    GenExpr: ProgramState._append_gen,
    SelectExpr: ProgramState._append_select,
    RoleBeginExpr: ProgramState._begin_role,
    RoleEndExpr: ProgramState._end_role,
    TokensExpr: ProgramState._append_tokens,
    VarExpr: ProgramState._append_var,
    ImageExpr: ProgramState._append_image,
}
