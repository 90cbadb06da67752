"""A program's state as its author sees it: append expressions, read values, fork and join.

Appending never waits: it sends an op and goes on. Reading (`state["x"]`, `text()`, `sync()`) waits
until the runtime has answered, and raises what went wrong, naming the source line of the failed op.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..errors import InvalidProgram
from . import ir
from .expr import (
    ROLES,
    Appendable,
    Expr,
    GenExpr,
    RoleBeginExpr,
    RoleEndExpr,
    SelectExpr,
    Sum,
    TokensExpr,
    VarExpr,
    role,
)
from .program import Pending, Program

if TYPE_CHECKING:
    from .trace.report import Report

_PACKAGE_DIR = os.path.dirname(os.path.abspath(__file__)) + os.sep


class ProgramState:
    """One branch of a running program.

    `state += expr` appends; `state["x"]` waits for a value and returns it; `state.var("x")` is the
    same value without waiting, good only for appending.
    """

    def __init__(self, program: Program, parent: ProgramState | None = None) -> None:
        self._program = program
        self._branch = program.new_branch()
        self._seq = 0
        self._pieces: list[str | Pending] = list(parent._pieces) if parent else []
        self._vars: dict[str, Any] = dict(parent._vars) if parent else {}
        self._own_vars: dict[str, Any] = {}
        self._messages: list[_Message] = [m.copy() for m in parent._messages] if parent else []
        self._open_role: str | None = parent._open_role if parent else None
        self._is_joined = False
        self.ret_value: Any = None  # what the program's function returned

    # --- appending -------------------------------------------------------------------------------

    def __iadd__(self, other: Appendable) -> ProgramState:
        self._append(other, _source_line())
        return self

    def append(self, other: Appendable) -> ProgramState:
        """The same as `state += other`."""
        self._append(other, _source_line())
        return self

    def _append(self, other: Appendable, source: str | None) -> None:
        if other is None:
            return
        if isinstance(other, str):
            if other:
                self._send(ir.Text(self._branch, self._next(), source, other))
                self._note(other)
        elif isinstance(other, Sum):
            for item in other.items:
                self._append(item, source)
        elif isinstance(other, TokensExpr):
            op = ir.Tokens(self._branch, self._next(), source, other.token_ids)
            self._note(self._send(op))
        elif isinstance(other, GenExpr):
            params = other.params.with_defaults(self._program.defaults)
            gen = ir.Gen(self._branch, self._next(), source, other.name or "", params)
            self._bind(other.name, gen)
        elif isinstance(other, SelectExpr):
            name, choices, method = other.name or "", other.choices, other.method
            self._bind(
                other.name, ir.Select(self._branch, self._next(), source, name, choices, method)
            )
        elif isinstance(other, RoleBeginExpr):
            self._begin_role(other.role, source)
        elif isinstance(other, RoleEndExpr):
            self._end_role(other.role, source)
        elif isinstance(other, VarExpr):
            self._append_var(other, source)
        else:
            raise InvalidProgram.of("state +=", other, "a string or an expression like gen(...)")

    def _next(self) -> int:
        """The number of this branch's next op."""
        if self._is_joined:
            raise InvalidProgram("this branch was joined; nothing can be appended to it")
        return self._seq

    def _send(self, op: ir.Op, name: str | None = None) -> Pending:
        """Send the next op; if that raises, nothing was appended."""
        pending = self._program.send(op, name)
        self._seq += 1
        return pending

    def _note(self, piece: str | Pending) -> None:
        if self._open_role is not None:
            self._messages[-1].pieces.append(piece)
        self._note_mark(piece)

    def _note_mark(self, piece: str | Pending) -> None:
        """A piece that is no part of a message's content."""
        self._pieces.append(piece)
        self._program.announce()

    def _bind(self, name: str | None, op: ir.Op) -> None:
        pending = self._send(op, name)
        if name is not None:
            self._vars[name] = self._own_vars[name] = pending
        self._note(pending)

    def _begin_role(self, name: str, source: str | None) -> None:
        if self._open_role is not None:
            raise InvalidProgram(f"{name} message begun inside a {self._open_role} message")
        op = ir.RoleBegin(self._branch, self._next(), source, name)
        self._note_mark(self._send(op))
        self._open_role = name
        self._messages.append(_Message(name))

    def _end_role(self, name: str, source: str | None) -> None:
        if self._open_role != name:
            raise InvalidProgram(f"{name}_end() but the open message is {self._open_role}")
        self._note_mark(self._send(ir.RoleEnd(self._branch, self._next(), source)))
        self._open_role = None

    def _append_var(self, var: VarExpr, source: str | None) -> None:
        if var.program is not self._program:
            raise InvalidProgram("a var of another program cannot be appended; use its value")
        op = ir.Var(self._branch, self._next(), source, var.branch, var.seq)
        self._note(self._send(op))

    # --- roles -----------------------------------------------------------------------------------

    def system(self, content: Appendable = None) -> _RoleScope | None:
        """`s.system("...")` appends a message; `with s.system():` opens one for the block."""
        return self._role("system", content)

    def user(self, content: Appendable = None) -> _RoleScope | None:
        """`s.user("...")` appends a message; `with s.user():` opens one for the block."""
        return self._role("user", content)

    def assistant(self, content: Appendable = None) -> _RoleScope | None:
        """`s.assistant(gen("x"))` appends a message; `with s.assistant():` opens one."""
        return self._role("assistant", content)

    def _role(self, name: str, content: Appendable) -> _RoleScope | None:
        assert name in ROLES
        source = _source_line()
        if content is None:
            return _RoleScope(self, name, source)
        self._append(role(name, content), source)
        return None

    # --- values ----------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        """The value called `name`; waits for it. Raises ProgramError, KeyError if never made."""
        return self._resolve(self._lookup(name))

    def __setitem__(self, name: str, value: object) -> None:
        """Bind a plain value to `name`, for this branch and the forks it makes later."""
        self._vars[name] = self._own_vars[name] = _Known(value)

    def __contains__(self, name: object) -> bool:
        return name in self._vars

    def names(self) -> list[str]:
        """Names of all values of this branch, in the order in which they were made."""
        return list(self._vars)

    def generated(self) -> list[str]:
        """Those of `names` that were generated or selected: what `get_meta_info` knows."""
        return [name for name, value in self._vars.items() if isinstance(value, Pending)]

    def get_var(self, name: str) -> Any:
        """The same as `state[name]`."""
        return self[name]

    def set_var(self, name: str, value: object) -> None:
        """The same as `state[name] = value`."""
        self[name] = value

    def var(self, name: str) -> Expr:
        """The value called `name` as something to append, without waiting for it."""
        found = self._lookup(name)
        if isinstance(found, Pending):
            return VarExpr(self._program, found.branch, found.seq)
        if isinstance(found, _Known):
            return Sum((str(found.value),))
        raise InvalidProgram(f"var({name!r}) was gathered by a join and is a list; index it first")

    def _lookup(self, name: str) -> Any:
        """A value of this branch; a reader of a run that goes on elsewhere waits for its making."""
        if name not in self._vars and self._program.is_run_by_another_thread():
            self._wait_until(lambda: name in self._vars)
        try:
            return self._vars[name]
        except KeyError:
            if self._program.is_run_by_another_thread():
                self._program.raise_disconnect()
            raise KeyError(f"no value called {name!r}; there are {sorted(self._vars)}") from None

    def _resolve(self, found: Any) -> Any:
        if isinstance(found, _Known):
            return found.value
        if isinstance(found, list):
            return [self._resolve(item) for item in found]
        return self._program.wait(found).value

    def get_meta_info(self, name: str) -> Any:
        """How `name` came about, as a dict; waits for it. A list of them, as the values are, for
        the samples of a gen with n > 1 and for what a join has gathered.

        Keys: id, prompt_tokens, cached_tokens, completion_tokens, output_ids (the value's token
        ids), queue_s, time_to_first_token_s, latency_s, finish_reason ("stop" or "length");
        matched_stop, logprobs, choice_logprobs where there are any.
        """
        return self._meta_of(name, self._lookup(name))

    def _meta_of(self, name: str, found: Any) -> Any:
        if isinstance(found, list):
            return [self._meta_of(name, item) for item in found]
        if not isinstance(found, Pending):
            raise InvalidProgram.of("name", name, "the name of a gen or select of this branch")
        meta = self._program.wait(found).meta
        return [dict(item) for item in meta] if isinstance(meta, list) else dict(meta)

    # --- text ------------------------------------------------------------------------------------

    def text(self) -> str:
        """All text of this branch, the chat template's marks included; waits for all of it."""
        self._wait_for_the_runner()
        text = ""
        for piece in list(self._pieces):
            if isinstance(piece, str):
                text += piece
            else:
                done = self._program.wait(piece)
                text = done.text if done.replace else text + done.text
        return text

    def messages(self) -> list[dict[str, str]]:
        """The chat messages so far as `{"role", "content"}`; waits for all of them."""
        self._wait_for_the_runner()
        return [
            {"role": message.role, "content": self._joined(message.pieces)}
            for message in self._messages
        ]

    def _joined(self, pieces: list[str | Pending]) -> str:
        waited = (p if isinstance(p, str) else self._program.wait(p).text for p in list(pieces))
        return "".join(waited)

    def text_iter(self, name: str | None = None) -> Iterator[str]:
        """Text as it comes: of the value `name`, or of the whole branch until the program ends.

        Pieces arrive one by one when the program runs with `stream=True`, else op by op. Raises
        what failed, for the whole branch also in forks that nobody read.
        """
        if name is not None:
            yield from self._chunks_of(self._lookup(name))
            return
        num_done = 0
        while self._wait_for_piece(num_done):
            yield from self._chunks_of(self._pieces[num_done])
            num_done += 1
        self._program.wait_done()

    def _wait_for_piece(self, index: int) -> bool:
        """Whether the branch has a piece `index`, once that is known."""
        self._wait_until(lambda: len(self._pieces) > index)
        return len(self._pieces) > index

    def _wait_for_the_runner(self) -> None:
        """A reader of a run that goes on in another thread waits until that has appended all."""
        if self._program.is_run_by_another_thread():
            self._wait_until(lambda: False)

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        program = self._program
        with program.changed:
            program.changed.wait_for(lambda: condition() or program.is_ended or program.is_done)

    def _chunks_of(self, piece: str | Pending | _Known) -> Iterator[str]:
        if isinstance(piece, _Known):
            yield str(piece.value)
        elif isinstance(piece, str):
            yield piece
        else:
            yield from self._stream(piece)

    def _stream(self, pending: Pending) -> Iterator[str]:
        """Chunks of a result; all of its text at once where the program does not stream."""
        num_sent = 0
        while fresh := self._program.wait_chunks(pending, num_sent):
            num_sent += len(fresh)
            yield "".join(fresh)
        if not num_sent and pending.text:
            yield pending.text

    # --- waiting, errors -------------------------------------------------------------------------

    def sync(self) -> None:
        """Wait until everything appended to this branch so far is done; raise what failed."""
        for piece in list(self._pieces):
            if isinstance(piece, Pending):
                self._program.wait(piece)

    def error(self) -> Exception | None:
        """What stopped this branch, or None; does not wait and does not raise."""
        return self._program.failure_of_branch(self._branch)

    def report(self) -> Report:
        """What the program's calls cost, as far as it has run; does not wait."""
        from .trace.report import report_of

        return report_of(self._program)

    def end(self) -> None:
        """Say that nothing more is appended, for a program opened by hand."""
        self._program.end()

    def cancel(self) -> None:
        """Stop the whole program; reading what was not finished raises."""
        self._program.cancel()

    # --- forks -----------------------------------------------------------------------------------

    def fork(self, size: int = 1) -> Forks:
        """`size` branches, each going on from here; the prefix they share is computed once."""
        if not isinstance(size, int) or not 1 <= size <= 65_536:
            raise InvalidProgram.of("size", size, "an integer in [1, 65536]")
        source = _source_line()
        seq = self._next()
        children = [ProgramState(self._program, self) for _ in range(size)]
        numbers = tuple(child._branch for child in children)
        self._send(ir.Fork(self._branch, seq, source, numbers))
        return Forks(self, children)

    def copy(self) -> ProgramState:
        """One branch going on from here; also good for `with s.copy() as t:`."""
        return self.fork(1)[0]

    def __enter__(self) -> ProgramState:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None

    def _end(self, source: str | None) -> None:
        if not self._is_joined:
            self._send(ir.End(self._branch, self._next(), source))
            self._is_joined = True

    def _join(self, forks: Forks, mode: str, source: str | None) -> None:
        children = tuple(child._branch for child in forks)
        pending = self._send(ir.Join(self._branch, self._next(), source, children, mode))
        self._note(pending)
        if mode == "gather_variable":
            names = {name: None for child in forks for name in child._own_vars}
            for name in names:
                gathered = [c._own_vars[name] for c in forks if name in c._own_vars]
                self._vars[name] = self._own_vars[name] = gathered


