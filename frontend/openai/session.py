"""A program carried out in this process: each branch's log, op by op, with a call for each gen.

The semantics are the runtime's (`runtime/programs/session.py`): a branch stops at a gen or select
until the call has ended, at a `Var` until the value is there, at a `Join` until the children have
ended. There is no KV here: a `Pause` passes, a `Hint` is rejected. One asyncio loop owns it.

With `num_spec_tokens` one answer may serve several gens (`speculation`). Where the endpoint goes on
from any text, what an answer has beyond a gen's stop is kept for as long as the program appends
just that. Where a call can only begin a message, the gens of an assistant message are put off until
it ends, or until the program waits, and are then read from one answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ...errors import InvalidProgram, StemmaError
from .. import ir, wire
from .calls import Filling, OnDelta, Outcome
from .speculation import Draft, Filled, Slot, matched
from .transcript import Prompt, Transcript

Emit = Callable[[int, int, str, Any], None]  # branch, seq, kind, payload
MAX_ERROR_CHARS = 4096  # joins of failed joins quote each other


class Asks(Protocol):
    """What a session needs of a `Caller`."""

    def can_continue(self, prompt: Prompt) -> bool: ...

    async def gen(
        self, prompt: Prompt, params: ir.GenParams, seed: int, on_delta: OnDelta | None = None
    ) -> Outcome: ...

    async def select(self, prompt: Prompt, op: ir.Select) -> Outcome: ...

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


@dataclass(slots=True, eq=False)
class Pattern:
    """Text and gens of an assistant message whose gens have no values yet."""

    prompt: Prompt  # up to where the message begins
    terms: list[str | Slot] = field(default_factory=list)
    gens: list[ir.Gen] = field(default_factory=list)  # of the slots, in order
    draft: Draft | None = None  # the answer that served the message's earlier gens


@dataclass(slots=True, eq=False)
class Branch:
    """One branch: its log from the current op on, and its transcript once it has begun."""

    number: int
    path: tuple[tuple[int, int], ...] = ()  # (seq of the fork, index) from the root down
    log: deque[ir.Op] = field(default_factory=deque)
    num_received: int = 0
    transcript: Transcript | None = None  # None: not forked yet
    fork_length: int = 0  # pieces of the transcript when it began
    call: asyncio.Task[None] | None = None
    draft: Draft | None = None
    pattern: Pattern | None = None
    is_flushed: bool = False  # whether the program waits for what it has sent
    is_waiting: bool = False
    is_ended: bool = False
    is_stopped: bool = False  # dropped, or not among the first of a join
    error: str | None = None

    @property
    def has_open_gens(self) -> bool:
        """Whether gens are put off."""
        return self.pattern is not None and bool(self.pattern.gens)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do with what has arrived."""
        return self.error is not None or (not self.log and not self.has_open_gens)


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
            _abort(branch)

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
        if branch.has_open_gens and not isinstance(op, ir.Text | ir.Gen | ir.Pause | ir.Hint):
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
                self._select(branch, op)
                return False
            case ir.Var():
                return self._append_var(branch, op)
            case ir.RoleBegin():
                branch.draft = branch.pattern = None
                self._mark(branch, op, _transcript(branch).begin_role(op.role))
            case ir.RoleEnd():
                branch.draft = branch.pattern = None
                self._mark(branch, op, _transcript(branch).end_role())
            case ir.Fork():
                self._fork(branch, op)
            case ir.Join():
                return self._join(branch, op)
            case ir.Hint():
                self._emit(branch.number, op.seq, wire.VALUE, _rejected(op))
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
        _transcript(branch).append_text(text)
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
        prompt = _transcript(branch).prompt()
        if not _is_plain(op.params):
            branch.draft = None
            self._start(branch, op, self._ordinary_gen(branch, op))
            return False
        draft = branch.draft if branch.draft and branch.draft.sampling == _sampling(op) else None
        found = draft.take(op.params.stop or ()) if draft is not None else None
        if found is None:
            self._start(branch, op, self._drafted_gen(branch, op, prompt))
            return False
        assert draft is not None
        self._finish(branch, op, _served(found, self._started))
        branch.draft = draft.after(found.text)
        return True

    def _ordinary_gen(self, branch: Branch, op: ir.Gen) -> Coroutine[Any, Any, Outcome]:
        def on_delta(text: str) -> None:
            self._emit(branch.number, op.seq, wire.DELTA, text)

        prompt, seed = _transcript(branch).prompt(), self._derive_seed(branch, op)
        return self._caller.gen(prompt, op.params, seed, on_delta if self._is_streaming else None)

    async def _drafted_gen(self, branch: Branch, op: ir.Gen, prompt: Prompt) -> Outcome:
        """Ask beyond the gen's stop, and keep what is behind it."""
        num, seed = self._num_spec_tokens or 0, self._derive_seed(branch, op)
        draft, meta = await self._caller.draft(prompt, op.params, seed, num)
        found = draft.take(op.params.stop or ()) or Filled(draft.text)
        rest = draft.after(found.text)
        branch.draft = rest and replace(rest, sampling=_sampling(op))
        return _outcome_of(found, meta, is_whole=draft.is_whole)

    def _select(self, branch: Branch, op: ir.Select) -> None:
        branch.draft = branch.pattern = None
        prompt = _transcript(branch).prompt()
        self._start(branch, op, self._caller.select(prompt, op))

    def _start(self, branch: Branch, op: ir.Op, work: Coroutine[Any, Any, Outcome]) -> None:
        """Run a call; its op stays at the head of the log."""

        def done(outcome: Outcome) -> None:
            branch.log.popleft()
            self._finish(branch, op, outcome)

        branch.call = asyncio.create_task(self._run(branch, op, work, done))

    async def _run(
        self,
        branch: Branch,
        op: ir.Op,
        work: Coroutine[Any, Any, Any],
        done: Callable[[Any], None],
    ) -> None:
        try:
            result = await work
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
        _transcript(branch).append_text(outcome.text)
        self._tell(branch, op, outcome)

    def _tell(self, branch: Branch, op: ir.Op, outcome: Outcome) -> None:
        self._set_value(branch, op, outcome.text)
        metas = outcome.meta if isinstance(outcome.meta, list) else [outcome.meta]
        for meta in metas:
            meta["start_s"] = time.monotonic() - self._started - meta.get("latency_s", 0.0)
        payload = {"value": outcome.value, "text": outcome.text, "meta": outcome.meta}
        self._emit(branch.number, op.seq, wire.VALUE, payload)

    def _derive_seed(self, branch: Branch, op: ir.Gen) -> int:
        """That of the gen, else hash(program seed, instance, branch path, op) as in the runtime."""
        if op.params.seed is not None:
            return op.params.seed
        key = repr((self._seed, self._instance, branch.path, op.seq)).encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) >> 1

    # --- gens that are put off --------------------------------------------------------------------

    def _must_put_off(self, branch: Branch) -> bool:
        """Whether a call could not go on from what the message has so far, or could not after
        this gen."""
        if branch.has_open_gens:
            return True
        prompt = _transcript(branch).prompt()
        return not self._caller.can_continue(prompt)

    def _put_off(self, branch: Branch, op: ir.Gen) -> None:
        if branch.pattern is None:
            prompt = _transcript(branch).prompt()
            begun = [prompt.answer] if prompt.answer else []
            branch.pattern = Pattern(replace(prompt, answer=""), [*begun])
        pattern = branch.pattern
        first = pattern.gens[0] if pattern.gens else op
        if _sampling(first) != _sampling(op):
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
        work: Coroutine[Any, Any, Any]
        if _is_whole_message(branch, pattern):
            num = first.params.max_tokens or self._num_spec_tokens
            params = replace(first.params, max_tokens=num)
            work = self._caller.gen(pattern.prompt, params, self._derive_seed(branch, first))
            done = self._done_alone
        else:
            work, done = self._fill(branch, pattern), self._done_filling
        run = self._run(branch, first, work, lambda result: done(branch, pattern, result))
        branch.call = asyncio.create_task(run)

    async def _fill(self, branch: Branch, pattern: Pattern) -> Filling:
        for op in pattern.gens:
            if not _is_plain(op.params):
                raise InvalidProgram(
                    "n, max_tokens, logprobs, stop_regex, deadline_s and constraints need a call "
                    "of the gen's own; under num_api_spec_tokens only a gen that is the whole "
                    "assistant message has one on this endpoint"
                )
        if pattern.draft is not None:
            filled = matched(pattern.terms, pattern.draft.text)
            if filled is not None:
                return Filling(filled, pattern.draft, _no_call())
        first, num = pattern.gens[0], self._num_spec_tokens or 0
        seed = self._derive_seed(branch, first)
        return await self._caller.fill(pattern.prompt, pattern.terms, first.params, seed, num)

    def _done_alone(self, branch: Branch, pattern: Pattern, outcome: Outcome) -> None:
        self._append_pattern(branch, pattern, [outcome])

    def _done_filling(self, branch: Branch, pattern: Pattern, filling: Filling) -> None:
        is_whole = filling.draft.is_whole
        metas = [filling.meta, *(_no_call() for _ in filling.filled[1:])]
        found = zip(filling.filled, metas)
        outcomes = [_outcome_of(filled, meta, is_whole=is_whole) for filled, meta in found]
        pattern.draft = filling.draft
        self._append_pattern(branch, pattern, outcomes)

    def _append_pattern(self, branch: Branch, pattern: Pattern, outcomes: list[Outcome]) -> None:
        """Everything from the first gen on goes to the transcript, and is text for later ones."""
        values, tell = iter(outcomes), list(zip(pattern.gens, outcomes, strict=True))
        begin = next(i for i, term in enumerate(pattern.terms) if isinstance(term, Slot))
        texts = [t if isinstance(t, str) else next(values).text for t in pattern.terms]
        pattern.terms, pattern.gens = list(texts), []
        _transcript(branch).append_text("".join(texts[begin:]))
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
            child.path = (*branch.path, (op.seq, index))
            child.transcript = _transcript(branch).copy()
            child.fork_length = len(child.transcript.pieces)
            child.draft = branch.draft
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
        return _transcript(branch).append(_transcript(child).pieces[child.fork_length :])

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
        _abort(branch)
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

    def _stop(self, branch: Branch, op: ir.Op, message: str, kind: str) -> None:
        name = getattr(op, "name", "") or op.kind
        message = message[:MAX_ERROR_CHARS]
        branch.error = f"{name}: {message}" + (f" (at {op.source})" if op.source else "")
        payload = {"message": message, "kind": kind, "op": name, "source": op.source}
        self._emit(branch.number, op.seq, wire.FAILED, payload)
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
_SHARED = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
           "repetition_penalty", "logit_bias", "seed", "min_tokens", "stop_token_ids",
           "ignore_eos")  # fmt: skip


