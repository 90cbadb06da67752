"""Stand-ins for tests of the host half: a device that checks what it is told, listeners, queues.

The scripted executor's "model" is a chain of hashes over all tokens so far, kept in a simulated KV
store: its next token depends on the whole prefix as it is read back through the page table. A wrong
page, a stale table entry or KV of another prefix gives an assertion or another token.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from stemma.runtime.request import FinishReason, Request
from stemma.runtime.sampling_params import SamplingParams
from stemma.runtime.step import Row, RowResult, StepPlan, StepResult

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
    """What the scripted model samples in this state; STOP_ID rarely."""
    token_id = zlib.crc32(b"next", chain) % (VOCAB_SIZE * 4)
    return token_id % VOCAB_SIZE if token_id else STOP_ID


def score_of(chain: int, target: int) -> float:
    """What the scripted model says of `target` in this state."""
    return -float(zlib.crc32(target.to_bytes(4, "little"), chain) % 1000) / 100


def expected_output(
    prompt: Sequence[int], max_tokens: int, stop_ids: frozenset[int] = frozenset()
) -> tuple[list[int], FinishReason]:
    """What a request yields when nothing else exists: no pool, no batch, no cache."""
    chain = chain_of(prompt)
    output: list[int] = []
    while len(output) < max_tokens:
        token_id = next_token(chain)
        if token_id in stop_ids:
            return output, FinishReason.STOP
        output.append(token_id)
        chain = chain_of([token_id], chain)
    return output, FinishReason.LENGTH


class StepFailed(RuntimeError):
    """What the scripted executor raises when told to fail."""


class ScriptedExecutor:
    """A device made of dicts; `fail_steps` are calls that raise, `row_errors` request ids."""

    segment_cost_tokens = 0  # every run that two rows share is a segment

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.requests: dict[int, Request] = {}  # the truth about each request's tokens
        self.tables: dict[int, dict[int, int]] = {}  # table row -> index -> page
        self.kv: dict[int, tuple[int, int]] = {}  # slot -> (token id, chain up to it)
        self.fail_steps: set[int] = set()
        self.row_errors: set[int] = set()
        self.plans: list[StepPlan] = []

    @property
    def num_computed(self) -> int:
        """Tokens computed over all steps."""
        return sum(plan.num_tokens for plan in self.plans)

    def execute(self, plan: StepPlan) -> StepResult:
        """All rows store first, then each reads its whole prefix back."""
        self.plans.append(plan)
        rows_in_use = [row.table_row for row in plan.rows]
        assert len(set(rows_in_use)) == len(rows_in_use), "a table row is in a plan twice"
        for row in plan.rows:
            self._update_table(row)
        self._check_segments(plan)
        # A row may start on KV that another row of this plan stores, in whatever order.
        for row in sorted(plan.rows, key=lambda row: row.start):
            self._store(row)
        if len(self.plans) in self.fail_steps:
            self._poison([slot for row in plan.rows for slot in self._fresh_slots(row)])
            raise StepFailed(f"step {len(self.plans)} was told to fail")
        results = tuple(self._answer(row) for row in plan.rows)
        self._poison_failed_rows(plan)
        return StepResult(plan.step_id, results)

    def _update_table(self, row: Row) -> None:
        table = self.tables.setdefault(row.table_row, {})
        if row.page_update is None:
            return
        if row.page_update.first == 0:
            table.clear()  # the row has a new owner
        assert row.page_update.first == len(table), "an update leaves a hole or overwrites entries"
        for index, page in enumerate(row.page_update.pages, row.page_update.first):
            table[index] = page

    def _check_segments(self, plan: StepPlan) -> None:
        """Each row's segments follow each other from token 0 on, before its first input, and hold
        the same pages for all their rows."""
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
        end = row.start + len(row.input_ids)
        return [self._slot(row, position) for position in range(row.start, end)]

    def _store(self, row: Row) -> None:
        chain = self.kv[self._slot(row, row.start - 1)][1] if row.start else 1
        for slot, token_id in zip(self._fresh_slots(row), row.input_ids, strict=True):
            chain = chain_of([token_id], chain)
            self.kv[slot] = (token_id, chain)

    def _answer(self, row: Row) -> RowResult:
        end = row.start + len(row.input_ids)
        chains = self._read_back(row, end)
        if row.request_id in self.row_errors:
            return RowResult(error="this row was told to fail")
        scores = tuple(
            score_of(chains[row.start + row.target_start + i], target)
            for i, target in enumerate(row.target_ids)
        )
        token_id = None if row.sampling is None else next_token(chains[-1])
        return RowResult(token_id=token_id, target_logprobs=scores, target_argmax=row.target_ids)

    def _read_back(self, row: Row, end: int) -> list[int]:
        """The chain after each of the row's tokens, all checked against the request's own."""
        truth = self.requests[row.request_id].token_ids
        chain, chains = 1, []
        for position in range(end):
            chain = chain_of([truth[position]], chain)
            chains.append(chain)
            found = self.kv[self._slot(row, position)]
            assert found == (truth[position], chain), (
                f"request {row.request_id} reads KV of another prefix at position {position}"
            )
        return chains

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


class FakeQueue:
    """Takes a program's requests; the test decides what each of them generates or scores."""

    def __init__(self) -> None:
        self.open: list[Request] = []
        self.submitted: list[Request] = []
        self.aborted: list[Request] = []
        self.refuse: Callable[[Request], None] = lambda request: None

    def submit(self, request: Request) -> None:
        self.refuse(request)
        self.submitted.append(request)
        self.open.append(request)

    def abort(self, request: Request) -> None:
        if not request.is_finished:
            self.aborted.append(request)
            self._finish(request, FinishReason.ABORT)

    def generate(self, request: Request, token_ids: Sequence[int]) -> None:
        """Feed sampled tokens; the request ends (as if by EOS) unless a stop string did before."""
        for token_id in token_ids:
            request.append_token(token_id)
            reason = request.listener.on_token(request, RowResult(token_id=token_id))
            if reason is not None:
                return self._finish(request, reason)
        self._finish(request, FinishReason.STOP)

    def score(self, request: Request, logprobs: Sequence[float]) -> None:
        """Answer a scoring request."""
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
