"""Running programs: each branch's log is carried out op by op, as far as it can go.

A branch stops at a `Gen` or `Select` until its requests have ended, at a `Var` until the value is
there, at a `Join` until the children have ended. Everything else is done at once. Nothing here
blocks: `advance` is called again when ops arrive or requests finish. One planner thread owns it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from ...constrained.spec import GrammarSpec
from ...errors import InvalidProgram, InvalidRequest, StemmaError
from ...frontend import ir, wire
from ...frontend.constraint import Constraint
from ..request import MAX_PRIORITY, Request, Scoring
from ..sampling_params import SamplingParams, seed_of_sample
from ..schedule.grammar import PendingGrammar
from .calls import Call, GenCall, SamplesCall, SelectCall
from .transcript import Marked, Transcript
from .world import World

Emit = Callable[[int, int, str, Any], None]  # branch, seq, kind, payload

MAX_ERROR_CHARS = 4096  # joins of failed joins quote each other


@dataclass(slots=True, eq=False)
class _Value:
    """What an op appended, for `Var`."""

    ids: array[int]
    text: str


@dataclass(slots=True, eq=False)
class Branch:
    """One branch: its log from the current op on, and its transcript once it has begun."""

    number: int
    path: tuple[tuple[int, int], ...] = ()  # (seq of the fork, index) from the root down
    log: deque[ir.Op] = field(default_factory=deque)
    num_received: int = 0
    transcript: Transcript | None = None  # None: not forked yet
    fork_length: int = 0  # len(ids) when it began
    pending_text: list[ir.Text] = field(default_factory=list)
    call: Call | None = None
    is_waiting: bool = False
    is_ended: bool = False
    error: str | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do with what has arrived."""
        return self.error is not None or not self.log


