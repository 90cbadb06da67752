"""A program carried out in this process: each branch's log, op by op, with a call for each gen.

The semantics are the runtime's (`runtime/programs/session.py`): a branch stops at a gen or select
until the call has ended, at a `Var` until the value is there, at a `Join` until the children have
ended. There is no KV here: a `Pause` passes, a `Hint` is the server's to answer. One asyncio loop
owns it.

With `num_spec_tokens` one answer may serve several gens (`speculation`). Where the endpoint goes on
from any text, what an answer has beyond a gen's stop is kept for as long as the program appends
just that. Where a call can only begin a message, the gens of an assistant message are put off until
it ends, or until the program waits, and are then read from one answer.

One long class, as all ops work on the same tables: branches, values, who waits for what.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from ...errors import InvalidProgram, StemmaError
from ..protocol import ir, wire
from .branch import Branch, Pattern, abort, hint_target, is_whole_message, transcript_of
from .calls import Filling, OnDelta, Outcome
from .shared_answer import is_plain, no_call, outcome_of, sampling_of
from .speculation import Draft, Filled, Slot, matched
from .transcript import Prompt, Transcript

Work = Callable[[], Awaitable[Any]]  # not begun: a branch may be stopped before it is
Emit = Callable[[int, int, str, Any], None]  # branch, seq, kind, payload
MAX_ERROR_CHARS = 4096  # joins of failed joins quote each other


class Asks(Protocol):
    """What a session needs of a `Caller`."""

    def can_continue(self, prompt: Prompt) -> bool: ...

    async def gen(
        self, prompt: Prompt, params: ir.GenParams, seed: int, on_delta: OnDelta | None = None
    ) -> Outcome: ...

    async def select(self, prompt: Prompt, op: ir.Select) -> Outcome: ...

    async def hint(self, target: dict[str, str] | None, op: ir.Hint) -> dict[str, Any]: ...

    async def draft(
        self, prompt: Prompt, params: ir.GenParams, seed: int, num_tokens: int
    ) -> tuple[Draft, dict[str, Any]]: ...

    async def fill(
        self,
        prompt: Prompt,
        terms: list[str | Slot],
        params: ir.GenParams,
        seed: int,
        num_tokens: int,
    ) -> Filling: ...


class Session:
    """One program. Lifetime: from its first ops to `DONE`, or until cancelled."""

    def __init__(
        self,
        caller: Asks,
        root: Transcript,
        emit: Emit,
        *,
        seed: int,
        instance: int = 0,
        is_streaming: bool = False,
        num_spec_tokens: int | None = None,
    ) -> None:
        """`root`: the empty transcript of its first branch."""
        self._caller = caller
        self._emit = emit
        self._seed = seed
        self._instance = instance
        self._is_streaming = is_streaming
        self._num_spec_tokens = num_spec_tokens
        self._started = time.monotonic()
        self._branches: dict[int, Branch] = {}
        self._values: dict[tuple[int, int], str] = {}
        self._waiters: dict[tuple[int, int], list[Branch]] = {}  # (branch, seq or _END)
        self._endings: list[int] = []  # branches that ended well, in that order
        self._ready: deque[Branch] = deque()
        self._has_ended = False
        self.is_done = False
        self._branch(0).transcript = root

    # --- input ------------------------------------------------------------------------------------

    def receive(self, ops: Iterable[ir.Op]) -> None:
        """Append ops to their branches' logs."""
        for op in ops:
            branch = self._branch(op.branch)
            if op.seq != branch.num_received:
                raise InvalidProgram.of("seq", op.seq, f"{branch.num_received} on {op.branch}")
            branch.num_received += 1
            branch.is_flushed = False
            branch.log.append(op)
            branch.places.note(op)
            if branch.error is not None:
                self._fail_forks_of([op], branch.error)
            self._ready.append(branch)
            if isinstance(op, ir.Drop) and not self._is_wanted(branch):
                self._stop_quietly(branch)

    def flush(self, *, end: bool) -> None:
        """The program waits for what it has sent; `end`: it sends no more."""
        self._has_ended = self._has_ended or end
        for branch in self._branches.values():
            branch.is_flushed = True
            if branch.has_open_gens:
                self._ready.append(branch)

    def reject(self, error: Exception) -> None:
        """End the whole program: it cannot go on."""
        self.cancel()
        payload = {"message": str(error), "kind": type(error).__name__, "op": "program"}
        self._emit(0, 0, wire.FAILED, payload)
        self._emit(0, 0, wire.DONE, None)

    def cancel(self) -> None:
        """Stop all calls; no more events."""
        self.is_done = True
        self._ready.clear()
        for branch in self._branches.values():
            abort(branch)

    # --- carrying out -----------------------------------------------------------------------------

    def advance(self) -> None:
        """Carry out all that can be; emits DONE when the program has ended and nothing is left."""
        while not self.is_done:
            while self._ready:
                self._advance_branch(self._ready.popleft())
            if not self._has_ended or any(b.call is not None for b in self._branches.values()):
                return
            if self._fail_stuck():
                continue
            self.is_done = True
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
                self._fail(branch, op, error)
                return
            branch.log.popleft()
        if branch.has_open_gens and branch.is_flushed and branch.error is None:
            self._resolve(branch)

    def _carry_out(self, branch: Branch, op: ir.Op) -> bool:
        """Do one op; False when it has to wait (it stays at the head of the log)."""
        if branch.is_ended:
            raise InvalidProgram(f"an op follows the End of branch {branch.number}")
        if branch.has_open_gens and not isinstance(op, ir.Text | ir.Gen | ir.Pause):
            self._resolve(branch)
            return False
        match op:
            case ir.Text():
                self._append_text(branch, op.text)
            case ir.Tokens():
                raise InvalidProgram(
                    "token ids cannot be sent with text over HTTP; use text, or a runtime over "
                    "ZeroMQ"
                )
            case ir.Gen():
                return self._gen(branch, op)
            case ir.Select():
                if op.lora_path:
                    allowed = "left out for an endpoint over HTTP; name the adapter as its model"
                    raise InvalidProgram.of("lora_path", op.lora_path, allowed)
                self._select(branch, op)
                return False
            case ir.Var():
                return self._append_var(branch, op)
            case ir.RoleBegin():
                if op.fields is not None:
                    raise InvalidProgram.of("fields", op.fields[:100], "left out for an endpoint")
                branch.draft = branch.pattern = None
                self._mark(branch, op, transcript_of(branch).begin_role(op.role))
            case ir.RoleEnd():
                branch.draft = branch.pattern = None
                self._mark(branch, op, transcript_of(branch).end_role())
            case ir.Fork():
                self._fork(branch, op)
            case ir.Join():
                return self._join(branch, op)
            case ir.Hint():
                self._hint(branch, op)
                return False
            case ir.Pause():
                pass
            case ir.Drop():
                self._stop_quietly(branch)
                return False
            case ir.End():
                branch.is_ended = True
                self._endings.append(branch.number)
                self._wake((branch.number, _END))
        return True

    def _mark(self, branch: Branch, op: ir.Op, text: str) -> None:
        self._emit(branch.number, op.seq, wire.MARK, {"text": text, "replace": False})

    def _append_text(self, branch: Branch, text: str) -> None:
        if branch.has_open_gens:
            assert branch.pattern is not None
            branch.pattern.terms.append(text)
            return
        transcript_of(branch).append_text(text)
        if branch.pattern is not None:
            branch.pattern.terms.append(text)
        if branch.draft is not None:
            branch.draft = branch.draft.after(text)

    # --- calls ------------------------------------------------------------------------------------

    def _gen(self, branch: Branch, op: ir.Gen) -> bool:
        """Start a call, or take the value from an answer, or put it off; False: wait."""
        if self._num_spec_tokens is None:
            self._start(branch, op, self._ordinary_gen(branch, op))
            return False
        if self._must_put_off(branch):
            self._put_off(branch, op)
            return True
        prompt = transcript_of(branch).prompt()
        if not is_plain(op.params):
            branch.draft = None
            self._start(branch, op, self._ordinary_gen(branch, op))
            return False
        draft = branch.draft if branch.draft and branch.draft.sampling == sampling_of(op) else None
        found = draft.take(op.params.stop or ()) if draft is not None else None
        if found is None:
            self._start(branch, op, partial(self._drafted_gen, branch, op, prompt))
            return False
        assert draft is not None
        self._finish(branch, op, outcome_of(found, no_call(), is_whole=True))
        branch.draft = draft.after(found.text)
        return True

    def _ordinary_gen(self, branch: Branch, op: ir.Gen) -> Work:
        def on_delta(text: str) -> None:
            self._emit(branch.number, op.seq, wire.DELTA, text)

        prompt, seed = transcript_of(branch).prompt(), self._derive_seed(branch, op)
        stream_to = on_delta if self._is_streaming else None
        return partial(self._caller.gen, prompt, op.params, seed, stream_to)

    async def _drafted_gen(self, branch: Branch, op: ir.Gen, prompt: Prompt) -> Outcome:
        """Ask beyond the gen's stop, and keep what is behind it."""
        num, seed = self._num_spec_tokens or 0, self._derive_seed(branch, op)
        draft, meta = await self._caller.draft(prompt, op.params, seed, num)
        found = draft.take(op.params.stop or ()) or Filled(draft.text)
        rest = draft.after(found.text)
        branch.draft = rest and replace(rest, sampling=sampling_of(op))
        return outcome_of(found, meta, is_whole=draft.is_whole)

    def _select(self, branch: Branch, op: ir.Select) -> None:
        branch.draft = branch.pattern = None
        prompt = transcript_of(branch).prompt()
        self._start(branch, op, partial(self._caller.select, prompt, op))

    def _hint(self, branch: Branch, op: ir.Hint) -> None:
        def done(outcome: dict[str, Any]) -> None:
            branch.log.popleft()
            self._emit(branch.number, op.seq, wire.VALUE, {"value": outcome, "text": ""})

        work = partial(self._caller.hint, hint_target(branch), op)
        branch.call = asyncio.create_task(self._run(branch, op, work, done))

    def _start(self, branch: Branch, op: ir.Op, work: Work) -> None:
        """Run a call; its op stays at the head of the log."""

        def done(outcome: Outcome) -> None:
            branch.log.popleft()
            self._finish(branch, op, outcome)

        branch.call = asyncio.create_task(self._run(branch, op, work, done))

    async def _run(
        self, branch: Branch, op: ir.Op, work: Work, done: Callable[[Any], None]
    ) -> None:
        try:
            result = await work()
        except Exception as error:  # also a defect of ours ends the branch, and not in silence
            branch.call = None
            self._fail(branch, op, error)
        else:
            branch.call = None
            done(result)
            self._ready.append(branch)
        self.advance()

    def _finish(self, branch: Branch, op: ir.Op, outcome: Outcome) -> None:
        """A value is there: append it and say so."""
        transcript_of(branch).append_text(outcome.text)
        self._tell(branch, op, outcome)

    def _tell(self, branch: Branch, op: ir.Op, outcome: Outcome) -> None:
        self._set_value(branch, op, outcome.text)
        metas = outcome.meta if isinstance(outcome.meta, list) else [outcome.meta]
        for meta in metas:
            branch.last_reply_id = meta.get("id") or branch.last_reply_id
            meta["start_s"] = time.monotonic() - self._started - meta.get("latency_s", 0.0)
        payload = {"value": outcome.value, "text": outcome.text, "meta": outcome.meta}
        self._emit(branch.number, op.seq, wire.VALUE, payload)

    def _derive_seed(self, branch: Branch, op: ir.Gen) -> int:
        """That of the gen, else hash(program seed, instance, branch path, op) as in the runtime."""
        if op.params.seed is not None:
            return op.params.seed
        key = repr((self._seed, self._instance, branch.path, branch.places.of(op))).encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) >> 1

    # --- gens that are put off --------------------------------------------------------------------

    def _must_put_off(self, branch: Branch) -> bool:
        """Whether a call could not go on from what the message has so far, or could not after
        this gen."""
        if branch.has_open_gens:
            return True
        prompt = transcript_of(branch).prompt()
        return not self._caller.can_continue(prompt)

    def _put_off(self, branch: Branch, op: ir.Gen) -> None:
        if branch.pattern is None:
            prompt = transcript_of(branch).prompt()
            begun = [prompt.answer] if prompt.answer else []
            branch.pattern = Pattern(replace(prompt, answer=""), [*begun])
        pattern = branch.pattern
        first = pattern.gens[0] if pattern.gens else op
        if sampling_of(first) != sampling_of(op):
            raise InvalidProgram(
                "the gens of one assistant message share one answer under num_api_spec_tokens: "
                "give them the same temperature, top_p, penalties and seed"
            )
        pattern.terms.append(Slot(op.params.stop or ()))
        pattern.gens.append(op)

    def _resolve(self, branch: Branch) -> None:
        """Get the values of all gens that were put off, by a call if need be."""
        pattern = branch.pattern
        assert pattern is not None
        first = pattern.gens[0]
        work: Work
        done: Callable[[Branch, Pattern, Any], None]
        if is_whole_message(branch, pattern):
            num = first.params.max_tokens or self._num_spec_tokens
            params = replace(first.params, max_tokens=num)
            seed = self._derive_seed(branch, first)
            work = partial(self._caller.gen, pattern.prompt, params, seed)
            done = self._done_alone
        else:
            work, done = partial(self._fill, branch, pattern), self._done_filling
        run = self._run(branch, first, work, lambda result: done(branch, pattern, result))
        branch.call = asyncio.create_task(run)

    async def _fill(self, branch: Branch, pattern: Pattern) -> Filling:
        for op in pattern.gens:
            if not is_plain(op.params):
                raise InvalidProgram(
                    "n, max_tokens, min_tokens, logprobs, stop_regex, stop_token_ids, deadline "
                    "and constraints need a call of the gen's own; under num_api_spec_tokens only "
                    "a gen that is the whole assistant message has one on this endpoint"
                )
        if pattern.draft is not None:
            filled = matched(pattern.terms, pattern.draft.text)
            if filled is not None:
                return Filling(filled, pattern.draft, no_call())
        first, num = pattern.gens[0], self._num_spec_tokens or 0
        seed = self._derive_seed(branch, first)
        return await self._caller.fill(pattern.prompt, pattern.terms, first.params, seed, num)

    def _done_alone(self, branch: Branch, pattern: Pattern, outcome: Outcome) -> None:
        self._append_pattern(branch, pattern, [outcome])

    def _done_filling(self, branch: Branch, pattern: Pattern, filling: Filling) -> None:
        is_whole = filling.draft.is_whole
        metas = [filling.meta, *(no_call() for _ in filling.filled[1:])]
        found = zip(filling.filled, metas)
        outcomes = [outcome_of(filled, meta, is_whole=is_whole) for filled, meta in found]
        pattern.draft = filling.draft
        self._append_pattern(branch, pattern, outcomes)

    def _append_pattern(self, branch: Branch, pattern: Pattern, outcomes: list[Outcome]) -> None:
        """Everything from the first gen on goes to the transcript, and is text for later ones."""
        values, tell = iter(outcomes), list(zip(pattern.gens, outcomes, strict=True))
        begin = next(i for i, term in enumerate(pattern.terms) if isinstance(term, Slot))
        texts = [t if isinstance(t, str) else next(values).text for t in pattern.terms]
        pattern.terms, pattern.gens = list(texts), []
        transcript_of(branch).append_text("".join(texts[begin:]))
        for op, outcome in tell:
            self._tell(branch, op, outcome)

    # --- data flow --------------------------------------------------------------------------------

    def _append_var(self, branch: Branch, op: ir.Var) -> bool:
        key = (op.of_branch, op.of_seq)
        value = self._values.get(key)
        if value is None:
            source = self._branches.get(op.of_branch)
            if source is not None and source.error is not None:
                raise InvalidProgram(f"the value it appends was never made: {source.error}")
            if source is not None and source.is_stopped:
                raise InvalidProgram("the value it appends was never made: its branch was stopped")
            return self._wait_for(branch, key)
        self._append_text(branch, value)
        self._set_value(branch, op, value)
        self._emit(branch.number, op.seq, wire.VALUE, {"value": value, "text": value})
        return True

    def _set_value(self, branch: Branch, op: ir.Op, text: str) -> None:
        self._values[branch.number, op.seq] = text
        self._wake((branch.number, op.seq))

    def _fork(self, branch: Branch, op: ir.Fork) -> None:
        for index, number in enumerate(op.children):
            child = self._branch(number)
            if child.transcript is not None or child is branch:
                raise InvalidProgram.of("children", number, "branches that were not forked before")
            child.path = (*branch.path, (branch.places.of(op), index))
            child.transcript = transcript_of(branch).copy()
            child.fork_length = len(child.transcript.pieces)
            child.draft, child.last_reply_id = branch.draft, branch.last_reply_id
            self._ready.append(child)

    def _join(self, branch: Branch, op: ir.Join) -> bool:
        children = [self._branch(number) for number in op.children]
        counted = self._counted(branch, op, children)
        if counted is None:
            return False
        text = ""
        if op.mode == "concate_and_append":
            branch.draft = branch.pattern = None
            text = "".join(self._append_child(branch, children[index]) for index in counted)
        value = None if op.num_needed is None else counted
        self._emit(branch.number, op.seq, wire.VALUE, {"value": value, "text": text})
        return True

    def _counted(self, branch: Branch, op: ir.Join, children: list[Branch]) -> list[int] | None:
        """Indices of the children that count, once they have ended; None: wait.

        Raises InvalidProgram when too few can still end well.
        """
        num_needed = len(children) if op.num_needed is None else op.num_needed
        lost = [c for c in children if c.error is not None or (c.is_stopped and not c.is_ended)]
        if len(children) - len(lost) < num_needed:
            reason = next((c.error for c in lost if c.error), "it was dropped")
            raise InvalidProgram(f"a joined branch failed: {reason}")
        places = {child.number: index for index, child in enumerate(children)}
        ended = [places[number] for number in self._endings if number in places]
        if len(ended) < num_needed:
            for child in children:
                if not child.is_ended and child not in lost:
                    self._waiters.setdefault((child.number, _END), []).append(branch)
            branch.is_waiting = True
            return None
        counted = sorted(ended[:num_needed])
        for index, child in enumerate(children):
            if index not in counted:
                self._stop_quietly(child)
        return counted

    def _append_child(self, branch: Branch, child: Branch) -> str:
        return transcript_of(branch).append(transcript_of(child).pieces[child.fork_length :])

    def _wait_for(self, branch: Branch, key: tuple[int, int]) -> bool:
        self._waiters.setdefault(key, []).append(branch)
        branch.is_waiting = True
        return False

    def _wake(self, key: tuple[int, int]) -> None:
        for branch in self._waiters.pop(key, ()):
            branch.is_waiting = False
            self._ready.append(branch)

    # --- stopping ---------------------------------------------------------------------------------

    def _is_wanted(self, branch: Branch) -> bool:
        """Whether others wait, or will, for what the branch still makes."""
        if any(isinstance(op, ir.Fork) for op in branch.log):
            return True
        for other in self._branches.values():
            for op in other.log:
                if isinstance(op, ir.Var) and op.of_branch == branch.number != other.number:
                    return True
                if isinstance(op, ir.Join) and branch.number in op.children:
                    return True
        return False

    def _stop_quietly(self, branch: Branch) -> None:
        """End a branch that nobody reads: its call is closed, its log forgotten."""
        if branch.is_stopped or branch.error is not None:
            return
        abort(branch)
        forks = [op for op in branch.log if isinstance(op, ir.Fork)]
        branch.is_stopped, branch.is_waiting = True, False
        branch.pattern = None
        branch.log.clear()
        self._fail_forks_of(forks, "the branch it forks from was stopped")
        self._wake_all_of(branch)

    # --- failure ----------------------------------------------------------------------------------

    def _fail(self, branch: Branch, op: ir.Op, error: Exception) -> None:
        """Stop a branch at `op`, and with it what can only follow from it."""
        if branch.error is not None:
            return
        known = isinstance(error, StemmaError)
        message = str(error) if known else f"{type(error).__name__}: {error}"
        self._stop(branch, op, message, type(error).__name__ if known else "EngineError")
        self._fail_forks_of(branch.log, branch.error or "")

    def _stop(
        self, branch: Branch, op: ir.Op, message: str, kind: str, *, seq: int | None = None
    ) -> None:
        """`seq`: from where on the branch has no values, if not from `op` on."""
        name = getattr(op, "name", "") or op.kind
        message = message[:MAX_ERROR_CHARS]
        branch.error = f"{name}: {message}" + (f" (at {op.source})" if op.source else "")
        payload = {"message": message, "kind": kind, "op": name, "source": op.source}
        self._emit(branch.number, op.seq if seq is None else seq, wire.FAILED, payload)
        self._wake_all_of(branch)

    def _fail_forks_of(self, log: Iterable[ir.Op], reason: str) -> None:
        """Fail the branches that will never be forked, and those forked from them, however deep."""
        forks = [op for op in log if isinstance(op, ir.Fork)]
        while forks:
            fork = forks.pop()
            for child in map(self._branch, fork.children):
                if child.transcript is None and child.error is None:
                    message = f"the branch it forks from failed: {reason}"
                    self._stop(child, fork, message, "ProgramError", seq=0)
                    child.error = reason  # the cause, not a chain of consequences
                    forks += [op for op in child.log if isinstance(op, ir.Fork)]

    def _wake_all_of(self, branch: Branch) -> None:
        for key in [key for key in self._waiters if key[0] == branch.number]:
            self._wake(key)

    def _fail_stuck(self) -> bool:
        """The client sends no more: a branch that still waits waits forever."""
        stuck = [b for b in self._branches.values() if not b.is_idle and b.log]
        for branch in stuck:
            branch.is_waiting = False
            error = InvalidProgram("it waits for something that never comes")
            self._fail(branch, branch.log[0], error)
        return bool(stuck)

    def _branch(self, number: int) -> Branch:
        if number not in self._branches:
            self._branches[number] = Branch(number)
        return self._branches[number]


_END = -1  # in a waiter's key: the branch's End, where else a seq stands