def _sampling(op: ir.Gen) -> object:
    """What gens must agree on to be read from one answer."""
    return tuple(getattr(op.params, name) for name in _SHARED)


def _is_plain(params: ir.GenParams) -> bool:
    """Whether a value can be read from an answer that was not asked for it alone: one text that
    ends at stop strings, or with the answer."""
    is_single = params.n in (None, 1)
    others = (params.max_tokens, params.constraint, params.logprobs, params.stop_regex)
    return is_single and params.deadline_s is None and all(value is None for value in others)


def _is_whole_message(branch: Branch, pattern: Pattern) -> bool:
    """Whether the message is one gen and nothing else."""
    is_only = len(pattern.gens) == len(pattern.terms) == 1
    return is_only and bool(branch.log) and isinstance(branch.log[0], ir.RoleEnd)


def _transcript(branch: Branch) -> Transcript:
    assert branch.transcript is not None, "an op ran before its branch was forked"
    return branch.transcript


def _abort(branch: Branch) -> None:
    call, branch.call = branch.call, None
    if call is not None:
        call.cancel()


def _no_call() -> dict[str, Any]:
    """Meta of a value that an earlier call's answer had."""
    counts = ("prompt_tokens", "cached_tokens", "completion_tokens", "num_api_calls", "num_retries")
    times = ("queue_s", "time_to_first_token_s", "latency_s")
    return {"id": "", **dict.fromkeys(counts, 0), **dict.fromkeys(times, 0.0)}


def _served(found: Filled, started: float) -> Outcome:
    return _outcome_of(found, _no_call(), is_whole=True)


def _outcome_of(found: Filled, meta: dict[str, Any], *, is_whole: bool) -> Outcome:
    """`is_whole`: where no stop string ended it, the model did; else a limit on tokens."""
    reason = "stop" if found.matched_stop is not None or is_whole else "length"
    meta = {**meta, "finish_reason": reason}
    if found.matched_stop is not None:
        meta["matched_stop"] = found.matched_stop
    return Outcome(found.text, found.text, meta)


def _rejected(op: ir.Hint) -> dict[str, Any]:
    outcome = {
        "action_id": f"{op.branch}.{op.seq}",
        "outcome": "rejected",
        "reason": "an endpoint over HTTP has no KV that a program could act on",
        "num_tokens": 0,
    }
    return {"value": outcome, "text": ""}