class ProgramSession:
    """One program of one client.

    Lifetime: from its first ops to `DONE`, or until cancelled. `emit` hands events to the client.
    """

    def __init__(
        self,
        world: World,
        emit: Emit,
        on_ready: Callable[[ProgramSession], None],
        *,
        seed: int,
        instance: int,
        is_streaming: bool,
        client: Hashable = "",
        tools: tuple[Any, ...] = (),
    ) -> None:
        """`emit` sends an event to the client; `on_ready` asks for an `advance` soon; `tools` is
        what a chat template is told of."""
        self._world = world
        self._emit = emit
        self._on_ready = on_ready
        self._seed = seed
        self._instance = instance
        self._is_streaming = is_streaming
        self._client = client
        self._branches: dict[int, Branch] = {}
        self._values: dict[tuple[int, int], _Value] = {}
        self._waiters: dict[tuple[int, int], list[Branch]] = {}  # (branch, seq or _END)
        self._ready: deque[Branch] = deque()
        self._has_ended = False
        self.is_done = False
        root = self._branch(0)
        root.transcript = Transcript(world.tokenizer, world.template, tools)

    # --- input ------------------------------------------------------------------------------------

    def receive(self, ops: list[ir.Op], *, end: bool) -> None:
        """Append ops to their branches' logs. Raises InvalidProgram when they are out of order."""
        for op in ops:
            branch = self._branch(op.branch)
            if op.seq != branch.num_received:
                raise InvalidProgram.of("seq", op.seq, f"{branch.num_received} on {op.branch}")
            branch.num_received += 1
            branch.log.append(op)
            if branch.error is not None:
                self._fail_forks_of([op], branch.error)
            self._ready.append(branch)
        self._has_ended = self._has_ended or end

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
            call, branch.call = branch.call, None
            if call is not None:
                call.abort(self._world.queue)

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
                self._fail(branch, op, str(error), type(error).__name__)
                return
            branch.log.popleft()

    def _carry_out(self, branch: Branch, op: ir.Op) -> bool:
        """Do one op; False when it has to wait (it stays at the head of the log)."""
        if branch.is_ended:
            raise InvalidProgram(f"an op follows the End of branch {branch.number}")
        if isinstance(op, ir.Text):
            branch.pending_text.append(op)
            return True
        self._flush_text(branch)
        match op:
            case ir.Tokens():
                self._mark(branch, op, self._append_tokens(branch, op))
            case ir.Gen():
                self._start_gen(branch, op)
                return False
            case ir.Select():
                self._start_select(branch, op)
                return False
            case ir.Var():
                return self._append_var(branch, op)
            case ir.RoleBegin():
                self._mark(branch, op, _transcript(branch).begin_role(op.role))
            case ir.RoleEnd():
                self._mark(branch, op, _transcript(branch).end_role())
            case ir.Fork():
                self._fork(branch, op)
            case ir.Join():
                return self._join(branch, op)
            case ir.End():
                branch.is_ended = True
                self._wake((branch.number, _END))
        return True

    def _flush_text(self, branch: Branch) -> None:
        """A text segment is all text between two ops that are none, however it was cut."""
        if not branch.pending_text:
            return
        text = "".join(op.text for op in branch.pending_text)
        is_replay = all(op.is_replay for op in branch.pending_text)
        branch.pending_text.clear()
        transcript = _transcript(branch)
        known = self._world.replays.find(transcript.ids, text) if is_replay else None
        if known is not None:
            transcript.append_ids(known, text)
        else:
            transcript.append_text(text)

    def _append_tokens(self, branch: Branch, op: ir.Tokens) -> Marked:
        largest, vocab_size = max(op.token_ids), self._world.vocab_size
        if largest >= vocab_size:
            raise InvalidProgram.of("token_ids", largest, f"an integer in [0, {vocab_size - 1}]")
        text = self._world.tokenizer.decode(op.token_ids)
        _transcript(branch).append_ids(op.token_ids, text, has_bos=True)
        return Marked(text)

    def _mark(self, branch: Branch, op: ir.Op, marked: Marked) -> None:
        payload = {"text": marked.text, "replace": marked.replace}
        self._emit(branch.number, op.seq, wire.MARK, payload)

    # --- calls ------------------------------------------------------------------------------------

    def _start_gen(self, branch: Branch, op: ir.Gen) -> None:
        world, report = self._world, _BranchReport(self, branch)
        samplings = self._samplings(branch, op)
        jump_forward = self._jump_forward(op.params)
        prompt = self._prompt(branch)
        grammar = self._grammar(op.params.constraint)
        options: dict[str, Any] = {"is_streaming": self._is_streaming}
        options["validate"] = None if world.grammars is None else world.grammars.validate
        call: GenCall | SamplesCall
        if len(samplings) == 1:
            call = GenCall(report, samplings[0], world.tokenizer, **options)
            samples = [call]
        else:
            call = SamplesCall(report, samplings, world.tokenizer, **options)
            samples = call.samples
        for sample, sampling in zip(samples, samplings, strict=True):
            sample.request = Request(
                id=world.next_request_id(),
                prompt=prompt,
                sampling=sampling,
                listener=sample,
                client=self._client,
                priority=_priority(op.params),
                stop_ids=world.defaults.stop_ids(sampling),
                grammar=grammar,
                jump_forward=jump_forward,
            )
        self._submit(call, [sample.request for sample in samples if sample.request])
        branch.call = call

    def _grammar(self, constraint: Constraint | None) -> PendingGrammar | None:
        if constraint is None:
            return None
        if self._world.grammars is None:
            raise InvalidRequest(f"{constraint.kind}: this runtime has no grammars", "constraint")
        return self._world.grammars.ask(
            GrammarSpec(
                constraint.kind,
                constraint.source,
                constraint.whitespace,
                constraint.property_order,
                constraint.is_lenient,
                constraint.formats,
            )
        )

    def _jump_forward(self, params: ir.GenParams) -> bool:
        """Off where each token's log probability is asked for: a forced one has none."""
        wanted = self._world.jump_forward if params.jump_forward is None else params.jump_forward
        if not isinstance(wanted, bool):
            raise InvalidRequest.of("jump_forward", wanted, "true or false")
        return wanted and params.logprobs is None

    def _samplings(self, branch: Branch, op: ir.Gen) -> list[SamplingParams]:
        """Of each sample. Raises InvalidRequest naming the field at fault."""
        given, vocab_size = op.params, self._world.vocab_size
        num_samples = 1 if given.n is None else given.n
        is_int = isinstance(num_samples, int) and not isinstance(num_samples, bool)
        if not is_int or not 1 <= num_samples <= ir.MAX_SAMPLES:
            raise InvalidRequest.of("n", num_samples, f"an integer in [1, {ir.MAX_SAMPLES}]")
        first = self._world.defaults.sampling(given, self._derive_seed(branch, op))
        largest = max((token_id for token_id, _ in first.logit_bias), default=0)
        if largest >= vocab_size:
            allowed = f"token ids in [0, {vocab_size - 1}]"
            raise InvalidRequest.of("logit_bias", largest, allowed)
        return [replace(first, seed=seed_of_sample(first.seed, i)) for i in range(num_samples)]

    def _submit(self, call: Call, requests: list[Request]) -> None:
        """Queue a call's requests, all or none."""
        try:
            for request in requests:
                self._world.queue.submit(request)
        except StemmaError:
            call.abort(self._world.queue)
            raise

    def _start_select(self, branch: Branch, op: ir.Select) -> None:
        world = self._world
        prompt = self._prompt(branch)
        choice_ids = [world.tokenizer.encode(choice) for choice in op.choices]
        if not all(choice_ids):
            silent = op.choices[choice_ids.index([])]
            raise InvalidProgram.of("choices", silent, "texts that have at least one token")
        call = SelectCall(_BranchReport(self, branch), op, choice_ids)
        for context, targets in call.wanted_scores(prompt, self._empty_context()):
            request = Request(
                id=world.next_request_id(),
                prompt=context + array("i", targets[:-1]),
                sampling=SamplingParams(),
                listener=call,
                scoring=Scoring(len(context) - 1, tuple(targets)),
            )
            call.requests.append(request)
        self._submit(call, call.requests)
        branch.call = call

    def _prompt(self, branch: Branch) -> array[int]:
        transcript = _transcript(branch)
        if not transcript.ids:
            transcript.append_ids((), "")  # BOS, where the model has one
        if not transcript.ids:
            raise InvalidProgram("nothing to generate from: the prompt is empty")
        return transcript.ids[:]

    def _empty_context(self) -> array[int]:
        tokenizer, eos = self._world.tokenizer, self._world.defaults.eos_token_ids
        return array("i", tokenizer.bos_ids[:1] or eos[:1] or [0])

    def _derive_seed(self, branch: Branch, op: ir.Op) -> int:
        """hash(program seed, instance, branch path, op): forks differ, repeated runs do not."""
        key = repr((self._seed, self._instance, branch.path, op.seq)).encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) >> 1

    def finish_call(
        self, branch: Branch, ids: array[int], tail: str, payload: dict[str, Any]
    ) -> None:
        """A call has ended well: append its ids (and text that survived a stop string)."""
        op = branch.log.popleft()
        branch.call = None
        transcript = _transcript(branch)
        text: str = payload["text"]
        before = transcript.ids[:] if transcript.open_role == "assistant" else None
        start = len(transcript.ids)
        if before is not None and start == transcript.content_start and not tail:
            self._world.replays.remember(before, text, ids)
        transcript.append_ids(ids, text[: len(text) - len(tail)])
        if tail:
            transcript.append_text(tail)
        self._set_value(branch, op, transcript.ids[start:], text)
        self._emit(branch.number, op.seq, wire.VALUE, payload)
        self._ready.append(branch)
        self._on_ready(self)

    def fail_call(self, branch: Branch, message: str, kind: str) -> None:
        """A call has ended badly; what else it asked for is of no use."""
        call, branch.call = branch.call, None
        assert call is not None, "a call failed twice"
        call.abort(self._world.queue)
        self._fail(branch, branch.log[0], message, kind)
        self._on_ready(self)

    def emit_delta(self, branch: Branch, text: str) -> None:
        """Text of the branch's current call, as it comes."""
        self._emit(branch.number, branch.log[0].seq, wire.DELTA, text)

    # --- data flow --------------------------------------------------------------------------------

    def _append_var(self, branch: Branch, op: ir.Var) -> bool:
        key = (op.of_branch, op.of_seq)
        value = self._values.get(key)
        if value is None:
            source = self._branches.get(op.of_branch)
            if source is not None and source.error is not None:
                raise InvalidProgram(f"the value it appends was never made: {source.error}")
            return self._wait_for(branch, key)
        _transcript(branch).append_ids(value.ids, value.text)
        self._set_value(branch, op, value.ids, value.text)
        payload = {"value": value.text, "text": value.text}
        self._emit(branch.number, op.seq, wire.VALUE, payload)
        return True

    def _set_value(self, branch: Branch, op: ir.Op, ids: array[int], text: str) -> None:
        self._values[branch.number, op.seq] = _Value(ids, text)
        self._wake((branch.number, op.seq))

    def _fork(self, branch: Branch, op: ir.Fork) -> None:
        for index, number in enumerate(op.children):
            child = self._branch(number)
            if child.transcript is not None or child is branch:
                raise InvalidProgram.of("children", number, "branches that were not forked before")
            child.path = (*branch.path, (op.seq, index))
            child.transcript = _transcript(branch).copy()
            child.fork_length = len(child.transcript.ids)
            self._ready.append(child)

    def _join(self, branch: Branch, op: ir.Join) -> bool:
        children = [self._branch(number) for number in op.children]
        for child in children:
            if child.error is not None:
                raise InvalidProgram(f"a joined branch failed: {child.error}")
        for child in children:
            if not child.is_ended:
                return self._wait_for(branch, (child.number, _END))
        text = ""
        if op.mode == "concate_and_append":
            text = self._append_children(branch, children)
        self._emit(branch.number, op.seq, wire.VALUE, {"value": None, "text": text})
        return True

    def _append_children(self, branch: Branch, children: list[Branch]) -> str:
        whole = ""
        for child in children:
            ids = _transcript(child).ids[child.fork_length :]
            text = self._world.tokenizer.decode(ids, skip_special=False)
            _transcript(branch).append_ids(ids, text)
            whole += text
        return whole

    def _wait_for(self, branch: Branch, key: tuple[int, int]) -> bool:
        self._waiters.setdefault(key, []).append(branch)
        branch.is_waiting = True
        return False

    def _wake(self, key: tuple[int, int]) -> None:
        for branch in self._waiters.pop(key, ()):
            branch.is_waiting = False
            self._ready.append(branch)

    # --- failure ----------------------------------------------------------------------------------

    def _fail(self, branch: Branch, op: ir.Op, message: str, kind: str) -> None:
        """Stop a branch at `op`, and with it what can only follow from it."""
        if branch.error is not None:
            return
        self._stop(branch, op, message, kind)
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
        stuck = [b for b in self._branches.values() if not b.is_idle]
        for branch in stuck:
            branch.is_waiting = False
            message = "it waits for something that never comes"
            self._fail(branch, branch.log[0], message, InvalidProgram.__name__)
        return bool(stuck)

    def _branch(self, number: int) -> Branch:
        if number not in self._branches:
            self._branches[number] = Branch(number)
        return self._branches[number]


_END = -1  # in a waiter's key: the branch's End, where else a seq stands


def _priority(params: ir.GenParams) -> int:
    """Raises InvalidRequest."""
    priority = 0 if params.priority is None else params.priority
    is_int = isinstance(priority, int) and not isinstance(priority, bool)
    if not is_int or abs(priority) > MAX_PRIORITY:
        allowed = f"an integer in [-{MAX_PRIORITY}, {MAX_PRIORITY}]"
        raise InvalidRequest.of("priority", params.priority, allowed)
    return priority


def _transcript(branch: Branch) -> Transcript:
    assert branch.transcript is not None, f"branch {branch.number} runs before its fork"
    return branch.transcript


@dataclass(frozen=True, slots=True)
class _BranchReport:
    """A call's report goes to its branch."""

    session: ProgramSession
    branch: Branch

    def delta(self, text: str) -> None:
        self.session.emit_delta(self.branch, text)

    def finished(self, ids: array[int], tail: str, payload: dict[str, Any]) -> None:
        self.session.finish_call(self.branch, ids, tail, payload)

    def failed(self, message: str, kind: str) -> None:
        self.session.fail_call(self.branch, message, kind)
