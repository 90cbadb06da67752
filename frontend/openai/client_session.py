"""A program carried out in this process, with a call to a server for each gen.

`Interpreter` has the order of the ops and what they mean to other branches. There is no KV here: a
`Pause` passes, a `Hint` is the server's to answer. One asyncio loop owns a program.

With `num_spec_tokens` one answer may serve several gens (`speculation`). Where the endpoint goes on
from any text, what an answer has beyond a gen's stop is kept for as long as the program appends
just that. Where a call can only begin a message, the gens of an assistant message are put off until
it ends, or until the program waits, and are then read from one answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from ...errors import InvalidProgram
from ..protocol import ir, wire
from ..protocol.interpreter import Emit, Interpreter
from .calls import Filling, OnDelta, Outcome
from .client_branch import ClientBranch, Pattern, hint_target, is_whole_message
from .client_transcript import ClientTranscript, Prompt
from .shared_answer import is_plain, no_call, outcome_of, sampling_of
from .speculation import Draft, Filled, Slot, matched

Work = Callable[[], Awaitable[Any]]  # not begun: a branch may be stopped before it is


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


class ClientSession(Interpreter[ClientBranch, str]):
    """One program."""

    def __init__(
        self,
        caller: Asks,
        root: ClientTranscript,
        emit: Emit,
        *,
        seed: int,
        instance: int = 0,
        is_streaming: bool = False,
        num_spec_tokens: int | None = None,
    ) -> None:
        """`root`: the empty transcript of its first branch."""
        super().__init__(emit)
        self._caller = caller
        self._seed = seed
        self._instance = instance
        self._is_streaming = is_streaming
        self._num_spec_tokens = num_spec_tokens
        self._started = time.monotonic()
        self._branch(0).transcript = root

    # --- input ------------------------------------------------------------------------------------

    def _note_op(self, branch: ClientBranch, op: ir.Op) -> None:
        branch.is_flushed = False

    def flush(self, *, end: bool) -> None:
        """The program waits for what it has sent; `end`: it sends no more."""
        self.receive((), end=end)
        for branch in self._branches.values():
            branch.is_flushed = True
            if branch.has_open_gens:
                self._ready.append(branch)

    # --- carrying out -----------------------------------------------------------------------------

    def _new_branch(self, number: int) -> ClientBranch:
        return ClientBranch(number)

    def _note_rest(self, branch: ClientBranch) -> None:
        is_at_end = branch.call is None and branch.error is None and not branch.log
        if is_at_end and branch.has_open_gens and branch.is_flushed:
            self._resolve(branch)

    def _note_resumed(self, branch: ClientBranch) -> None:
        branch.draft = branch.pattern = None

    def _carry_out(self, branch: ClientBranch, op: ir.Op) -> bool:
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
            case ir.Chat():
                raise InvalidProgram("a whole chat cannot be sent on to an endpoint over HTTP")
            case ir.Gen():
                return self._gen(branch, op)
            case ir.Select():
                if op.lora_path:
                    allowed = "left out for an endpoint over HTTP; name the adapter as its model"
                    raise InvalidProgram.of("lora_path", op.lora_path, allowed)
                self._select(branch, op)
                return False
            case ir.RoleBegin():
                branch.draft = branch.pattern = None
                self._mark(branch, op, branch.begun.begin_role(op.role, op.fields))
            case ir.RoleEnd():
                branch.draft = branch.pattern = None
                self._mark(branch, op, branch.begun.end_role(op.fields))
            case ir.Tools():
                branch.begun.use_tools(op.tools)
                self._mark(branch, op, "")
            case ir.Image():
                branch.draft = branch.pattern = None
                branch.begun.append_image(op.url)
            case ir.Compress():
                raise InvalidProgram("an endpoint over HTTP takes a kv_policy with each gen alone")
            case ir.Background():
                pass  # a mark for those who compress
            case ir.Hint():
                self._hint(branch, op)
                return False
            case ir.Pause():
                pass
            case ir.Resume():
                if op.drops_message:
                    branch.begun.drop_message()
            case _:
                return self._carry_out_flow(branch, op)
        return True

    def _mark(self, branch: ClientBranch, op: ir.Op, text: str) -> None:
        self._emit(branch.number, op.seq, wire.MARK, {"text": text, "replace": False})

    def _append_text(self, branch: ClientBranch, text: str) -> None:
        if branch.has_open_gens:
            assert branch.pattern is not None
            branch.pattern.terms.append(text)
            return
        branch.begun.append_text(text)
        if branch.pattern is not None:
            branch.pattern.terms.append(text)
        if branch.draft is not None:
            branch.draft = branch.draft.after(text)

    # --- calls ------------------------------------------------------------------------------------

    def _gen(self, branch: ClientBranch, op: ir.Gen) -> bool:
        """Start a call, or take the value from an answer, or put it off; False: wait."""
        if self._num_spec_tokens is None:
            self._start(branch, op, self._ordinary_gen(branch, op))
            return False
        if self._must_put_off(branch):
            self._put_off(branch, op)
            return True
        prompt = branch.begun.prompt()
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
        self._append_outcome(branch, op, outcome_of(found, no_call(), is_whole=True))
        branch.draft = draft.after(found.text)
        return True

    def _ordinary_gen(self, branch: ClientBranch, op: ir.Gen) -> Work:
        def on_delta(text: str) -> None:
            self._emit(branch.number, op.seq, wire.DELTA, text)

        prompt, seed = branch.begun.prompt(), self._seed_of(branch, op)
        stream_to = on_delta if self._is_streaming else None
        return partial(self._caller.gen, prompt, op.params, seed, stream_to)

    async def _drafted_gen(self, branch: ClientBranch, op: ir.Gen, prompt: Prompt) -> Outcome:
        """Ask beyond the gen's stop, and keep what is behind it."""
        num, seed = self._num_spec_tokens or 0, self._seed_of(branch, op)
        draft, meta = await self._caller.draft(prompt, op.params, seed, num)
        found = draft.take(op.params.stop or ()) or Filled(draft.text)
        rest = draft.after(found.text)
        branch.draft = rest and replace(rest, sampling=sampling_of(op))
        return outcome_of(found, meta, is_whole=draft.is_whole)

    def _select(self, branch: ClientBranch, op: ir.Select) -> None:
        branch.draft = branch.pattern = None
        prompt = branch.begun.prompt()
        self._start(branch, op, partial(self._caller.select, prompt, op))

    def _hint(self, branch: ClientBranch, op: ir.Hint) -> None:
        def done(outcome: dict[str, Any]) -> None:
            branch.log.popleft()
            self._emit(branch.number, op.seq, wire.VALUE, {"value": outcome, "text": ""})

        work = partial(self._caller.hint, hint_target(branch), op)
        self._begin_call(branch, asyncio.create_task(self._run(branch, op, work, done)))

    def _start(self, branch: ClientBranch, op: ir.Op, work: Work) -> None:
        """Run a call; its op stays at the head of the log."""

        def done(outcome: Outcome) -> None:
            branch.log.popleft()
            self._append_outcome(branch, op, outcome)

        self._begin_call(branch, asyncio.create_task(self._run(branch, op, work, done)))

    async def _run(
        self, branch: ClientBranch, op: ir.Op, work: Work, done: Callable[[Any], None]
    ) -> None:
        try:
            result = await work()
        except Exception as error:  # also a defect of ours ends the branch, and not in silence
            self._end_call(branch)
            self._fail_with(branch, op, error)
        else:
            self._end_call(branch)
            done(result)
            self._ready.append(branch)
        self.advance()

    def _append_outcome(self, branch: ClientBranch, op: ir.Op, outcome: Outcome) -> None:
        """A value is there: append it and say so."""
        branch.begun.append_text(outcome.text)
        self._tell(branch, op, outcome)

    def _tell(self, branch: ClientBranch, op: ir.Op, outcome: Outcome) -> None:
        self._set_value(branch, op, outcome.text)
        metas = outcome.meta if isinstance(outcome.meta, list) else [outcome.meta]
        for meta in metas:
            branch.last_reply_id = meta.get("id") or branch.last_reply_id
            meta["start_s"] = time.monotonic() - self._started - meta.get("latency_s", 0.0)
        payload = {"value": outcome.value, "text": outcome.text, "meta": outcome.meta}
        self._emit(branch.number, op.seq, wire.VALUE, payload)

    def _seed_of(self, branch: ClientBranch, op: ir.Gen) -> int:
        own = op.params.seed
        return branch.seed_of(op, self._seed, self._instance) if own is None else own

    # --- gens that are put off --------------------------------------------------------------------

    def _must_put_off(self, branch: ClientBranch) -> bool:
        """Whether a call could not go on from what the message has so far, or could not after
        this gen."""
        if branch.has_open_gens:
            return True
        prompt = branch.begun.prompt()
        return not self._caller.can_continue(prompt)

    def _put_off(self, branch: ClientBranch, op: ir.Gen) -> None:
        if branch.pattern is None:
            prompt = branch.begun.prompt()
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

    def _resolve(self, branch: ClientBranch) -> None:
        """Get the values of all gens that were put off, by a call if need be."""
        pattern = branch.pattern
        assert pattern is not None
        first = pattern.gens[0]
        work: Work
        done: Callable[[ClientBranch, Pattern, Any], None]
        if is_whole_message(branch, pattern):
            num = first.params.max_tokens or self._num_spec_tokens
            params = replace(first.params, max_tokens=num)
            seed = self._seed_of(branch, first)
            work = partial(self._caller.gen, pattern.prompt, params, seed)
            done = self._done_alone
        else:
            work, done = partial(self._fill, branch, pattern), self._done_filling
        run = self._run(branch, first, work, lambda result: done(branch, pattern, result))
        self._begin_call(branch, asyncio.create_task(run))

    async def _fill(self, branch: ClientBranch, pattern: Pattern) -> Filling:
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
        seed = self._seed_of(branch, first)
        return await self._caller.fill(pattern.prompt, pattern.terms, first.params, seed, num)

    def _done_alone(self, branch: ClientBranch, pattern: Pattern, outcome: Outcome) -> None:
        self._append_pattern(branch, pattern, [outcome])

    def _done_filling(self, branch: ClientBranch, pattern: Pattern, filling: Filling) -> None:
        is_whole = filling.draft.is_whole
        metas = [filling.meta, *(no_call() for _ in filling.filled[1:])]
        found = zip(filling.filled, metas)
        outcomes = [outcome_of(filled, meta, is_whole=is_whole) for filled, meta in found]
        pattern.draft = filling.draft
        self._append_pattern(branch, pattern, outcomes)

    def _append_pattern(
        self, branch: ClientBranch, pattern: Pattern, outcomes: list[Outcome]
    ) -> None:
        """Everything from the first gen on goes to the transcript, and is text for later ones."""
        values, tell = iter(outcomes), list(zip(pattern.gens, outcomes, strict=True))
        begin = next(i for i, term in enumerate(pattern.terms) if isinstance(term, Slot))
        texts = [t if isinstance(t, str) else next(values).text for t in pattern.terms]
        pattern.terms, pattern.gens = list(texts), []
        branch.begun.append_text("".join(texts[begin:]))
        for op, outcome in tell:
            self._tell(branch, op, outcome)

    def _fails_from(self, branch: ClientBranch, op: ir.Op) -> int:
        seq = super()._fails_from(branch, op)
        if branch.pattern is None or not branch.pattern.gens:
            return seq
        return min(seq, branch.pattern.gens[0].seq)  # those that were put off get none either

    def _cancel_call(self, call: asyncio.Task[None]) -> None:
        call.cancel()

    # --- other branches ---------------------------------------------------------------------------

    def _append_value(self, branch: ClientBranch, value: str) -> str:
        self._append_text(branch, value)
        return value

    def _begin_child(self, branch: ClientBranch, child: ClientBranch) -> None:
        child.fork_length = len(child.begun.pieces)
        child.draft, child.last_reply_id = branch.draft, branch.last_reply_id

    def _append_children(self, branch: ClientBranch, children: list[ClientBranch]) -> str:
        branch.draft = branch.pattern = None
        return "".join(branch.begun.append(c.begun.pieces[c.fork_length :]) for c in children)
