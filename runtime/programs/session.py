"""Running programs in the engine: what the ops of a branch do to its token ids and to the queue.

`Interpreter` has the order of the ops and what they mean to other branches. Here a text becomes ids
when its segment is complete, a call becomes requests, and what a branch will need of the KV cache
is leased. One planner thread owns a program.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ...errors import InvalidProgram
from ...frontend.protocol import ir, wire
from ...frontend.protocol.interpreter import Emit, Interpreter
from ..images.image import Image
from ..schedule.cache.hint_actions import Outcome
from ..schedule.program_record import ProgramRecord
from ..tokenizer.chat_template import NO_TEMPLATE_ARGS, TemplateArgs
from ..tokenizer.tokenizer import UNLOCKED_CHARS
from ..tokenizer.transcript import TextChange, Transcript
from .beam_call import BeamCall
from .branch_kv import Shown
from .call_factory import CallFactory
from .calls import Call, Delta, GenCall, SamplesCall
from .client_leases import Action, AskedHint, StatedLeases
from .context import ProgramContext
from .engine_branch import EngineBranch, Prepared, Value
from .kept import NOTHING_KEPT, Kept
from .likely_texts import LikelyPrompts
from .prefix_leases import LeaseManager
from .preparation import Preparation

MAX_MARKS_A_TURN = 256  # delimiters of messages laid before the engine's other work has its turn
MAX_FORKED_TOKENS = 1 << 25  # of a program: each branch has its own copy, 4 bytes a token


class ProgramSession(Interpreter[EngineBranch, Value]):
    """One program of one client. What it will need of the KV cache is `LeaseManager`'s business."""

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
        account: Hashable = "",
        history: str = "",
        op_key: str | None = None,
        is_replayable: bool = False,
    ) -> None:
        """`emit` sends an event to the client; `on_ready` asks for an `advance` soon; `tenant`:
        whose share of the engine it uses; `label`: how reports call it; `stated`: what the
        client's hints keep (None: hints are rejected); `response_id`: under this name hints may
        mean its first gen with its prompt; `has_token_ids`: what it streams has the ids, too;
        `namespace`: only within it is KV shared, and anything else by which one could tell what
        others ask; `account`: whose the texts of its calls are; `history`: the client's name for
        those that belong together; `op_key`: what its gens without a line of source are alike in;
        `is_replayable`: values say what is to be `given` for the program to go on elsewhere.
        """
        super().__init__(emit)
        self._context = context
        self._on_ready = on_ready
        self._stated = stated
        self._response_id = response_id
        self.record = ProgramRecord(label=label, tenant=tenant, created_s=time.perf_counter())
        self._namespace = namespace  # that of its adapter, where it has one
        self._factory = CallFactory(
            context,
            self.record,
            seed,
            instance,
            is_streaming,
            has_token_ids,
            namespace,
            account=account,
            history=history,
            op_key=op_key,
        )
        self._leases = (
            None
            if context.kv is None
            else LeaseManager(
                context.kv, context.think_times, tenant, self._shown, namespace=namespace
            )
        )
        prefills = context.prefills
        self._likely = (
            None if prefills is None else LikelyPrompts(context.likely_texts, prefills, self._shown)
        )
        self._pauses: dict[EngineBranch, ir.Pause] = {}
        self._num_marks = 0  # laid in this turn
        self._rests: dict[_Rest, EngineBranch] = {}
        self._num_forked_tokens = 0
        self._images: dict[int, Image] = {}  # of all branches: kept while the program may name them
        self._gens_end = False  # with what they have
        self._is_replayable = is_replayable
        self._given: dict[tuple[int, int], Kept] = {}
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

    def _note_op(self, branch: EngineBranch, op: ir.Op) -> None:
        if branch.error is None and isinstance(op, ir.CALL_OPS):
            branch.num_calls += 1
        if self._leases is not None and not isinstance(op, ir.Hint):
            self._leases.note_op(branch)

    def give(self, given: Mapping[tuple[int, int], Kept]) -> None:
        """What ops have become elsewhere, before they arrive: they become the same here, and their
        calls are not made again."""
        self._given.update(given)

    def _known_winners(self, op: ir.Join) -> Sequence[int] | None:
        kept = self._given.get((op.branch, op.seq))  # a join asks again until it has all
        return None if kept is None else kept.winners

    @property
    def used(self) -> dict[str, int]:
        return self.record.used

    def end_gens(self) -> None:
        """Have all gens end now with what they have, and those to come with nothing."""
        self._gens_end = True
        for branch in list(self._branches.values()):
            self._end_gen(branch)

    def stop(self, number: int) -> None:
        """Stop a branch and those forked from it, as a join does that has enough: nobody waits for
        what they make."""
        if number in self._branches:
            self._halt_trees([self._branches[number]], "nobody waits for this branch any more")

    def _end_gen(self, branch: EngineBranch) -> None:
        if isinstance(branch.call, GenCall | SamplesCall | BeamCall):
            branch.call.end_now(self._context.queue)

    def _finish(self) -> None:
        super()._finish()
        if self._leases is not None:
            self._leases.end_all()
        if self._likely is not None:
            self._likely.end_all()
        self._context.queue.end_program(self.record)

    # --- carrying out -----------------------------------------------------------------------------

    def advance(self) -> None:
        """As far as it can go in one turn; it is ready again where more could be done."""
        self._num_marks = 0
        rests, self._rests = self._rests, {}
        for rest, branch in rests.items():
            if branch.call is rest:  # it was not stopped meanwhile
                self._end_call(branch)
                self._ready.append(branch)
        super().advance()

    def _has_turn(self, branch: EngineBranch) -> bool:
        """Whether the branch may lay another delimiter now; else it goes on in the next turn. A
        chat of thousands of messages takes seconds, within the engine's loop."""
        self._num_marks += 1
        if self._num_marks <= MAX_MARKS_A_TURN:
            return True
        rest = _Rest()
        self._rests[rest] = branch
        self._begin_call(branch, rest)
        self._on_ready(self)
        return False

    def _new_branch(self, number: int) -> EngineBranch:
        return EngineBranch(number)

    def _note_rest(self, branch: EngineBranch) -> None:
        if self._leases is not None and not self.is_done:
            self._leases.settle(branch, self._pauses.get(branch), is_last=self._has_ended)
        # NOTE: where an adapter has computed the branch's KV, what follows is not the model's own.
        is_plain = self._factory.adapter is None and branch.namespace == self._namespace
        if self._likely is not None and is_plain and not (self.is_done or self._has_ended):
            self._likely.settle(branch, self._namespace)

    def _note_resumed(self, branch: EngineBranch) -> None:
        branch.num_calls = 0
        branch.text_change = branch.prepared = None
        branch.pending_text.clear()
        self._forget_asked_beyond(branch)
        self._pauses.pop(branch, None)

    def _carry_out(self, branch: EngineBranch, op: ir.Op) -> bool:
        if isinstance(op, ir.Text):
            if self._fails_as_given(branch, op):
                return False
            branch.pending_text.append(op)
            self._pauses.pop(branch, None)
            return True
        if isinstance(op, ir.Pause):
            self._pauses[branch] = op
            return True
        if isinstance(op, ir.Resume):
            if op.drops_message:
                branch.begun.drop_message()
                self._forget_asked_beyond(branch)
            return True
        if isinstance(op, ir.Hint):
            outcome = self._hinted(branch, op).payload(f"{branch.number}.{op.seq}")
            self._emit(branch.number, op.seq, wire.VALUE, {"value": outcome, "text": ""})
            return True
        self._pauses.pop(branch, None)
        if isinstance(op, ir.RoleBegin | ir.RoleEnd | ir.Tools) and not self._has_turn(branch):
            return False
        prepared = self._prepared(branch, op)
        if prepared is None:
            return False
        branch.transcript = prepared.transcript
        self._images.update((image.token_id, image) for image in prepared.images)
        branch.pending_text.clear()
        if self._fails_as_given(branch, op):
            return False
        if prepared.failure is not None:
            raise prepared.failure
        match op:
            case ir.Gen() | ir.Select() | ir.Embed():
                kept = self._given.pop((branch.number, op.seq), NOTHING_KEPT)
                if kept.is_whole:
                    branch.num_calls -= 1
                    self._append_output(branch, op, kept, is_given=True)
                    return True
                branch.text_change = prepared.text_change
                self._begin_call(branch, self._call(branch, op, prepared, kept.ids))
                if self._gens_end:
                    self._end_gen(branch)
                return False
            case ir.Tokens() | ir.Chat() | ir.RoleBegin() | ir.RoleEnd() | ir.Tools():
                assert prepared.text_change is not None
                self._emit_text_change(branch, op, prepared.text_change)
                return True
            case ir.Image():
                return True
            case ir.Compress():
                branch.kv.compress(branch.begun.ids, op.policy, self._context.compressed)
                return True
            case ir.Background():
                branch.kv.mark(len(branch.begun.ids), begins=op.begins)
                return True
        return self._carry_out_flow(branch, op)

    def _fails_as_given(self, branch: EngineBranch, op: ir.Op) -> bool:
        """Whether the branch has failed at this op elsewhere, and so does here."""
        kept = self._given.get((branch.number, op.seq), NOTHING_KEPT)
        if kept.failed is None:
            return False
        self._fail(branch, op, *kept.failed)
        return True

    def _prepared(self, branch: EngineBranch, op: ir.Op) -> Prepared | None:
        """What the op needs, tokenized; None: it must wait for that, as its text is long."""
        if isinstance(branch.prepared, Exception):
            raise branch.prepared
        prepared, branch.prepared = branch.prepared, None
        if prepared is not None:
            return prepared
        preparation = Preparation(
            self._context, self._namespace, branch.begun, branch.pending_text, branch.asked, op
        )
        texts = self._context.texts
        if texts is None or preparation.num_chars < UNLOCKED_CHARS:
            return preparation.run()
        job = texts.start(
            preparation.apart().run,
            partial(self._take_prepared, branch),
            num_chars=preparation.num_chars,
            tenant=self.record.tenant,
        )
        self._begin_call(branch, job)
        return None

    def _take_prepared(self, branch: EngineBranch, prepared: Prepared | Exception) -> None:
        """Another thread has tokenized what the branch's current op needs."""
        self._end_call(branch)
        branch.prepared = prepared
        self._ready.append(branch)
        self._on_ready(self)

    def _hinted(self, branch: EngineBranch, op: ir.Hint) -> Outcome:
        """On what has been computed of the branch, and the text behind it that will be."""
        if self._stated is None:
            return Outcome("rejected", "this runtime keeps no leases")
        action = Action(op.action, op.ttl_ms, op.priority, op.tier)
        outcome = self._carry_out_hint(branch, action, branch.begun.ids)
        if outcome.outcome != "missing" or op.action not in ("pin", "retain", "share"):
            return outcome
        num_texts = len(branch.pending_text)
        num_tokens = None if num_texts else len(branch.begun.ids)
        branch.asked.append(AskedHint(action, num_tokens, num_texts))
        return Outcome("deferred", "until the branch's next call has computed it")

    def _forget_asked_beyond(self, branch: EngineBranch) -> None:
        """What was asked for of text that the branch has no more."""
        num_tokens = len(branch.begun.ids)
        kept = [h for h in branch.asked if h.num_tokens is not None and h.num_tokens <= num_tokens]
        branch.asked.clear()
        branch.asked.extend(kept)

    def _carry_out_asked(self, branch: EngineBranch) -> None:
        """What was asked for of the prefix that a call has just computed."""
        for hint in branch.asked:
            self._carry_out_hint(branch, hint.action, branch.begun.ids[: hint.num_tokens])
        branch.asked.clear()

    def _carry_out_hint(
        self, branch: EngineBranch, action: Action, token_ids: array[int]
    ) -> Outcome:
        """Where the branch's last call has its KV, whose adapter may be its own."""
        assert self._stated is not None
        namespace = self._namespace if branch.namespace is None else branch.namespace
        token_ids = self._shown(branch, token_ids).ids
        return self._stated.carry_out(
            action, token_ids, namespace=namespace, account=self.record.tenant
        )

    def _shown(self, branch: EngineBranch, ids: array[int]) -> Shown:
        return self._context.lasting(branch.kv, ids)

    def _emit_text_change(self, branch: EngineBranch, op: ir.Op, change: TextChange) -> None:
        payload = {"text": change.text, "replace": change.replace}
        self._emit(branch.number, op.seq, wire.MARK, payload)

    # --- calls ------------------------------------------------------------------------------------

    def _call(
        self,
        branch: EngineBranch,
        op: ir.Gen | ir.Select | ir.Embed,
        prepared: Prepared,
        begun: array[int],
    ) -> Call:
        """Start the op's call; `begun`: of a gen's output, what is known."""
        report = _BranchReport(self, branch)
        if self._likely is not None:
            self._likely.note_call(branch)
        if isinstance(op, ir.Gen):
            return self._factory.gen(branch, op, report, prepared.prediction, begun)
        if isinstance(op, ir.Select):
            return self._factory.select(branch, op, report, prepared.choices)
        assert prepared.embedded is not None
        return self._factory.embed(branch, op, report, prepared.embedded)

    def finish_call(
        self, branch: EngineBranch, ids: array[int], tail: str, payload: dict[str, Any]
    ) -> None:
        """A call has ended well: append its ids (and text that survived a stop string)."""
        op = branch.log.popleft()
        self._end_call(branch)
        branch.num_calls -= 1
        kept = Kept(ids, payload["text"], tail)
        self._append_output(branch, op, kept)
        if self._is_replayable:
            payload["kept"] = kept.to_wire()
        text = kept.text
        if (text_change := branch.text_change) is not None:
            payload |= {"text": text_change.text + text, "replace": text_change.replace}
        self._emit(branch.number, op.seq, wire.VALUE, payload)
        self._carry_out_asked(branch)
        if self._leases is not None:
            self._leases.note_call_done(branch)
        if self._likely is not None:
            key, texts = self._factory.key_of(op), self._factory.texts_key(branch.namespace)
            self._likely.note_call_done(branch, None if key is None else (texts, key), ids)
        self._ready.append(branch)
        self._on_ready(self)

    def _append_output(
        self, branch: EngineBranch, op: ir.Op, kept: Kept, *, is_given: bool = False
    ) -> None:
        """What the branch's call has said, here or elsewhere. What is given by a client is its own
        word: others' turns are not told by it."""
        transcript, ids, text, tail = branch.begun, kept.ids, kept.text, kept.tail
        start = len(transcript.ids)
        prompt = transcript.chat_digest
        transcript.append_ids(ids, text[: len(text) - len(tail)])
        if tail:
            transcript.append_text(tail)
        elif prompt is not None and not is_given:
            turns = self._context.assistant_turns
            turns.remember(self._namespace, prompt, text, transcript.ids[:])
        self._set_value(branch, op, Value(transcript.ids[start:], text))
        if self._response_id is not None and not is_given:
            name = (self._namespace, self._response_id)
            self._context.responses.remember(name, transcript.ids[:])
            self._response_id = None

    def fail_call(self, branch: EngineBranch, message: str, kind: str) -> None:
        """A call has ended badly; what else it asked for is of no use."""
        assert branch.call is not None, "a call failed twice"
        self._abort_call(branch)
        self._fail(branch, branch.log[0], message, kind)
        self._on_ready(self)

    def _cancel_call(self, call: Call) -> None:
        call.abort(self._context.queue)

    def emit_delta(self, branch: EngineBranch, delta: Delta) -> None:
        """Text of the branch's current call, as it comes."""
        self._emit(branch.number, branch.log[0].seq, wire.DELTA, delta)

    def emit_likely(self, branch: EngineBranch, text: str, chance: float) -> None:
        """What the branch's current call probably will say."""
        payload = {"text": text, "chance": chance}
        self._emit(branch.number, branch.log[0].seq, wire.LIKELY, payload)

    # --- other branches ---------------------------------------------------------------------------

    def _append_value(self, branch: EngineBranch, value: Value) -> str:
        branch.begun.append_ids(value.ids, value.text)
        return value.text

    def _fork(self, branch: EngineBranch, op: ir.Fork) -> None:
        self._num_forked_tokens += len(branch.begun.ids) * len(op.children)
        if self._num_forked_tokens > MAX_FORKED_TOKENS:
            raise InvalidProgram(
                f"the forks of this program begin with {self._num_forked_tokens} tokens together; "
                f"at most {MAX_FORKED_TOKENS}"
            )
        super()._fork(branch, op)
        if self._leases is not None:
            self._leases.note_fork(branch, [self._branch(number) for number in op.children])

    def _begin_child(self, branch: EngineBranch, child: EngineBranch) -> None:
        child.fork_length = len(child.begun.ids)
        child.namespace = branch.namespace
        child.kv = branch.kv.copy()

    def _append_children(self, branch: EngineBranch, children: list[EngineBranch]) -> str:
        whole = ""
        for child in children:
            ids = child.begun.ids[child.fork_length :]
            if not child.fork_length:  # it began with nothing, and so with a BOS of its own
                bos = self._context.tokenizer.bos_ids
                ids = ids[len(bos) :] if ids[: len(bos)] == array("i", bos) else ids
            text = self._context.tokenizer.decode_cached(ids, skip_special=False)
            branch.begun.append_ids(ids, text)
            whole += text
        return whole

    def _fails_from(self, branch: EngineBranch, op: ir.Op) -> int:
        seq = super()._fails_from(branch, op)
        if not branch.pending_text or op.branch != branch.number:
            return seq
        return min(seq, branch.pending_text[0].seq)  # a text too long is not part of it either

    def _stop(
        self, branch: EngineBranch, op: ir.Op, message: str, kind: str, field: str | None = None
    ) -> None:
        if self._leases is not None:
            self._leases.end(branch)
        if self._likely is not None:
            self._likely.end(branch)
        super()._stop(branch, op, message, kind, field)


class _Rest:
    """What a branch waits for until its program's next turn."""

    def abort(self, queue: object) -> None:
        """There is nothing to end."""


@dataclass(frozen=True, slots=True)
class _BranchReport:
    """A call's report goes to its branch."""

    session: ProgramSession
    branch: EngineBranch

    def delta(self, delta: Delta) -> None:
        self.session.emit_delta(self.branch, delta)

    def likely(self, text: str, chance: float) -> None:
        self.session.emit_likely(self.branch, text, chance)

    def finished(self, ids: array[int], tail: str, payload: dict[str, Any]) -> None:
        self.session.finish_call(self.branch, ids, tail, payload)

    def failed(self, message: str, kind: str) -> None:
        self.session.fail_call(self.branch, message, kind)
