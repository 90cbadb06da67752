"""The interpreter of a program's ops: it carries each branch's log out, as far as it can go.

    op          the branch goes on
    Text ...    at once
    Gen, ...    when its call has ended
    Var         when the value is there
    Fork        at once, and its children begin
    Join        when enough children have ended
    End, Drop   never

A branch that fails stops, and the branches that it was still to fork fail with it; its client may
have it go on from before the op that failed (`Resume`). A branch that nobody needs any more is
stopped for good: what a join has enough of, what its client drops.

Nothing here blocks: `advance` is called again when ops arrive or calls end. One thread owns a
program. How a text is appended and how a call is made is a subclass's matter: the engine and the
client of other servers have one each.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from ...errors import InvalidProgram, StemmaError
from . import ir, wire
from .branch import BranchT

Emit = Callable[[int, int, str, Any], None]  # branch, seq, kind, payload
ValueT = TypeVar("ValueT")

MAX_ERROR_CHARS = 4096  # joins of failed joins quote each other


class Interpreter(ABC, Generic[BranchT, ValueT]):
    """One program. Lifetime: from its first ops to `DONE`, or until cancelled.

    `ValueT`: what an op appended, as a `Var` needs it.
    """

    def __init__(self, emit: Emit) -> None:
        """`emit` hands events to the client."""
        self._emit = emit
        self._branches: dict[int, BranchT] = {}
        self._values: dict[tuple[int, int], ValueT] = {}
        self._waiters: dict[int, dict[int, list[BranchT]]] = {}  # by branch, by seq or _END
        self._dropped: dict[BranchT, None] = {}  # nobody reads them, but something may need them
        self._ready: deque[BranchT] = deque()
        self._end_numbers = itertools.count()
        self._num_calls = 0  # under way
        self._has_ended = False
        self.is_done = False

    # --- what a subclass brings -------------------------------------------------------------------

    @abstractmethod
    def _new_branch(self, number: int) -> BranchT:
        """A branch that has not begun."""

    @abstractmethod
    def _carry_out(self, branch: BranchT, op: ir.Op) -> bool:
        """Do one op; False when it has to wait (it stays at the head of the log). `Var`, `Fork`,
        `Join`, `End` and `Drop` go to `_carry_out_flow`. Raises StemmaError: the branch fails."""

    @abstractmethod
    def _append_value(self, branch: BranchT, value: ValueT) -> str:
        """Append what another op appended; returns it as text."""

    @abstractmethod
    def _append_children(self, branch: BranchT, children: list[BranchT]) -> str:
        """Append what the children appended since their fork; returns it as text."""

    @abstractmethod
    def _begin_child(self, branch: BranchT, child: BranchT) -> None:
        """A child has a copy of the branch's transcript now: set what else it begins with."""

    @abstractmethod
    def _cancel_call(self, call: Any) -> None:
        """End a call; it reports nothing more."""

    def _note_op(self, branch: BranchT, op: ir.Op) -> None:
        """An op has arrived."""

    def _known_winners(self, op: ir.Join) -> Sequence[int] | None:
        """Of a join that has had enough branches before, elsewhere: which; None: of no other."""
        return None

    def _note_rest(self, branch: BranchT) -> None:
        """A branch has gone as far as it can."""

    def _note_resumed(self, branch: BranchT) -> None:
        """A branch that had failed goes on from its transcript: forget the rest."""

    # --- input ------------------------------------------------------------------------------------

    def receive(self, ops: Iterable[ir.Op], *, end: bool = False) -> None:
        """Append ops to their branches' logs; `end`: no more follow. Raises InvalidProgram when
        they are out of order."""
        for op in ops:
            branch = self._branch(op.branch)
            if op.seq != branch.num_received:
                raise InvalidProgram.of("seq", op.seq, f"{branch.num_received} on {op.branch}")
            branch.num_received += 1
            branch.log.append(op)
            branch.places.note(op)
            self._note_op(branch, op)
            if branch.error is None:
                self._note_needs(branch, op)
            else:
                self._fail_forks_of([op], branch.error)
            if isinstance(op, ir.Drop):
                self._drop(branch)
            elif isinstance(op, ir.Resume):
                self._resume(branch, op)
            self._ready.append(branch)
        if end:
            self._has_ended = True
            for branch in [b for b in self._branches.values() if b.error is not None]:
                self._halt_joined(branch)

    @property
    def used(self) -> dict[str, int] | None:
        """What the program has had of the engine; None where nobody counts it."""
        return None

    def reject(self, error: Exception) -> None:
        """End the whole program: it cannot go on."""
        self.cancel()
        payload = {"message": str(error), "kind": type(error).__name__, "op": "program"}
        self._emit(0, 0, wire.FAILED, payload)
        self._emit(0, 0, wire.DONE, self.used)

    def cancel(self) -> None:
        """Stop all calls; no more events. Nothing happens to a program that has ended."""
        if self.is_done:
            return
        self._ready.clear()
        for branch in self._branches.values():
            self._abort_call(branch)
        self._finish()

    def _finish(self) -> None:
        """The program needs nothing any more."""
        self.is_done = True

    def _note_needs(self, branch: BranchT, op: ir.Op) -> None:
        """Who will need whom."""
        match op:
            case ir.Var():
                self._branch(op.of_branch).num_wanted += 1
            case ir.Fork():
                branch.unforked += [self._branch(number) for number in op.children]
            case ir.Join():
                for child in map(self._branch, op.children):
                    child.num_wanted += 1
                    child.joined_by = branch

    def _forget_needs(self, branch: BranchT) -> None:
        """The branch has stopped: what is left in its log needs nobody."""
        for op in branch.log:
            if isinstance(op, ir.Var):
                self._branch(op.of_branch).num_wanted -= 1
            elif isinstance(op, ir.Join):
                for child in map(self._branch, op.children):
                    child.num_wanted -= 1

    # --- carrying out -----------------------------------------------------------------------------

    def advance(self) -> None:
        """Carry out all that can be; emits DONE when the program has ended and nothing is left."""
        while not self.is_done:
            while self._ready:
                branch = self._ready.popleft()
                self._advance_branch(branch)
                self._note_rest(branch)
            if not self._has_ended or self._num_calls:
                return
            if self._fail_stuck():
                continue
            self._finish()
            self._emit(0, 0, wire.DONE, self.used)

    def _advance_branch(self, branch: BranchT) -> None:
        if branch.transcript is None or branch.call is not None or branch.is_waiting:
            return
        while branch.log and branch.error is None:
            op = branch.log[0]
            try:
                if branch.is_ended:
                    raise InvalidProgram(f"an op follows the End of branch {branch.number}")
                if not self._carry_out(branch, op):
                    return
            except StemmaError as error:
                self._fail_with(branch, op, error)
                return
            if branch.log:  # a branch that was stopped meanwhile has none
                branch.log.popleft()
            if self._dropped and isinstance(op, ir.Var | ir.Join | ir.Fork):
                self._stop_dropped()

    def _carry_out_flow(self, branch: BranchT, op: ir.Op) -> bool:
        """Do one op that is about other branches; False when it has to wait."""
        match op:
            case ir.Var():
                return self._append_var(branch, op)
            case ir.Fork():
                self._fork(branch, op)
            case ir.Join():
                return self._join(branch, op)
            case ir.End() | ir.Drop():
                branch.end_number = next(self._end_numbers)
                self._wake((branch.number, _END))
        return True

    def _begin_call(self, branch: BranchT, call: Any) -> None:
        """The branch waits for this call."""
        branch.call = call
        self._num_calls += 1

    def _end_call(self, branch: BranchT) -> Any | None:
        """The branch waits for its call no longer; returns it, if one was under way."""
        call, branch.call = branch.call, None
        if call is not None:
            self._num_calls -= 1
        return call

    def _abort_call(self, branch: BranchT) -> None:
        """End the branch's call, if one is under way."""
        call = self._end_call(branch)
        if call is not None:
            self._cancel_call(call)

    # --- data flow --------------------------------------------------------------------------------

    def _append_var(self, branch: BranchT, op: ir.Var) -> bool:
        key = (op.of_branch, op.of_seq)
        value = self._values.get(key)
        if value is None:
            source = self._branches.get(op.of_branch)
            why = None if source is None else source.why_lost(op.of_seq)
            if why is not None:
                raise InvalidProgram(f"the value it appends was never made: {why}")
            return self._wait_for(branch, key)
        text = self._append_value(branch, value)
        self._branch(op.of_branch).num_wanted -= 1
        self._set_value(branch, op, value)
        self._emit(branch.number, op.seq, wire.VALUE, {"value": text, "text": text})
        return True

    def _set_value(self, branch: BranchT, op: ir.Op, value: ValueT) -> None:
        self._values[branch.number, op.seq] = value
        self._wake((branch.number, op.seq))

    def _fork(self, branch: BranchT, op: ir.Fork) -> None:
        for index, number in enumerate(op.children):
            child = self._branch(number)
            if child.transcript is not None or child is branch:
                raise InvalidProgram.of("children", number, "branches that were not forked before")
            child.path = (*branch.path, (branch.places.of(op), index))
            child.transcript = branch.begun.copy()
            self._begin_child(branch, child)
            self._ready.append(child)
        del branch.unforked[: len(op.children)]

    def _join(self, branch: BranchT, op: ir.Join) -> bool:
        children = [self._branch(number) for number in op.children]
        known = self._known_winners(op)
        winners = self._first_to_end(branch, children, op.num_needed or len(children), known)
        if winners is None:
            return False
        text = ""
        if op.mode == "concate_and_append":
            text = self._append_children(branch, [children[index] for index in winners])
        for child in children:
            child.num_wanted -= 1
        value = None if op.num_needed is None else winners
        self._emit(branch.number, op.seq, wire.VALUE, {"value": value, "text": text})
        return True

    def _first_to_end(
        self,
        branch: BranchT,
        children: list[BranchT],
        num_needed: int,
        known: Sequence[int] | None,
    ) -> list[int] | None:
        """Indices of the first `num_needed` children that ended well, or of those that are `known`
        to have been; the others are stopped. None while it has to wait."""
        failed = [child for child in children if child.error is not None]
        if failed and num_needed == len(children):
            raise InvalidProgram(f"a joined branch failed: {failed[0].error}")
        if len(children) - len(failed) < num_needed:
            what = f"{num_needed} of {len(children)} branches are needed"
            raise InvalidProgram(f"{what}, {len(failed)} failed: {failed[0].error}")
        every = range(len(children))
        awaited = every if known is None else [index for index in known if index in every]
        ended = [i for i in awaited if children[i].is_ended and children[i].error is None]
        if len(ended) < num_needed:
            if not branch.num_awaited:
                branch.num_awaited = num_needed - len(ended)
                for child in (children[index] for index in awaited):
                    if not child.is_ended and child.error is None:
                        self._wait_for(branch, (child.number, _END))
            branch.is_waiting = True
            return None
        branch.num_awaited = 0
        ended.sort(key=lambda index: children[index].end_number or 0)
        winners = set(ended[:num_needed])
        losers = [child for index, child in enumerate(children) if index not in winners]
        self._halt_trees(losers, "the join had enough branches")
        return sorted(winners)

    def _wait_for(self, branch: BranchT, key: tuple[int, int]) -> bool:
        number, seq = key
        self._waiters.setdefault(number, {}).setdefault(seq, []).append(branch)
        branch.is_waiting = True
        return False

    def _wake(self, key: tuple[int, int]) -> None:
        number, seq = key
        for branch in self._waiters.get(number, {}).pop(seq, ()):
            if seq == _END and branch.num_awaited > 1 and self._branch(number).is_ended:
                branch.num_awaited -= 1  # its join needs more
                continue
            branch.is_waiting = False
            self._ready.append(branch)

    def _wake_all_of(self, branch: BranchT) -> None:
        for seq in list(self._waiters.get(branch.number, ())):
            self._wake((branch.number, seq))

    # --- branches that nobody needs ---------------------------------------------------------------

    def _drop(self, branch: BranchT) -> None:
        """Nobody will read the branch: stop it, now or once nothing else needs it."""
        self._dropped[branch] = None
        if self._stop_if_dropped(branch):
            self._stop_dropped()

    def _stop_dropped(self) -> None:
        """Stop the branches that nobody reads and that nothing else needs."""
        has_stopped = True
        while has_stopped:  # one that has stopped needs no others
            has_stopped = False
            for branch in list(self._dropped):
                has_stopped = self._stop_if_dropped(branch) or has_stopped

    def _stop_if_dropped(self, branch: BranchT) -> bool:
        """Whether this branch, which nobody reads, has been stopped now."""
        if branch.is_ended or branch.error is not None:
            del self._dropped[branch]
            return False
        if branch.num_wanted or any(child.error is None for child in branch.unforked):
            return False
        del self._dropped[branch]
        self._halt(branch, "nobody reads this branch any more")
        return True

    def _halt_joined(self, failed: BranchT) -> None:
        """The client says no more: nobody waits for what a failed branch would have joined."""
        joined = [op for op in failed.log if isinstance(op, ir.Join)]
        children = [self._branch(number) for op in joined for number in op.children]
        self._halt_trees([c for c in children if c.error is None], "the branch that joins failed")

    def _halt_trees(self, roots: list[BranchT], reason: str) -> None:
        """Stop branches and those forked from them: nobody waits for what they make."""
        for root in roots:
            self._halt(root, reason)
        paths = {root.path for root in roots if root.path}  # one that was never forked has none
        depths = {len(path) for path in paths}
        for branch in list(self._branches.values()):
            if any(branch.path[:depth] in paths for depth in depths):
                self._halt(branch, reason)

    def _halt(self, branch: BranchT, reason: str) -> None:
        """Stop a branch and those that it was still to fork, however deep."""
        open_branches = [branch]
        while open_branches:
            branch = open_branches.pop()
            if branch.is_ended or branch.error is not None:
                continue
            self._abort_call(branch)
            last = ir.End(branch.number, branch.num_received, None)
            self._stop(branch, branch.log[0] if branch.log else last, reason, wire.STOPPED)
            open_branches += branch.unforked
            for op in branch.log:
                if isinstance(op, ir.Join):  # who held these branches held this one, too
                    self._dropped.update(dict.fromkeys(map(self._branch, op.children)))
            branch.log.clear()

    # --- failure ----------------------------------------------------------------------------------

    def _fail_with(self, branch: BranchT, op: ir.Op, error: Exception) -> None:
        """An op of the branch has raised this; what is no StemmaError is a defect of ours."""
        kind, field = type(error).__name__, getattr(error, "field", None)
        if isinstance(error, StemmaError):
            self._fail(branch, op, str(error), kind, field=field)
        else:
            self._fail(branch, op, f"{kind}: {error}", "EngineError")

    def _fail(
        self, branch: BranchT, op: ir.Op, message: str, kind: str, *, field: str | None = None
    ) -> None:
        """Stop a branch at `op`, and with it what can only follow from it."""
        if branch.error is not None:
            return
        known = self._take_resumed(branch)
        joins = self._waiters.get(branch.number, {}).pop(_END, []) if known else []
        self._stop(branch, op, message, kind, field)
        self._fail_forks_of(branch.log, branch.error or "")
        if known:
            self._waiters.setdefault(branch.number, {})[_END] = joins  # it may yet end well
            self._go_on(branch, known)
            return
        self._stop_dropped()
        if self._has_ended:
            self._halt_joined(branch)

    def _stop(
        self, branch: BranchT, op: ir.Op, message: str, kind: str, field: str | None = None
    ) -> None:
        name = getattr(op, "name", "") or op.kind
        message = message[:MAX_ERROR_CHARS]
        branch.error = f"{name}: {message}" + (f" (at {op.source})" if op.source else "")
        payload = {"message": message, "kind": kind, "op": name, "source": op.source}
        if field is not None:
            payload["field"] = field
        seq = self._fails_from(branch, op)
        if kind != wire.STOPPED and branch.transcript is not None:
            branch.failed_seq = seq
        self._emit(branch.number, seq, wire.FAILED, payload)
        self._forget_needs(branch)
        self._wake_all_of(branch)

    def _fails_from(self, branch: BranchT, op: ir.Op) -> int:
        """From which op on a branch that stops at `op` has no values."""
        return op.seq if op.branch == branch.number else 0  # it stops for another's op: all of it

    def _resume(self, branch: BranchT, op: ir.Resume) -> None:
        """The branch goes on from before the op that failed; where it never began, or was stopped
        for good, it fails again."""
        if branch.error is None:
            return
        if branch.failed_seq is None:
            payload = {"message": branch.error, "kind": "ProgramError", "op": ""}
            self._emit(branch.number, op.seq, wire.FAILED, payload)
            return
        branch.lost.append((branch.failed_seq, op.seq, branch.error))
        branch.error = branch.failed_seq = None
        branch.is_waiting, branch.num_awaited = False, 0
        branch.unforked.clear()
        branch.log.clear()
        branch.log.append(op)
        self._note_resumed(branch)

    def _take_resumed(self, branch: BranchT) -> list[ir.Op]:
        """What has arrived behind a failure that comes only now, from a Resume on: its client knows
        of it from another runtime, and went on while this one had other things to do."""
        at = next((i for i, op in enumerate(branch.log) if isinstance(op, ir.Resume)), None)
        if at is None or branch.transcript is None:
            return []
        return [branch.log.pop() for _ in range(len(branch.log) - at)][::-1]

    def _go_on(self, branch: BranchT, ops: list[ir.Op]) -> None:
        """The same as if these had come behind the failure; who needs whom has been noted."""
        resume, *later = ops
        assert isinstance(resume, ir.Resume), "it begins with one"
        self._resume(branch, resume)
        for op in later:
            branch.log.append(op)
            self._note_op(branch, op)
            if isinstance(op, ir.Fork):
                branch.unforked += [self._branch(number) for number in op.children]
        self._ready.append(branch)

    def _fail_forks_of(self, log: Iterable[ir.Op], reason: str) -> None:
        """Fail the branches that will never be forked, and those forked from them, however deep."""
        forks = [op for op in log if isinstance(op, ir.Fork)]
        while forks:
            fork = forks.pop()
            for child in map(self._branch, fork.children):
                if child.transcript is None and child.error is None:
                    message = f"the branch it forks from failed: {reason}"
                    self._stop(child, fork, message, "ProgramError")
                    child.error = reason  # the cause, not a chain of consequences
                    forks += [op for op in child.log if isinstance(op, ir.Fork)]

    def _fail_stuck(self) -> bool:
        """The client sends no more: a branch that still waits waits forever."""
        stuck = [b for b in self._branches.values() if not b.is_idle]
        for branch in stuck:
            if branch.is_idle:  # it was stopped with one before it
                continue
            branch.is_waiting = False
            message = "it waits for something that never comes"
            self._fail(branch, branch.log[0], message, InvalidProgram.__name__)
        return bool(stuck)

    def _branch(self, number: int) -> BranchT:
        if number not in self._branches:
            self._branches[number] = self._new_branch(number)
        return self._branches[number]


_END = -1  # in a waiter's key: the branch's End, where else a seq stands