class Forks:
    """The branches of one fork: a list that can be appended to as a whole and joined."""

    def __init__(self, parent: ProgramState, children: list[ProgramState]) -> None:
        self._parent = parent
        self._children = children

    def __len__(self) -> int:
        return len(self._children)

    def __getitem__(self, index: int) -> ProgramState:
        return self._children[index]

    def __setitem__(self, index: int, child: ProgramState) -> None:
        """What `forks[i] += ...` ends with; a branch cannot be replaced."""
        if child is not self._children[index]:
            raise InvalidProgram("a branch of a fork cannot be replaced, only appended to")

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self._children)

    def __iadd__(self, other: Appendable | Callable[[int], Appendable]) -> Forks:
        source = _source_line()
        for index, child in enumerate(self._children):
            child._append(other(index) if callable(other) else other, source)
        return self

    def join(self, mode: ir.JoinMode = "gather_variable") -> None:
        """End the branches and wait for them in the runtime (not here).

        "gather_variable": each value made in the branches becomes a list on the parent, in the
        order of the branches. "concate_and_append": what each branch appended since the fork is
        appended to the parent. A failed branch fails the join, at the parent's next wait.
        """
        if mode not in ir.JOIN_MODES:
            raise InvalidProgram.of("mode", mode, f"one of {ir.JOIN_MODES}")
        source = _source_line()
        for child in self._children:
            child._end(source)
        self._parent._join(self, mode, source)


class _Known:
    """A value that the program's author set."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


class _Message:
    """A chat message: its role and the pieces of its content."""

    __slots__ = ("pieces", "role")

    def __init__(self, role: str, pieces: list[str | Pending] | None = None) -> None:
        self.role = role
        self.pieces = pieces or []

    def copy(self) -> _Message:
        return _Message(self.role, list(self.pieces))


class _RoleScope:
    """`with s.user(): ...`"""

    def __init__(self, state: ProgramState, role: str, source: str | None) -> None:
        self._state, self._role, self._source = state, role, source

    def __enter__(self) -> ProgramState:
        self._state._begin_role(self._role, self._source)
        return self._state

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self._state._end_role(self._role, self._source)


def _source_line() -> str | None:
    """ "file:line" of the nearest caller outside this package."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE_DIR):
        frame = frame.f_back  # type: ignore[assignment]
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else None
