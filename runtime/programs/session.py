"""Running programs: each branch's log is carried out op by op, as far as it can go.

A branch stops at a `Gen` or `Select` until its requests have ended, at a `Var` until the value is
there, at a `Join` until the children have ended. Everything else is done at once. Nothing here
blocks: `advance` is called again when ops arrive or requests finish. One planner thread owns it.

It is long because starting, waiting, stopping and failing are one state machine over branches.
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from ...errors import InvalidProgram, PromptTooLong, StemmaError
from ...frontend.protocol import ir, wire
from ..schedule.cache.hints import Outcome
from ..schedule.program_record import ProgramRecord
from ..tokenizer.chat_template import NO_TEMPLATE_ARGS, TemplateArgs
from ..tokenizer.transcript import TextChange, Transcript
from .branch import Branch, Value
from .call_factory import CallFactory
from .calls import Delta, GenCall, SamplesCall
from .context import ProgramContext
from .hints import Action, AskedHint, StatedLeases
from .prefix_leases import LeaseManager

Emit = Callable[[int, int, str, Any], None]  # branch, seq, kind, payload

MAX_FORKED_TOKENS = 1 << 25  # of a program: each branch has its own copy, 4 bytes a token
MAX_ERROR_CHARS = 4096  # joins of failed joins quote each other


class ProgramSession:
    """One program of one client.

    Lifetime: from its first ops to `DONE`, or until cancelled. `emit` hands events to the client.
    What it will need of the KV cache is `LeaseManager`'s business.
    """

    def __init__(
        self,
        context: ProgramContext,
        emit: Emit,
        on_ready: Callable[[ProgramSession], None],
        *,
        seed: int,
        instance: int,
        is_streaming: bool,
        tenant: Hashable = "",
        label: str = "",
        stated: StatedLeases | None = None,
        response_id: str | None = None,
        has_token_ids: bool = False,
        namespace: str = "",
    ) -> None:
        """`emit` sends an event to the client; `on_ready` asks for an `advance` soon; `tenant`:
        whose share of the engine it uses; `label`: how reports call it; `stated`: what the
        client's hints keep (None: hints are rejected); `response_id`: under this name hints may
        mean its first gen with its prompt; `has_token_ids`: what it streams has the ids, too;
        `namespace`: only within it is KV shared, and anything else by which one could tell what
        others ask."""
        self._context = context
        self._emit = emit
        self._on_ready = on_ready
        self._stated = stated
        self._response_id = response_id
        self.record = ProgramRecord(label=label, tenant=tenant, created_s=time.perf_counter())
        self._namespace = namespace  # that of its adapter, where it has one
        self._factory = CallFactory(
            context, self.record, seed, instance, is_streaming, has_token_ids, namespace
        )
        self._leases = (
            None
            if context.kv is None
            else LeaseManager(context.kv, context.think_times, tenant, namespace=namespace)
        )
        self._branches: dict[int, Branch] = {}
        self._values: dict[tuple[int, int], Value] = {}
        self._waiters: dict[int, dict[int, list[Branch]]] = {}  # by branch, by seq or _END
        self._pauses: dict[Branch, ir.Pause] = {}
        self._dropped: dict[Branch, None] = {}  # nobody reads them, but something may need them
        self._ready: deque[Branch] = deque()
        self._end_numbers = itertools.count()
        self._num_calls = 0  # under way
        self._num_forked_tokens = 0
        self._has_ended = False
        self._gens_end = False  # with what they have
        self.is_done = False
        self.set_template_args(NO_TEMPLATE_ARGS)

    # --- input ------------------------------------------------------------------------------------

    def set_template_args(self, template_args: TemplateArgs) -> None:
        """What the chat template is told beside messages; before any op."""
        root = self._branch(0)
        root.transcript = Transcript(self._context.tokenizer, self._context.template, template_args)

    def use_adapter(self, name: str | None) -> None:
        """All calls that name none themselves use this adapter; before any op. Raises
        InvalidRequest."""
        adapter = self._context.adapter(name)
        if adapter is None:
            return
        self._factory = replace(self._factory, adapter=adapter)
        self._namespace = adapter.namespace(self._namespace)
        if self._leases is not None:
            self._leases.namespace = self._namespace

    def receive(self, ops: list[ir.Op], *, end: bool) -> None:
        """Append ops to their branches' logs. Raises InvalidProgram when they are out of order."""
        for op in ops:
            branch = self._branch(op.branch)
            if op.seq != branch.num_received:
                raise InvalidProgram.of("seq", op.seq, f"{branch.num_received} on {op.branch}")
            branch.num_received += 1
            branch.log.append(op)
            branch.places.note(op)
            if branch.error is None:
                self._note_needs(branch, op)
            if self._leases is not None and not isinstance(op, ir.Hint):
                self._leases.note_op(branch)
            if branch.error is not None:
                self._fail_forks_of([op], branch.error)
            if isinstance(op, ir.Drop):
                self._dropped[branch] = None
                if self._stop_if_dropped(branch):
                    self._stop_dropped()
            self._ready.append(branch)
        if end:
            self._has_ended = True
            for branch in [b for b in self._branches.values() if b.error is not None]:
                self._halt_joined(branch)

    def _note_needs(self, branch: Branch, op: ir.Op) -> None:
        """Who will need whom."""
        match op:
            case ir.Gen() | ir.Select() | ir.Embed():
                branch.num_calls += 1
            case ir.Var():
                self._branch(op.of_branch).num_wanted += 1
            case ir.Fork():
                branch.unforked += [self._branch(number) for number in op.children]
            case ir.Join():
                for child in map(self._branch, op.children):
                    child.num_wanted += 1
                    child.joined_by = branch

    def _forget_needs(self, branch: Branch) -> None:
        """It has stopped: what is left in its log needs nobody."""
        for op in branch.log:
            if isinstance(op, ir.Var):
                self._branch(op.of_branch).num_wanted -= 1
            elif isinstance(op, ir.Join):
                for child in map(self._branch, op.children):
                    child.num_wanted -= 1

    def reject(self, error: Exception) -> None:
        """End the whole program: it cannot go on."""
        self.cancel()
        payload = {"message": str(error), "kind": type(error).__name__, "op": "program"}
        self._emit(0, 0, wire.FAILED, payload)
        self._emit(0, 0, wire.DONE, None)

    def cancel(self) -> None:
        """Stop all calls; no more events. Nothing happens to one that has ended."""
        if self.is_done:
            return
        self._ready.clear()
        for branch in self._branches.values():
            self._abort_call(branch)
        self._finish()

    def end_gens(self) -> None:
        """Have all gens end now with what they have, and those to come with nothing."""
        self._gens_end = True
        for branch in list(self._branches.values()):
            self._end_gen(branch)

    def _end_gen(self, branch: Branch) -> None:
        if isinstance(branch.call, GenCall | SamplesCall):
            branch.call.end_now(self._context.queue)

    def _finish(self) -> None:
        """It needs nothing of the engine any more."""
        self.is_done = True
        if self._leases is not None:
            self._leases.end_all()
        self._context.queue.end_program(self.record)

    # --- carrying out -----------------------------------------------------------------------------

    def advance(self) -> None:
        """Carry out all that can be; emits DONE when the program has ended and nothing is left."""
        while not self.is_done:
            while self._ready:
                branch = self._ready.popleft()
                self._advance_branch(branch)
                if self._leases is not None and not self.is_done:
                    pause = self._pauses.get(branch)
                    self._leases.settle(branch, pause, is_last=self._has_ended)
            if not self._has_ended or self._num_calls:
                return
            if self._fail_stuck():
                continue
            self._finish()
            self._emit(0, 0, wire.DONE, None)

    def _advance_branch(self, branch: Branch) -> None:
        if branch.transcript is None or branch.call is not None or branch.is_waiting:
            return
        while branch.log and branch.error is None:
            op = branch.log[0]
            try:
                if not self._carry_out(branch, op):
                    return
            except StemmaError as error:
                field = getattr(error, "field", None)
                self._fail(branch, op, str(error), type(error).__name__, field=field)
                return
            if branch.log:  # a branch that was stopped meanwhile has none
                branch.log.popleft()
            if self._dropped and isinstance(op, ir.Var | ir.Join | ir.Fork):
                self._stop_dropped()

    def _carry_out(self, branch: Branch, op: ir.Op) -> bool:
        """Do one op; False when it has to wait (it stays at the head of the log)."""
        if branch.is_ended:
            raise InvalidProgram(f"an op follows the End of branch {branch.number}")
        if isinstance(op, ir.Text):
            branch.pending_text.append(op)
            self._pauses.pop(branch, None)
            return True
        if isinstance(op, ir.Pause):
            self._pauses[branch] = op
            return True
        if isinstance(op, ir.Hint):
            outcome = self._hinted(branch, op).payload(f"{branch.number}.{op.seq}")
            self._emit(branch.number, op.seq, wire.VALUE, {"value": outcome, "text": ""})
            return True
        self._pauses.pop(branch, None)
        self._flush_text(branch)
        match op:
            case ir.Tokens():
                self._emit_text_change(branch, op, self._append_tokens(branch, op))
            case ir.Gen():
                self._settle(branch)
                branch.call = self._factory.gen(branch, op, _BranchReport(self, branch))
                self._num_calls += 1
                if self._gens_end:
                    self._end_gen(branch)
                return False
            case ir.Select():
                self._settle(branch)
                branch.call = self._factory.select(branch, op, _BranchReport(self, branch))
                self._num_calls += 1
                return False
            case ir.Embed():
                self._settle(branch)
                branch.call = self._factory.embed(branch, op, _BranchReport(self, branch))
                self._num_calls += 1
                return False
            case ir.Var():
                return self._append_var(branch, op)
            case ir.RoleBegin():
                self._emit_text_change(branch, op, branch.begun.begin_role(op.role, op.fields))
            case ir.RoleEnd():
                self._emit_text_change(branch, op, branch.begun.end_role(self._find_replay))
            case ir.Fork():
                self._fork(branch, op)
            case ir.Join():
                return self._join(branch, op)
            case ir.End() | ir.Drop():
                branch.end_number = next(self._end_numbers)
                self._wake((branch.number, _END))
        return True

    def _flush_text(self, branch: Branch) -> None:
        """A text segment is all text between two ops that are none, however it was cut."""
        if not branch.pending_text:
            return
        text = "".join(op.text for op in branch.pending_text)
        if len(text) > self._context.max_text_chars:
            most = self._context.max_text_chars
            raise PromptTooLong(
                f"a text of {len(text)} characters; {most} are more than any prompt can hold",
                "text",
            )
        is_replay = all(op.is_replay for op in branch.pending_text)
        branch.pending_text.clear()
        transcript = branch.begun
        for hint in branch.asked:
            if hint.num_tokens is None:
                num_more = len(self._context.tokenizer.encode(text[: hint.num_chars]))
                hint.num_tokens = len(transcript.ids) + num_more
        known = self._find_replay(transcript.ids, text) if is_replay else None
        if known is not None:
            transcript.append_ids(known, text)
        else:
            transcript.append_text(text)

    def _find_replay(self, before: array[int], text: str) -> array[int] | None:
        """The ids that were generated as `text` behind `before`, where they are known."""
        return self._context.assistant_turns.find(self._namespace, before, text)

    def _append_tokens(self, branch: Branch, op: ir.Tokens) -> TextChange:
        largest, vocab_size = max(op.token_ids, default=0), self._context.vocab_size
        if largest >= vocab_size:
            raise InvalidProgram.of("token_ids", largest, f"an integer in [0, {vocab_size - 1}]")
        text = self._context.tokenizer.decode(op.token_ids)
        branch.begun.append_ids(op.token_ids, text, has_bos=True)
        return TextChange(text)

    def _hinted(self, branch: Branch, op: ir.Hint) -> Outcome:
        """On what has been computed of the branch, and the text behind it that will be."""
        if self._stated is None:
            return Outcome("rejected", "this runtime keeps no leases")
        action = Action(op.action, op.ttl_ms, op.priority, op.tier)
        outcome = self._carry_out_hint(branch, action, branch.begun.ids)
        if outcome.outcome != "missing" or op.action not in ("pin", "retain", "share"):
            return outcome
        num_chars = sum(len(text.text) for text in branch.pending_text)
        num_tokens = None if num_chars else len(branch.begun.ids)
        branch.asked.append(AskedHint(action, num_tokens, num_chars))
        return Outcome("deferred", "until the branch's next call has computed it")

    def _carry_out_asked(self, branch: Branch) -> None:
        """What was asked for of the prefix that a call has just computed."""
        asked, branch.asked = branch.asked, []
        for hint in asked:
            self._carry_out_hint(branch, hint.action, branch.begun.ids[: hint.num_tokens])

    def _carry_out_hint(self, branch: Branch, action: Action, token_ids: array[int]) -> Outcome:
        """Where the branch's last call has its KV, whose adapter may be its own."""
        assert self._stated is not None
        namespace = self._namespace if branch.namespace is None else branch.namespace
        return self._stated.carry_out(
            action, token_ids, namespace=namespace, account=self.record.tenant
        )

    def _settle(self, branch: Branch) -> None:
        """Something is generated now: the text before it is final."""
        branch.text_change = branch.begun.settle()

    def _emit_text_change(self, branch: Branch, op: ir.Op, change: TextChange) -> None:
        payload = {"text": change.text, "replace": change.replace}
        self._emit(branch.number, op.seq, wire.MARK, payload)

    # --- calls ------------------------------------------------------------------------------------

    def finish_call(
        self, branch: Branch, ids: array[int], tail: str, payload: dict[str, Any]
    ) -> None:
        """A call has ended well: append its ids (and text that survived a stop string)."""
        op = branch.log.popleft()
        branch.call = None
        self._num_calls -= 1
        branch.num_calls -= 1
        transcript = branch.begun
        text: str = payload["text"]
        before = transcript.ids[:] if transcript.open_role == "assistant" else None
        start = len(transcript.ids)
        if before is not None and start == transcript.content_start and not tail:
            self._context.assistant_turns.remember(self._namespace, before, text, ids)
        transcript.append_ids(ids, text[: len(text) - len(tail)])
        if tail:
            transcript.append_text(tail)
        self._set_value(branch, op, transcript.ids[start:], text)
        if self._response_id is not None:
            name = (self._namespace, self._response_id)
            self._context.responses.remember(name, transcript.ids[:])
            self._response_id = None
        if (text_change := branch.text_change) is not None:
            payload |= {"text": text_change.text + text, "replace": text_change.replace}
        self._emit(branch.number, op.seq, wire.VALUE, payload)
        self._carry_out_asked(branch)
        if self._leases is not None:
            self._leases.note_call_done(branch)
        self._ready.append(branch)
        self._on_ready(self)

    def fail_call(self, branch: Branch, message: str, kind: str) -> None:
        """A call has ended badly; what else it asked for is of no use."""
        assert branch.call is not None, "a call failed twice"
        self._abort_call(branch)
        self._fail(branch, branch.log[0], message, kind)
        self._on_ready(self)

    def _abort_call(self, branch: Branch) -> None:
        call, branch.call = branch.call, None
        if call is not None:
            self._num_calls -= 1
            call.abort(self._context.queue)

    def emit_delta(self, branch: Branch, delta: Delta) -> None:
        """Text of the branch's current call, as it comes."""
        self._emit(branch.number, branch.log[0].seq, wire.DELTA, delta)

    # --- data flow --------------------------------------------------------------------------------

    def _append_var(self, branch: Branch, op: ir.Var) -> bool:
        key = (op.of_branch, op.of_seq)
        value = self._values.get(key)
        if value is None:
            source = self._branches.get(op.of_branch)
            if source is not None and source.error is not None:
                raise InvalidProgram(f"the value it appends was never made: {source.error}")
            return self._wait_for(branch, key)
        self._branch(op.of_branch).num_wanted -= 1
        branch.begun.append_ids(value.ids, value.text)
        self._set_value(branch, op, value.ids, value.text)
        payload = {"value": value.text, "text": value.text}
        self._emit(branch.number, op.seq, wire.VALUE, payload)
        return True

    def _set_value(self, branch: Branch, op: ir.Op, ids: array[int], text: str) -> None:
        self._values[branch.number, op.seq] = Value(ids, text)
        self._wake((branch.number, op.seq))

    def _fork(self, branch: Branch, op: ir.Fork) -> None:
        children = [self._branch(number) for number in op.children]
        self._num_forked_tokens += len(branch.begun.ids) * len(children)
        if self._num_forked_tokens > MAX_FORKED_TOKENS:
            raise InvalidProgram(
                f"the forks of this program begin with {self._num_forked_tokens} tokens together; "
                f"at most {MAX_FORKED_TOKENS}"
            )
        for index, child in enumerate(children):
            if child.transcript is not None or child is branch:
                allowed = "branches that were not forked before"
                raise InvalidProgram.of("children", child.number, allowed)
            child.path = (*branch.path, (branch.places.of(op), index))
            child.transcript = branch.begun.copy()
            child.fork_length = len(child.transcript.ids)
            child.namespace = branch.namespace
            self._ready.append(child)
        del branch.unforked[: len(children)]
        if self._leases is not None:
            self._leases.note_fork(branch, children)

    def _join(self, branch: Branch, op: ir.Join) -> bool:
        children = [self._branch(number) for number in op.children]
        winners = self._first_to_end(branch, children, op.num_needed or len(children))
        if winners is None:
            return False
        for child in children:
            child.num_wanted -= 1
        text = ""
        if op.mode == "concate_and_append":
            text = self._append_children(branch, [children[index] for index in winners])
        value = None if op.num_needed is None else winners
        self._emit(branch.number, op.seq, wire.VALUE, {"value": value, "text": text})
        return True

    def _first_to_end(
        self, branch: Branch, children: list[Branch], num_needed: int
    ) -> list[int] | None:
        """Indices of the first `num_needed` children that ended well; the others are stopped. None
        while it has to wait."""
        failed = [child for child in children if child.error is not None]
        if failed and num_needed == len(children):
            raise InvalidProgram(f"a joined branch failed: {failed[0].error}")
        if len(children) - len(failed) < num_needed:
            what = f"{num_needed} of {len(children)} branches are needed"
            raise InvalidProgram(f"{what}, {len(failed)} failed: {failed[0].error}")
        ended = [i for i, child in enumerate(children) if child.is_ended and child.error is None]
        if len(ended) < num_needed:
            if not branch.num_awaited:
                branch.num_awaited = num_needed - len(ended)
                for child in children:
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

    def _append_children(self, branch: Branch, children: list[Branch]) -> str:
        whole = ""
        for child in children:
            ids = child.begun.ids[child.fork_length :]
            if not child.fork_length:  # it began with nothing, and so with a BOS of its own
                bos = self._context.tokenizer.bos_ids
                ids = ids[len(bos) :] if ids[: len(bos)] == array("i", bos) else ids
            text = self._context.tokenizer.decode(ids, skip_special=False)
            branch.begun.append_ids(ids, text)
            whole += text
        return whole

    def _wait_for(self, branch: Branch, key: tuple[int, int]) -> bool:
        number, seq = key
        self._waiters.setdefault(number, {}).setdefault(seq, []).append(branch)
        branch.is_waiting = True
        return False

    def _wake(self, key: tuple[int, int]) -> None:
        number, seq = key
        for branch in self._waiters.get(number, {}).pop(seq, ()):
            if seq == _END and branch.num_awaited > 1 and self._branch(number).error is None:
                branch.num_awaited -= 1  # its join needs more
                continue
            branch.is_waiting = False
            self._ready.append(branch)

    # --- failure ----------------------------------------------------------------------------------

    def _halt_trees(self, roots: list[Branch], reason: str) -> None:
        """Stop branches and those forked from them: nobody waits for what they make."""
        for root in roots:
            self._halt(root, reason)
        paths = {root.path for root in roots if root.path}  # one that was never forked has none
        depths = {len(path) for path in paths}
        for branch in list(self._branches.values()):
            if any(branch.path[:depth] in paths for depth in depths):
                self._halt(branch, reason)

    def _halt(self, branch: Branch, reason: str) -> None:
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

    def _stop_dropped(self) -> None:
        """Stop the branches that nobody reads and that nothing else needs."""
        has_stopped = True
        while has_stopped:  # one that has stopped needs no others
            has_stopped = False
            for branch in list(self._dropped):
                has_stopped = self._stop_if_dropped(branch) or has_stopped

    def _stop_if_dropped(self, branch: Branch) -> bool:
        """Whether this branch, which nobody reads, has been stopped now."""
        if branch.is_ended or branch.error is not None:
            del self._dropped[branch]
            return False
        if branch.num_wanted or any(child.error is None for child in branch.unforked):
            return False
        del self._dropped[branch]
        self._halt(branch, "nobody reads this branch any more")
        return True

    def _fail(
        self, branch: Branch, op: ir.Op, message: str, kind: str, *, field: str | None = None
    ) -> None:
        """Stop a branch at `op`, and with it what can only follow from it."""
        if branch.error is not None:
            return
        self._stop(branch, op, message, kind, field)
        self._fail_forks_of(branch.log, branch.error or "")
        self._stop_dropped()
        if self._has_ended:
            self._halt_joined(branch)

    def _halt_joined(self, failed: Branch) -> None:
        """The client says no more: nobody waits for what a failed branch would have joined."""
        joined = [op for op in failed.log if isinstance(op, ir.Join)]
        children = [self._branch(number) for op in joined for number in op.children]
        self._halt_trees([c for c in children if c.error is None], "the branch that joins failed")

    def _stop(
        self, branch: Branch, op: ir.Op, message: str, kind: str, field: str | None = None
    ) -> None:
        if self._leases is not None:
            self._leases.end(branch)
        name = getattr(op, "name", "") or op.kind
        message = message[:MAX_ERROR_CHARS]
        branch.error = f"{name}: {message}" + (f" (at {op.source})" if op.source else "")
        payload = {"message": message, "kind": kind, "op": name, "source": op.source}
        if field is not None:
            payload["field"] = field
        seq = op.seq if op.branch == branch.number else 0  # it stops for another's op: all of it
        self._emit(branch.number, seq, wire.FAILED, payload)
        self._forget_needs(branch)
        self._wake_all_of(branch)

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

    def _wake_all_of(self, branch: Branch) -> None:
        for seq in list(self._waiters.get(branch.number, ())):
            self._wake((branch.number, seq))

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

    def _branch(self, number: int) -> Branch:
        if number not in self._branches:
            self._branches[number] = Branch(number)
        return self._branches[number]


_END = -1  # in a waiter's key: the branch's End, where else a seq stands


@dataclass(frozen=True, slots=True)
class _BranchReport:
    """A call's report goes to its branch."""

    session: ProgramSession
    branch: Branch

    def delta(self, delta: Delta) -> None:
        self.session.emit_delta(self.branch, delta)

    def finished(self, ids: array[int], tail: str, payload: dict[str, Any]) -> None:
        self.session.finish_call(self.branch, ids, tail, payload)

    def failed(self, message: str, kind: str) -> None:
        self.session.fail_call(self.branch, message, kind)
