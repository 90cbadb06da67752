"""Stand-ins for tests of the host half: a device that checks its plans, listeners, queues.

The scripted executor's "model" is a chain of hashes over all tokens so far, stored in a simulated
KV store: its next token depends on the whole prefix as read back through the page table. A wrong
page, a stale table entry or KV of another prefix gives an assertion or another token.
"""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from stemma.constrained.matcher import Mask
from stemma.runtime.memory.copies import (
    BlockRestore,
    BlockSave,
    PageFork,
    StateRestore,
    StateSave,
    Transfer,
)
from stemma.runtime.memory.disk.block_file import Payload
from stemma.runtime.memory.disk.block_key import BLOCK_TOKENS
from stemma.runtime.schedule.plan import (
    FailedStep,
    FinishedStep,
    PendingStep,
    Row,
    RowResult,
    StepPlan,
    StepResult,
    TokenLogprob,
)
from stemma.runtime.schedule.program_record import ProgramRecord
from stemma.runtime.schedule.request import FinishReason, Request
from stemma.runtime.schedule.sampling_params import SamplingParams

VOCAB_SIZE = 8
STOP_ID = 0
_POISON = (-1, -1)


def chain_of(token_ids: Sequence[int], start: int = 1) -> int:
    """The scripted model's state after these tokens."""
    chain = start
    for token_id in token_ids:
        chain = zlib.crc32(token_id.to_bytes(4, "little"), chain)
    return chain


def next_token(chain: int) -> int:
    """The scripted model's sample in this state; STOP_ID rarely."""
    token_id = zlib.crc32(b"next", chain) % (VOCAB_SIZE * 4)
    return token_id % VOCAB_SIZE if token_id else STOP_ID


def pick(chain: int, allowed: Sequence[int]) -> int:
    """The scripted model's sample in this state if only these tokens are allowed."""
    return min(allowed, key=lambda token_id: (token_id - next_token(chain)) % VOCAB_SIZE)


@dataclass(frozen=True)
class ScriptedGrammar:
    """An automaton over token ids: `moves[state][token id]` is the next state, 0 the first one.

    Runs of forced tokens are cut at `MAX_RUN`, so that an endless one is followed piece by piece.
    """

    MAX_RUN = 5

    moves: tuple[dict[int, int], ...]
    accepting: frozenset[int] = frozenset()
    warnings: tuple[str, ...] = ()

    def matcher(self) -> ScriptedMatcher:
        return ScriptedMatcher(self)

    def is_finished(self, state: int) -> bool:
        return not self.moves[state]

    @classmethod
    def of(cls, *texts: Sequence[int]) -> ScriptedGrammar:
        """A grammar of exactly these outputs."""
        prefixes = sorted({tuple(t[:n]) for t in texts for n in range(len(t) + 1)})
        number = {prefix: index for index, prefix in enumerate(prefixes)}
        moves: tuple[dict[int, int], ...] = tuple({} for _ in prefixes)
        for prefix in prefixes[1:]:
            moves[number[prefix[:-1]]][prefix[-1]] = number[prefix]
        return cls(moves, frozenset(number[tuple(text)] for text in texts))


