"""A program's state as its author sees it: append expressions, read values, fork and join.

Appending never waits: it sends an op and returns. Reading (`state["x"]`, `text()`, `sync()`) waits
for the runtime's result, and raises failures with the source line of the failed op.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from ...errors import InvalidProgram
from ..client.early_calls import EarlyCall, EarlyCalls
from ..client.program import Pending, Program
from ..client.values import Known, Piece, Span
from ..protocol import ir
from ..protocol.kv_policy import KVPolicy
from .beside_loop import run_beside
from .checking import checked_steps
from .deciding import decision_steps
from .early import expected_s, take_early, wait_early, wait_early_async
from .expr import Appendable, Expr, GenExpr, SelectExpr, Sum, TokensExpr, VarExpr, role
from .forks import FORK_SIZES, Forks, require_no_offsets
from .hint_handle import HintHandle, hint
from .scopes import PauseScope, RoleScope, VarScope
from .showing import html_of, repr_of
from .source_lines import source_line
from .waits import Steps, carry_out, carry_out_async
from .writing import BranchWriter

if TYPE_CHECKING:
    from ..trace.report import Report


class ProgramState(BranchWriter):
    """One branch of a running program.

    `state += expr` appends; `state["x"]` waits for a value and returns it; `state.var("x")` is the
    same value without waiting, usable only for appending.
    """

    _parent: ProgramState | None = None  # for the finalizer of a half-constructed state

    def __init__(self, program: Program, parent: ProgramState | None = None) -> None:
        super().__init__(program, parent)
        self._parent = parent
        self.ret_value: Any = None  # what the program's function returned

    def __del__(self) -> None:
        """This fork can no longer be read."""
        if self._parent is not None and not self._is_joined:
            self._program.note_dropped(self._branch, self._seq)

    def __reduce__(self) -> NoReturn:
        """Neither `pickle` nor `copy` makes another one: a branch is written from one place."""
        raise TypeError(
            "a state cannot be pickled, nor copied by `copy`: it belongs to its program's "
            'connection. Take what it has, as in state["x"], state.text() or state.messages(); to '
            "go on from here, state.fork() or state.copy()"
        )

    def __str__(self) -> str:
        """The same as `text()`, which waits: what `f"{state}"` writes."""
        return self.text()

    def __repr__(self) -> str:
        """What its text is so far; it does not wait."""
        return repr_of(self._pieces, self.names())

    def _repr_html_(self) -> str:
        """For notebooks; it does not wait."""
        return html_of(self._pieces)

    def __format__(self, spec: str) -> str:
        return format(self.text(), spec)

    # --- appending -------------------------------------------------------------------------------

    def __iadd__(self, other: Appendable) -> ProgramState:
        self._append(other, source_line(sys._getframe(1)))
        return self

    def append(self, other: Appendable) -> ProgramState:
        """The same as `state += other`."""
        self._append(other, source_line(sys._getframe(1)))
        return self

    async def aappend(self, other: Appendable) -> ProgramState:
        """`append` for async functions: awaits gens with `validate` or `retries`, and selects that
        a `choices_method` of one's own decides."""
        source = source_line(sys._getframe(1))
        for item in other.items if isinstance(other, Sum) else (other,):
            if isinstance(item, GenExpr | SelectExpr) and _waits(item):
                await carry_out_async(self._program, self._steps(item, source))
            else:
                self._append(item, source)
        return self

    def _append_waiting(self, asked: GenExpr | SelectExpr, source: str | None) -> None:
        if self._program.loop_thread == threading.get_ident():
            op, field = ("gen", "validate") if isinstance(asked, GenExpr) else _SELECT
            raise InvalidProgram(
                f"{op}: with {field} it waits, which would stop the event loop: "
                "await s.aappend(...) in an async function",
                field,
            )
        carry_out(self._program, self._steps(asked, source))

    def _steps(self, asked: GenExpr | SelectExpr, source: str | None) -> Steps:
        fork = partial(self._fork, 1, source)
        if isinstance(asked, GenExpr):
            return checked_steps(self, fork, asked, source)
        return decision_steps(self, fork, asked, source)

    # --- roles and scopes ------------------------------------------------------------------------

    def system(self, content: Appendable = None) -> RoleScope[ProgramState] | None:
        """`s.system("...")` appends a message; `with s.system():` opens one for the block."""
        return self._role("system", content)

    def user(self, content: Appendable = None) -> RoleScope[ProgramState] | None:
        """`s.user("...")` appends a message; `with s.user():` opens one for the block."""
        return self._role("user", content)

    def assistant(self, content: Appendable = None) -> RoleScope[ProgramState] | None:
        """`s.assistant(gen("x"))` appends a message; `with s.assistant():` opens one."""
        return self._role("assistant", content)

    def _role(self, name: str, content: Appendable) -> RoleScope[ProgramState] | None:
        source = source_line(sys._getframe(2))
        if content is None:
            return RoleScope(self, name, source)
        self._append(role(name, content), source)
        return None

    def var_scope(self, name: str) -> VarScope[ProgramState]:
        """`with s.var_scope("x"):` the text appended within is also the value `x`."""
        return VarScope(self, name)

    def pause(self, expected_s: float | None = None, label: str = "") -> PauseScope[ProgramState]:
        """`with s.pause(expected_s=2):` this branch works outside the model for about that long.

        The runtime, notified at once, keeps or moves the branch's KV by that. Also `async with`.
        """
        return PauseScope(self, expected_s, label, source_line(sys._getframe(1)))

    def call(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """`fn(*args, **kwargs)` inside a pause: a tool, or any function; its exceptions propagate.
        Await an async one in an async function; elsewhere it is run to completion."""
        source = source_line(sys._getframe(1))
        calls = self._program.early_calls
        early = take_early(calls, fn, args, kwargs)
        pause = PauseScope(self, expected_s(fn, early), getattr(fn, "__name__", ""), source)
        if not inspect.iscoroutinefunction(getattr(fn, "fn", fn)):
            with pause:
                known = wait_early(calls, early)
                return fn(*args, **kwargs) if known is None else known[0]
        called = _awaited(pause, calls, early, fn, args, kwargs)
        return called if self._program.loop_thread is not None else asyncio.run(called)

    async def acall(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """`call` for async functions; a plain function runs on a thread, so that others go on."""
        source = source_line(sys._getframe(1))
        calls = self._program.early_calls
        early = take_early(calls, fn, args, kwargs)
        pause = PauseScope(self, expected_s(fn, early), getattr(fn, "__name__", ""), source)
        async with pause:
            known = await wait_early_async(calls, early)
            if known is not None:
                return known[0]
            if inspect.iscoroutinefunction(getattr(fn, "fn", fn)):
                return await fn(*args, **kwargs)
            return await run_beside(fn, *args, **kwargs)

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
        """Ask to keep the KV of this branch for `ttl_s` (None: the runtime's default)."""
        return self._hint("pin", source_line(sys._getframe(1)), ttl_s=ttl_s)

    def retain(self, priority: int | None = None, ttl_s: float | None = None) -> HintHandle:
        """Ask to evict it only after KV of a lower priority, in [0, 100]."""
        source = source_line(sys._getframe(1))
        return self._hint("retain", source, ttl_s=ttl_s, priority=priority)

    def demote(self, tier: ir.Tier = "host") -> HintHandle:
        """Ask to move it to `tier`, "host" or "disk"."""
        return self._hint("demote", source_line(sys._getframe(1)), tier=tier)

    def prefetch(self, tier: ir.Tier = "device") -> HintHandle:
        """Ask to bring it to `tier`, "device" or "host"."""
        return self._hint("prefetch", source_line(sys._getframe(1)), tier=tier)

    def share(self) -> HintHandle:
        """Announce that others will continue from the same text."""
        return self._hint("share", source_line(sys._getframe(1)))

    def _hint(self, action: ir.HintAction, source: str | None, **options: Any) -> HintHandle:
        op = hint(self._branch, self._next(), source, action, **options)
        return HintHandle(self._program, self._send(op), self)

    def compress(self, policy: KVPolicy) -> None:
        """From here on keep only a part of the KV of what this branch has so far, as
        `st.snapkv(0.25)` or `st.streaming(1024)` choose it: of background, where it has any
        (`st.text(..., kv="background")`), else of everything but its last token. What follows
        sees the rest, which is computed once for all calls and forks behind it."""
        if not isinstance(policy, KVPolicy):
            raise InvalidProgram.of("policy", policy, "a policy such as st.snapkv(0.25)")
        self._send_silent(
            ir.Compress(self._branch, self._next(), source_line(sys._getframe(1)), policy)
        )
        self._note("")

    # --- errors, the end -------------------------------------------------------------------------

    def error(self) -> Exception | None:
        """What stopped this branch, or None; does not wait and does not raise."""
        return self._program.failure_of_branch(self._branch)

    def end(self) -> None:
        """No more is appended; for a program opened by hand."""
        self._program.end()

    def cancel(self) -> None:
        """Stop the whole program; reading an unfinished value raises."""
        self._program.cancel()

    def report(self) -> Report:
        """The cost of each call of the program: times, tokens, what evicted what."""
        from ..trace.report import report_of

        return report_of(self._program)

    # --- forks -----------------------------------------------------------------------------------

    def fork(
        self, size: int = 1, position_ids_offset: Sequence[int] | None = None
    ) -> Forks[ProgramState]:
        """`size` branches, each continuing from here; the prefix they share is computed once.

        `position_ids_offset` is SGLang's, where it has no effect; only zeros are accepted here.
        """
        size = FORK_SIZES.checked("size", size)
        require_no_offsets(position_ids_offset)
        return self._fork(size, source_line(sys._getframe(1)))

    def copy(self, position_ids_offset: Sequence[int] | None = None) -> ProgramState:
        """One branch continuing from here. `with s.copy() as t:` joins it at the end of the block,
        so that each value made in it is a list of one on this branch, as in SGLang."""
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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._parent is not None and not self._is_joined:
            Forks(self._parent, [self]).join()


_SELECT = ("select", "a choices_method of one's own")


def _waits(asked: GenExpr | SelectExpr) -> bool:
    """Whether its value is decided on here."""
    return (asked.check if isinstance(asked, GenExpr) else asked.decide) is not None


async def _awaited(
    pause: PauseScope[ProgramState],
    calls: EarlyCalls,
    early: EarlyCall | None,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    async with pause:
        known = await wait_early_async(calls, early)
        return await fn(*args, **kwargs) if known is None else known[0]
