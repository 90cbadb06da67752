"""Writing a branch: each op is sent as it is appended, and the text it will add is recorded.

Knows ops and expressions; the authoring syntax is one level above (`state`).
"""

from __future__ import annotations

import asyncio
import threading
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from ...errors import InvalidProgram
from ..client.program import Pending, Program
from ..client.values import Piece, Span, Value
from ..protocol import ir
from .expr import (
    Appendable,
    BackgroundExpr,
    GenExpr,
    ImageExpr,
    RoleBeginExpr,
    RoleEndExpr,
    SelectExpr,
    Sum,
    TokensExpr,
    ToolsExpr,
    VarExpr,
)
from .images import MAX_ENGINE_URL_CHARS, image_url
from .reading import BranchReader, Message, messages_of


class BranchWriter(BranchReader):
    """One branch of a running program, and its `_seq` appended ops."""

    def __init__(self, program: Program, parent: BranchWriter | None) -> None:
        """A fork of `parent` starts with all of its contents."""
        super().__init__(program)
        self._branch = program.new_branch()
        self._seq = 0
        self._open_role: str | None = None
        self._is_joined = False
        self._num_pauses = 0  # that have begun and not ended
        self._own_vars: dict[str, Value] = {}
        if parent is not None:
            self._pieces = list(parent._pieces)
            self._num_inherited = len(self._pieces)
            self._vars = dict(parent._vars)
            self._messages = [message.copy() for message in parent._messages]
            self._open_role = parent._open_role

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

    def _append_background(self, background: BackgroundExpr, source: str | None) -> None:
        self._send_silent(ir.Background(self._branch, self._next(), source, True))
        self._note("")
        self._append(background.item, source)
        self._send_silent(ir.Background(self._branch, self._next(), source, False))
        self._note("")

    def _append_tokens(self, ids: TokensExpr, source: str | None) -> None:
        self._note(self._send(ir.Tokens(self._branch, self._next(), source, ids.token_ids)))

    def _append_gen(self, gen: GenExpr, source: str | None) -> None:
        if gen.check is not None:
            self._append_waiting(gen, source)
            return
        defaults = self._program.defaults
        params = gen.params if defaults is None else defaults.applied_to(gen.params)
        op = ir.Gen(self._branch, self._next(), source, gen.name, params)
        self._bind(gen.name, op, self._watcher(gen)).read = gen.read

    def _watcher(self, gen: GenExpr) -> Callable[[str], None] | None:
        """What is told of the gen's likely outputs."""
        if gen.ahead is None:
            return None
        is_async = self._program.loop_thread == threading.get_ident()
        loop = asyncio.get_running_loop() if is_async else None
        return self._program.early_calls.watcher(gen.ahead, loop)

    def _append_waiting(self, asked: GenExpr | SelectExpr, source: str | None) -> None:
        """One whose value is decided on here: it has to do, or a method of the author's chooses."""
        raise NotImplementedError

    def _append_select(self, select: SelectExpr, source: str | None) -> None:
        if select.decide is not None:
            self._append_waiting(select, source)
            return
        name, choices, method = select.name, select.choices, select.method
        head = (self._branch, self._next(), source, name)
        op = ir.Select(*head, choices, method, lora_path=select.lora_path)
        self._bind(name, op)

    def _append_image(self, image: ImageExpr, source: str | None) -> None:
        if not self._program.info.get("reads_images"):
            refusal = self._program.info.get("images_refusal") or "it reads only text"
            raise InvalidProgram(f"image: the model {self._program.model}: {refusal}", "image")
        url = image_url(image.source)
        is_engine = "model_path" in self._program.info  # whose wire has frames
        if is_engine and len(url) > MAX_ENGINE_URL_CHARS:
            allowed = f"at most {MAX_ENGINE_URL_CHARS} characters of base64 for an engine"
            raise InvalidProgram.of("image", f"{len(url)} characters", allowed)
        self._send_silent(ir.Image(self._branch, self._next(), source, url))
        self._note("")

    def _append_var(self, var: VarExpr, source: str | None) -> None:
        if var.program is not self._program:
            raise InvalidProgram("a var of another program cannot be appended; use its value")
        self._note(self._send(ir.Var(self._branch, self._next(), source, var.branch, var.seq)))

    def _next(self) -> int:
        """The number of this branch's next op."""
        if self._is_joined:
            raise InvalidProgram("this branch was joined; nothing can be appended to it")
        if self._program.has_caught(self._branch):
            self._resume()
        return self._seq

    def _resume(self) -> None:
        """An op failed and the author knows: go on from before it."""
        first_lost = self._program.first_lost(self._branch)
        num_kept = bisect_left(self._seqs, first_lost)
        del self._pieces[self._num_inherited + num_kept :], self._seqs[num_kept:]
        self._messages, self._open_role = messages_of(self._pieces)
        self._program.resume(self._branch, self._seq, first_lost)
        self._seq += 1

    def _send(self, op: ir.Op, on_likely: Callable[[str], None] | None = None) -> Pending:
        """Send the next op; if that raises, nothing was appended."""
        pending = self._program.send(op, on_likely)
        self._seq += 1
        return pending

    def _send_silent(self, op: ir.Op) -> None:
        self._program.send_silent(op)
        self._seq += 1

    def _note(self, piece: Piece) -> None:
        if self._open_role is not None:
            self._messages[-1].pieces.append(piece)
        self._note_mark(piece)

    def _note_mark(self, piece: Piece) -> None:
        """Record a piece that is not part of a message's content."""
        self._pieces.append(piece)
        self._seqs.append(self._seq - 1)
        self._program.waiters.wake()  # wakes iterators over the text

    def _bind(
        self, name: str, op: ir.Op, on_likely: Callable[[str], None] | None = None
    ) -> Pending:
        pending = self._send(op, on_likely)
        if name:
            self._vars[name] = self._own_vars[name] = pending
        self._note(pending)
        return pending

    def _append_tools(self, tools: ToolsExpr, source: str | None) -> None:
        seq = self._next()
        self._note_mark(self._send(ir.Tools(self._branch, seq, source, tools.tools)))

    def _begin_role(self, begin: RoleBeginExpr, source: str | None) -> None:
        name, seq = begin.role, self._next()
        if self._open_role is not None:
            raise InvalidProgram(f"{name} message begun inside a {self._open_role} message")
        self._note_mark(self._send(ir.RoleBegin(self._branch, seq, source, name, begin.fields)))
        self._open_role = name
        self._messages.append(Message(name, fields=begin.fields))

    def _end_role(self, end: RoleEndExpr, source: str | None) -> None:
        seq = self._next()
        if self._open_role != end.role:
            raise InvalidProgram(f"{end.role}_end() but the open message is {self._open_role}")
        self._note_mark(self._send(ir.RoleEnd(self._branch, seq, source, end.fields)))
        self._open_role = None
        if end.fields is not None:
            self._messages[-1].fields = end.fields

    def _bind_span(self, name: str, start: int) -> None:
        self._vars[name] = self._own_vars[name] = Span(tuple(self._pieces), start)
        self._program.waiters.wake()

    def _send_pause(self, expected_s: float | None, label: str, source: str | None) -> None:
        self._send_silent(ir.Pause(self._branch, self._next(), source, expected_s, label))
        self._program.flush()

    def _end(self, source: str | None) -> None:
        if not self._is_joined:
            self._send_silent(ir.End(self._branch, self._seq, source))
            self._is_joined = True

    def _drop(self) -> None:
        """Nobody reads this branch any more."""
        if not self._is_joined:
            self._program.drop(self._branch, self._seq)
            self._is_joined = True


_APPENDERS: dict[type, Callable[[BranchWriter, Any, str | None], None]] = {
    str: BranchWriter._append_text,
    Sum: BranchWriter._append_sum,
    GenExpr: BranchWriter._append_gen,
    SelectExpr: BranchWriter._append_select,
    RoleBeginExpr: BranchWriter._begin_role,
    RoleEndExpr: BranchWriter._end_role,
    TokensExpr: BranchWriter._append_tokens,
    ToolsExpr: BranchWriter._append_tools,
    VarExpr: BranchWriter._append_var,
    ImageExpr: BranchWriter._append_image,
    BackgroundExpr: BranchWriter._append_background,
}