class ScriptedMatcher:
    """A `Matcher` of a ScriptedGrammar; it fails after `fail_after` tokens."""

    fail_after: int | None = None

    def __init__(self, grammar: ScriptedGrammar) -> None:
        self.grammar = grammar
        self.states = [0]

    def mask(self, out: Mask) -> None:
        out.fill(0)
        for token_id in () if self.error() else self.grammar.moves[self.states[-1]]:
            out[token_id // 32] |= np.uint32(1 << token_id % 32)

    def consume(self, token_id: int) -> bool:
        state = self.grammar.moves[self.states[-1]].get(token_id)
        if state is not None:
            self.states.append(state)
        return state is not None

    def rollback(self, num_tokens: int) -> None:
        del self.states[len(self.states) - num_tokens :]

    def fork(self) -> ScriptedMatcher:
        other = ScriptedMatcher(self.grammar)
        other.states, other.fail_after = self.states[:], self.fail_after
        return other

    def is_accepting(self) -> bool:
        return self.states[-1] in self.grammar.accepting

    def is_finished(self) -> bool:
        return self.grammar.is_finished(self.states[-1])

    def forced_tokens(self) -> Sequence[int]:
        state, run = self.states[-1], list[int]()
        while len(run) < self.grammar.MAX_RUN and state not in self.grammar.accepting:
            moves = self.grammar.moves[state]
            if len(moves) != 1:
                break
            ((token_id, state),) = moves.items()
            run.append(token_id)
        return run

    def error(self) -> str | None:
        is_failed = self.fail_after is not None and len(self.states) > self.fail_after
        return "the scripted matcher was told to fail" if is_failed else None


def score_of(chain: int, target: int) -> float:
    """The scripted model's score of `target` in this state."""
    return -float(zlib.crc32(target.to_bytes(4, "little"), chain) % 1000) / 100


def best_of(chain: int, allowed: Sequence[int]) -> tuple[TokenLogprob, ...]:
    """The scripted model's likeliest tokens in this state, best first."""
    scored = (TokenLogprob(token_id, score_of(chain, token_id)) for token_id in allowed)
    return tuple(sorted(scored, key=lambda token: -token.logprob))


def expected_output(
    prompt: Sequence[int],
    max_tokens: int,
    stop_ids: frozenset[int] = frozenset(),
    grammar: ScriptedGrammar | None = None,
) -> tuple[list[int], FinishReason]:
    """A request's output when nothing else exists: no pool, no batch, no cache, no jumps."""
    chain, state = chain_of(prompt), 0
    output: list[int] = []
    if grammar is not None and grammar.is_finished(0):
        return output, FinishReason.STOP
    while len(output) < max_tokens:
        allowed = set(range(VOCAB_SIZE))
        if grammar is not None:
            allowed = set(grammar.moves[state]) | (
                stop_ids if state in grammar.accepting else set()
            )
        token_id = pick(chain, sorted(allowed))
        if token_id in stop_ids:
            return output, FinishReason.STOP
        output.append(token_id)
        chain = chain_of([token_id], chain)
        if grammar is not None:
            state = grammar.moves[state][token_id]
            if grammar.is_finished(state):
                return output, FinishReason.STOP
    return output, FinishReason.LENGTH


def state_of(chain: int) -> npt.NDArray[np.float64]:
    """The hidden state [1] of a token with this chain; sums of them are exact."""
    return np.array([chain % 1_000_003], dtype=np.float64)


class StepFailed(RuntimeError):
    """Raised by the scripted executor when scheduled to fail."""


class ScriptedExecutor:
    """A device made of dicts; `fail_steps` are calls that raise, `row_errors` request ids.

    With `can_overlap` a step is computed when it is submitted, and its result withheld until it is
    requested: until then nobody else may write what its rows read. With `has_states` the model is
    recurrent too: a row must find the state behind the tokens before it in its slot.
    """

    segment_cost_tokens = 0  # every run that two rows share is a segment

    def __init__(
        self,
        page_size: int,
        *,
        can_overlap: bool = False,
        has_states: bool = False,
        num_stages: int = 1,
    ) -> None:
        """num_stages: with several, plans are of other requests each, and more may be pending."""
        self.page_size = page_size
        self.max_pending = num_stages + 1 if num_stages > 1 else 2
        self.has_states = has_states
        self.states: dict[int, int] = {}  # slot -> the chain behind its tokens; 0: worthless
        self.behind_drafts: dict[int, list[int]] = {}  # by the last step: behind one draft, two ...
        self.can_overlap = can_overlap
        self.pending: deque[ScriptedStep] = deque()
        self.events: list[tuple[str, int]] = []  # submissions and result requests, in order
        self.requests: dict[int, Request] = {}  # the true tokens of each request
        self.tables: dict[int, dict[int, int]] = {}  # table row -> index -> page
        self.kv: dict[int, tuple[int, int]] = {}  # slot -> (token id, chain up to it)
        self._overwritten: dict[int, tuple[int, int]] = {}  # see `ScriptedStep`
        self.host_kv: dict[int, tuple[int, int]] = {}  # the same on the host
        self.fail_steps: set[int] = set()
        self.row_errors: set[int] = set()
        self.plans: list[StepPlan] = []
        self._sampled: list[tuple[int, int | None]] = []  # by the last plan: request, token
        self.defects: list[Exception] = []  # errors in plans; the engine only reports them

    @property
    def num_computed(self) -> int:
        """Tokens computed over all steps."""
        return sum(plan.num_tokens for plan in self.plans)

    def submit(self, plan: StepPlan) -> PendingStep:
        if not self.can_overlap:
            return FinishedStep(self.execute(plan))
        self.events.append(("submit", plan.step_id))
        outcome = self._outcome(plan)
        named = {row.request_id: self._pages_of(row) for row in plan.rows}
        self.pending.append(ScriptedStep(self, plan, outcome, named, self._overwritten))
        assert len(self.pending) <= self.max_pending, "a step too many was submitted"
        return self.pending[-1]

    def _outcome(self, plan: StepPlan) -> PendingStep:
        """After a failed step nothing is computed until the failure is known."""
        if any(isinstance(step.outcome, FailedStep) for step in self.pending):
            self.plans.append(plan)
            for row in plan.rows:
                self._update_table(row)
                self._poison(self._fresh_slots(row))
            return FailedStep(StepFailed("this step came behind one that failed"))
        try:
            return FinishedStep(self.execute(plan))
        except StepFailed as error:
            return FailedStep(error)

    def _pages_of(self, row: Row) -> set[int]:
        num_pages = -(-(row.start + len(row.input_ids)) // self.page_size)
        return {self.tables[row.table_row][index] for index in range(num_pages)}

    def execute(self, plan: StepPlan) -> StepResult:
        """All rows store first, then each reads its whole prefix back."""
        self.plans.append(plan)
        try:
            return self._execute(plan)
        except StepFailed:
            raise
        except Exception as error:
            self.defects.append(error)
            raise

    def _execute(self, plan: StepPlan) -> StepResult:
        will_fail = len(self.plans) in self.fail_steps
        self._overwritten = {}
        payloads = []
        for copy in plan.transfers:
            if isinstance(copy, Transfer):
                self._transfer(copy, spoils=will_fail)
            elif isinstance(copy, PageFork):
                self._fork(copy, spoils=will_fail)
            elif isinstance(copy, BlockRestore):
                self._restore(copy, spoils=will_fail)
            else:
                payloads.append(self._payload(copy))
        rows_in_use = [row.table_row for row in plan.rows]
        assert len(set(rows_in_use)) == len(rows_in_use), "a table row is in a plan twice"
        for row in plan.rows:
            self._update_table(row)
        self._check_pending(plan)
        self._check_segments(plan)
        plan = replace(plan, rows=tuple(self._completed(row) for row in plan.rows))
        # A row may build on KV that another row of this plan stores, in any order.
        for row in sorted(plan.rows, key=lambda row: row.start):
            self._store(row)
        states = self._advance_states(plan, spoils=will_fail) if self.has_states else ()
        if will_fail:
            self._poison([slot for row in plan.rows for slot in self._fresh_slots(row)])
            raise StepFailed(f"step {len(self.plans)} was told to fail")
        results = tuple(self._answer(row, plan) for row in plan.rows)
        self._sampled = [(row.request_id, r.token_id) for row, r in zip(plan.rows, results)]
        self._poison_failed_rows(plan)
        return StepResult(
            plan.step_id, results, payloads=tuple(payloads), state_payloads=tuple(states)
        )

    def _advance_states(self, plan: StepPlan, *, spoils: bool) -> list[Payload]:
        """Copies, rows, copies; `spoils`: all that is written is worthless. Returns the payloads of
        saves, 8 bytes each."""
        for slot, num_right in plan.state_accepts:
            self.states[slot] = self.behind_drafts[slot][num_right - 1]
        self.behind_drafts.clear()
        payloads = []
        for copy in plan.state_loads:
            if isinstance(copy, StateSave):
                assert self.states[copy.slot], "a worthless state is saved"
                payloads.append(np.array([self.states[copy.slot]], "<u8").view(np.uint8))
            elif isinstance(copy, StateRestore):
                self.states[copy.slot] = int(copy.payload.view("<u8")[0])
            else:
                self.states[copy[1]] = self.states[copy[0]]
        slots = [row.state_slot for row in plan.rows]
        assert 0 not in slots and len(set(slots)) == len(slots), "rows share a state"
        for row in plan.rows:
            truth = self.requests[row.request_id].token_ids
            before = chain_of(truth[: row.start])
            found = self.states[row.state_slot] if row.start else before
            assert found == before, f"request {row.request_id} has the state of another prefix"
            failed = row.request_id in self.row_errors
            num_known = len(row.input_ids) - row.num_drafts
            chain = chain_of(row.input_ids[:num_known], before)
            self.states[row.state_slot] = 0 if failed else chain
            self.behind_drafts[row.state_slot] = [
                chain := chain_of([draft], chain) for draft in row.input_ids[num_known:]
            ]
        for source, target in plan.state_saves:
            assert source in slots and target not in slots
            self.states[target] = self.states[source]
        if spoils:
            copies = (*plan.state_loads, *plan.state_saves)
            written = [copy[1] for copy in copies if not isinstance(copy, StateSave)]
            written += [slot for slot, _ in plan.state_accepts]
            self.states.update(dict.fromkeys((*written, *slots), 0))
        return payloads

    def _completed(self, row: Row) -> Row:
        """The row with the token that the plan did not know yet."""
        if row.from_previous is None:
            return row
        request_id, token_id = self._sampled[row.from_previous]
        assert row.input_ids == (0,) and row.mask is None
        assert request_id == row.request_id, "a row goes on from another request's"
        failed = row.request_id in self.row_errors
        assert token_id is not None or failed, "a row goes on from one that sampled nothing"
        return row._replace(input_ids=(token_id or 0,))

    def _check_pending(self, plan: StepPlan) -> None:
        """A pending step's pages belong to its rows' requests, and only these write them."""
        loads = [c for c in plan.transfers if isinstance(c, Transfer) and c.kind == "load"]
        copied = {page for copy in loads for page in copy.device_pages}
        forks = [copy for copy in plan.transfers if isinstance(copy, PageFork)]
        copied |= {page for fork in forks for page in fork.targets}
        for step in self.pending:
            owners = {row.table_row: row.request_id for row in step.plan.rows}
            for number, named in step.named.items():
                assert copied.isdisjoint(named), "a copy writes what a pending step reads"
                for row in plan.rows:
                    assert owners.get(row.table_row, row.request_id) == row.request_id
                    written = {slot // self.page_size for slot in self._fresh_slots(row)}
                    is_own = number == row.request_id
                    assert is_own or written.isdisjoint(named), "a pending step's page is written"

    def _slots_of(self, pages: Sequence[int]) -> list[int]:
        return [page * self.page_size + i for page in pages for i in range(self.page_size)]

    def _early(self, slot: int) -> tuple[int, int]:
        """What a copy reads that a device makes beside the pending steps, before their rows."""
        for step in self.pending:
            if slot in step.overwritten:
                return step.overwritten[slot]
        return self.kv.get(slot, _POISON)

    def _payload(self, save: BlockSave) -> Payload:
        """8 bytes per token: the slot's contents; the block must match its name."""
        kv = [self._early(slot) for slot in self._slots_of(save.pages)]
        assert len(kv) == BLOCK_TOKENS and _POISON not in kv, "worthless KV is saved"
        ids = np.array([token_id for token_id, _ in kv], dtype="<i4")
        assert ids.tobytes() == save.block.token_ids, "a block is saved under a wrong name"
        return np.array(kv, dtype="<u4").view(np.uint8).ravel()

    def _restore(self, restore: BlockRestore, *, spoils: bool) -> None:
        slots = self._slots_of(restore.pages)
        kv = restore.payload.view("<u4").reshape(BLOCK_TOKENS, 2)[restore.first_token :]
        assert len(slots) <= len(kv)
        for slot, (token_id, chain) in zip(slots, kv.tolist()):
            self.kv[slot] = _POISON if spoils else (token_id, chain)

    def _transfer(self, transfer: Transfer, *, spoils: bool) -> None:
        """Only computed KV is ever stored; `spoils`: the copy goes wrong."""
        pairs = list(zip(transfer.device_pages, transfer.host_pages, strict=True))
        targets = [host if transfer.kind == "store" else device for device, host in pairs]
        assert len(set(targets)) == len(targets), "a transfer writes a page twice"
        for device, host in pairs:
            for offset in range(self.page_size):
                slot, host_slot = (page * self.page_size + offset for page in (device, host))
                if transfer.kind == "store":
                    kv = self._early(slot)
                    assert kv != _POISON, "worthless KV is stored"
                    self.host_kv[host_slot] = _POISON if spoils else kv
                else:
                    assert self.host_kv[host_slot] != _POISON, "worthless KV is loaded"
                    self.kv[slot] = _POISON if spoils else self.host_kv[host_slot]

    def _fork(self, fork: PageFork, *, spoils: bool) -> None:
        """As one launch: all is read before anything is written."""
        read = [self._early(slot) for slot in self._slots_of(fork.sources)]
        targets = self._slots_of(fork.targets)
        assert len(set(targets)) == len(targets), "a fork writes a page twice"
        self.kv.update(zip(targets, [_POISON] * len(read) if spoils else read, strict=True))

    def _update_table(self, row: Row) -> None:
        table = self.tables.setdefault(row.table_row, {})
        if row.page_update is None:
            return
        first = row.page_update.first
        assert first <= len(table), "an update leaves a hole"
        may_move = self.requests[row.request_id].beam is not None  # to another's pages
        is_behind_kv = first * self.page_size >= row.start
        assert first in (0, len(table)) or may_move or is_behind_kv, "an update overwrites entries"
        for index in range(first, len(table)):
            del table[index]  # the row has a new owner, or its request other pages from here on
        for index, page in enumerate(row.page_update.pages, row.page_update.first):
            table[index] = page

    def _check_segments(self, plan: StepPlan) -> None:
        """Each row's segments are consecutive from token 0 on, before its first input, and hold the
        same pages for all their rows."""
        covered = [0] * len(plan.rows)
        for segment in plan.segments:
            members = plan.rows[segment.row_start : segment.row_end]
            assert len(members) > 1, segment
            tokens = range(segment.token_start, segment.token_end)
            slots = [self._slot(members[0], token) for token in tokens]
            assert slots and segment.token_end % self.page_size == 0, segment
            for index, row in enumerate(members, segment.row_start):
                assert covered[index] == segment.token_start, segment
                covered[index] = segment.token_end
                assert segment.token_end <= row.start, (segment, row)
                assert [self._slot(row, token) for token in tokens] == slots, (segment, row)

    def _slot(self, row: Row, position: int) -> int:
        page = self.tables[row.table_row][position // self.page_size]
        return page * self.page_size + position % self.page_size

    def _fresh_slots(self, row: Row) -> list[int]:
        """Where the row stores KV."""
        end = row.start + len(row.input_ids)
        return [self._slot(row, at) for at in range(max(row.start, row.kv_start), end)]

    def _store(self, row: Row) -> None:
        before = self.kv[self._slot(row, row.start - 1)] if row.start else (0, 1)
        if before == _POISON:
            return self._poison(self._fresh_slots(row))
        _, chain = before
        for position, token_id in enumerate(row.input_ids, row.start):
            chain = chain_of([token_id], chain)
            if position >= row.kv_start:
                slot = self._slot(row, position)
                self._overwritten.setdefault(slot, self.kv.get(slot, _POISON))
                self.kv[slot] = (token_id, chain)

    def _answer(self, row: Row, plan: StepPlan) -> RowResult:
        end = row.start + len(row.input_ids)
        if row.request_id in self.row_errors:
            return RowResult(error="this row was told to fail")
        if self._may_read_failed and self._reads_poison(row, end):
            is_seen = row.sampling or row.target_ids or row.pooled_from is not None
            return RowResult(error="it reads what a failed row wrote") if is_seen else RowResult()
        chains = self._read_back(row, end)
        scores = tuple(
            score_of(chains[row.start + row.target_start + i], target)
            for i, target in enumerate(row.target_ids)
        )
        pooled = None
        if row.pooled_from is not None:
            pooled = sum(map(state_of, chains[row.start + row.pooled_from :]), np.zeros(1))
        result = RowResult(target_logprobs=scores, target_argmax=row.target_ids, pooled=pooled)
        if row.sampling is None:
            return result
        at = row.sampled_at or (len(row.input_ids) - 1,)
        drawn = [self._draw(row, plan, i, chains[row.start + place]) for i, place in enumerate(at)]
        if drawn[0].error is not None:
            return drawn[0]
        first, *later = drawn
        return result._replace(token_id=first.token_id, best=first.best, later=tuple(later))

    def _draw(self, row: Row, plan: StepPlan, draw: int, chain: int) -> RowResult:
        allowed: Sequence[int] = range(VOCAB_SIZE)
        if row.mask is not None:
            assert plan.masks is not None
            bits = np.unpackbits(plan.masks[row.mask + draw].view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits).tolist()
            if not allowed:
                return RowResult(error="the mask allows nothing")
        best = best_of(chain, allowed)[: row.num_best]
        return RowResult(token_id=pick(chain, allowed), best=best)

    def _read_back(self, row: Row, end: int) -> list[int]:
        """The chain after each of the row's tokens, all checked against the request's own."""
        truth = list(self.requests[row.request_id].token_ids)
        if row.from_previous is not None:
            assert len(truth) == row.start, "a row goes on from a token that is known"
            truth.append(row.input_ids[0])
        truth[row.known_end :] = row.input_ids[len(row.input_ids) - row.num_drafts :]
        chain, chains = 1, []
        for position in range(end):
            chain = chain_of([truth[position]], chain)
            chains.append(chain)
            found = self.kv[self._slot(row, position)]
            assert found == (truth[position], chain), (
                f"request {row.request_id} reads KV of another prefix at position {position}"
            )
        return chains

    @property
    def _may_read_failed(self) -> bool:
        """Whether a pending step has failed rows that the planner does not know of yet."""
        answers = (step.outcome.result() for step in self.pending)
        return any(row.error for answer in answers for row in answer.rows)

    def _reads_poison(self, row: Row, end: int) -> bool:
        return any(self.kv[self._slot(row, position)] == _POISON for position in range(end))

    def _poison_failed_rows(self, plan: StepPlan) -> None:
        """KV of a failed row is worthless, unless a healthy row of this step reads it too."""
        healthy = {
            self._slot(row, position)
            for row in plan.rows
            if row.request_id not in self.row_errors
            for position in range(row.start + len(row.input_ids))
        }
        for row in plan.rows:
            if row.request_id in self.row_errors:
                self._poison([slot for slot in self._fresh_slots(row) if slot not in healthy])

    def _poison(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.kv[slot] = _POISON


@dataclass(eq=False)
class ScriptedStep:
    """A step of a scripted executor whose result was not requested yet."""

    executor: ScriptedExecutor
    plan: StepPlan
    outcome: PendingStep
    named: dict[int, set[int]]  # pages that each request's row reads or writes
    overwritten: dict[int, tuple[int, int]]  # slots that its rows wrote: what was there before

    def result(self) -> StepResult:
        assert self.executor.pending.popleft() is self, "results are asked for out of order"
        self.executor.events.append(("result", self.plan.step_id))
        return self.outcome.result()


@dataclass(eq=False)
class FakeListener:
    """Records what happens to one request; `stop_after` ends it after that many tokens."""

    stop_after: int | None = None
    tokens: list[int] = field(default_factory=list)
    results: list[RowResult] = field(default_factory=list)
    num_finishes: int = 0
    when_finished: Callable[[Request], None] | None = None

    def on_token(self, request: Request, result: RowResult) -> FinishReason | None:
        assert result.token_id is not None and not self.num_finishes
        self.tokens.append(result.token_id)
        self.results.append(result)
        return FinishReason.STOP if len(self.tokens) == self.stop_after else None

    def on_finish(self, request: Request) -> None:
        self.num_finishes += 1
        if self.when_finished is not None:
            self.when_finished(request)


class ChunkTokenizer:
    """Decodes id `i` to the i-th of the given byte chunks; chunks may cut characters."""

    def __init__(self, chunks: Sequence[bytes]) -> None:
        self.chunks = list(chunks)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return b"".join(self.chunks[i] for i in ids).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id])


class FakeQueue:
    """Accepts a program's requests; the test decides what each of them generates or scores."""

    def __init__(self) -> None:
        self.open: list[Request] = []
        self.submitted: list[Request] = []
        self.aborted: list[Request] = []
        self.ended: list[ProgramRecord] = []
        self.refuse: Callable[[Request], None] = lambda request: None

    def submit(self, request: Request) -> None:
        self.refuse(request)
        self.submitted.append(request)
        self.open.append(request)

    def abort(self, request: Request) -> None:
        if not request.is_finished:
            self.aborted.append(request)
            self._finish(request, FinishReason.ABORT)

    def end_program(self, program: ProgramRecord) -> None:
        assert program not in self.ended, "ended twice"
        self.ended.append(program)

    def generate(self, request: Request, token_ids: Sequence[int]) -> None:
        """Feed sampled tokens; the request ends (as if by EOS) unless a stop string did before."""
        for token_id in token_ids:
            reason = self.feed(request, token_id)
            if reason is not None:
                return self._finish(request, reason)
        self._finish(request, FinishReason.STOP)

    def feed(self, request: Request, token_id: int) -> FinishReason | None:
        """Feed a sampled token; a reason if that ends the output."""
        request.append_token(token_id)
        return request.listener.on_token(request, RowResult(token_id=token_id))

    def score(self, request: Request, logprobs: Sequence[float]) -> None:
        """Complete a scoring request."""
        request.scores.extend(logprobs)
        self._finish(request, FinishReason.STOP)

    def fail(self, request: Request, error: str) -> None:
        """End a request as a failed step does."""
        request.error = error
        self._finish(request, FinishReason.ERROR)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        assert request.finish_reason is None, "ended twice"
        if request in self.open:
            self.open.remove(request)
        request.finish_reason = reason
        request.finished_s = request.created_s
        request.listener.on_finish(request)


@dataclass
class Events:
    """What a program session emitted, in order: (branch, seq, kind, payload)."""

    items: list[tuple[int, int, str, Any]] = field(default_factory=list)

    def __call__(self, branch: int, seq: int, kind: str, payload: Any) -> None:
        self.items.append((branch, seq, kind, payload))

    def of(self, kind: str) -> list[tuple[int, int, Any]]:
        """(branch, seq, payload) of all events of one kind."""
        return [(b, s, p) for b, s, k, p in self.items if k == kind]


def make_request(
    request_id: int,
    prompt: Sequence[int],
    *,
    max_tokens: int = 4,
    stop_ids: frozenset[int] = frozenset(),
    listener: FakeListener | None = None,
    **fields: Any,
) -> Request:
    """A greedy request with a FakeListener."""
    return Request(
        id=request_id,
        prompt=array("i", prompt),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        listener=listener or FakeListener(),
        stop_ids=stop_ids,
        **fields,
    )
