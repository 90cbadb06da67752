"""The last steps of the engine: each one's rows, how long it took, and what it cost the cache.

Recorded only while a client watches: otherwise a step only checks one flag.
docs/serve/watch.md has the figures.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from .plan import Row, StepPlan, StepResult
from .request import Request
from .scheduler import Scheduler

MAX_STEPS = 512
MAX_STEPS_A_CALL = 192  # the newest of them
MAX_ROWS = 48  # of a step that are listed, of decoding rows and of the others each
MAX_NAMES = 4096

PREFILL, DECODE, SCORING, FORCED = "prefill", "decode", "score", "forced"


class StepLog:
    """Owns a ring of the last MAX_STEPS steps, and the names of their requests.

    Invariant: nothing is recorded unless `is_on`.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._steps: deque[dict[str, Any]] = deque(maxlen=MAX_STEPS)
        self._names: dict[int, tuple[int, dict[str, Any]]] = {}  # with the step that it came with
        self._forced: dict[int, int] = {}  # tokens reported as forced, by request
        self._began_s = 0.0
        self._ended_s = 0.0  # of the last step
        self._before: tuple[int, ...] = ()  # see `_counts`
        self._open: dict[int, dict[str, Any]] = {}  # steps planned but not ended

    def __len__(self) -> int:
        return len(self._steps)

    def stop(self) -> None:
        """Stop recording and forget all steps."""
        self.is_on = False
        self._steps.clear()
        self._names.clear()
        self._forced.clear()
        self._open.clear()

    def begin(self, scheduler: Scheduler) -> None:
        """Called before a step is planned."""
        self._began_s = time.perf_counter()
        if not self._open:
            self._before = _counts(scheduler)

    def note_plan(self, plan: StepPlan, scheduler: Scheduler) -> None:
        """Record the step just planned; `scheduler` still has its requests."""
        planned_s = time.perf_counter()
        decode: list[int] = []
        others: list[tuple[int, str, int, int, int]] = []
        sums = {PREFILL: 0, DECODE: 0, FORCED: 0, SCORING: 0, "cached": 0}
        for row, request in zip(plan.rows, scheduler.in_flight):
            if row.request_id not in self._names:
                self._names[row.request_id] = (plan.step_id, name_of(request))
            num_forced = 0 if request.grammar is None else self._take_forced(row, request)
            is_output = row.start >= request.num_prompt_tokens
            if is_output and row.known_end == row.start + 1 and not num_forced:
                decode.append(row.request_id)
                continue
            told = _row(row, request, num_forced)
            others.append(told)
            _, kind, num_tokens, num_cached, _ = told
            sums[kind] += num_tokens - num_forced
            sums[FORCED] += num_forced
            sums["cached"] += num_cached
        sums[DECODE] += len(decode)
        self._open[plan.step_id] = {
            "id": plan.step_id,
            "start_s": self._began_s,
            "plan_ms": round(1000 * (planned_s - self._began_s), 3),
            "tokens": sums,
            "decode": decode[:MAX_ROWS],
            "rows": others[:MAX_ROWS],
            "num_more": max(0, len(decode) - MAX_ROWS) + max(0, len(others) - MAX_ROWS),
            "num_shared": sum(segment.num_saved_tokens for segment in plan.segments),
            "num_copies": len(plan.transfers),
            "work": work_of(plan.rows),
        }
        while len(self._names) > MAX_NAMES:
            number = next(iter(self._names))
            del self._names[number]
            self._forced.pop(number, None)

    def _take_forced(self, row: Row, request: Request) -> int:
        """How many of a row's tokens its grammar forced, each counted once."""
        num_tokens = row.known_end - row.start
        num_output = min(num_tokens, row.known_end - request.num_prompt_tokens)
        known = self._forced.get(request.id)
        if known is None:  # perhaps it ran before recording began
            known = max(0, request.num_forced_tokens - max(0, num_output))
        num_forced = max(0, min(request.num_forced_tokens - known, num_output))
        self._forced[request.id] = known + num_forced
        return num_forced

    def end(self, result: StepResult, scheduler: Scheduler) -> None:
        """Record an executed and applied step. A step planned during another one begins when that
        one ends, and events meanwhile count once."""
        step = self._open.pop(result.step_id, None)
        for failed in [number for number in self._open if number < result.step_id]:
            del self._open[failed]
        if step is None:
            return
        kv_cache, now_s = scheduler.kv_cache, time.perf_counter()
        counts = _counts(scheduler)
        evicted, preempted, jumped, drafted, accepted = (
            after - before for after, before in zip(counts, self._before)
        )
        self._before = counts
        start_s = max(step["start_s"], self._ended_s)
        self._ended_s = now_s
        device_s = result.duration_s
        step |= {
            "start_s": round(start_s, 4),
            "ms": round(1000 * (now_s - start_s), 3),
            "device_ms": None if device_s is None else round(1000 * device_s, 3),
            "num_waiting": scheduler.num_waiting,
            "num_running": len(scheduler.running),
            "free_tokens": kv_cache.allocator.num_free * kv_cache.page_size,
            "evicted_tokens": evicted,
            "num_preempted": preempted,
            "num_jumped": jumped,
            "num_drafted": drafted,
            "num_accepted": accepted,
        }
        step["tokens"][DECODE] += accepted
        self._steps.append(step)

    def since(self, step_id: int) -> dict[str, Any]:
        """The steps after `step_id`, oldest first, and the names of requests that came with them;
        `num_missed`: later steps that are not included."""
        newer: list[dict[str, Any]] = []
        for step in reversed(self._steps):
            if step["id"] <= step_id or len(newer) == MAX_STEPS_A_CALL:
                break
            newer.append(step)
        newer.reverse()
        names = {
            str(number): name for number, (step, name) in self._names.items() if step > step_id
        }
        missed = newer[0]["id"] - step_id - 1 if newer and step_id else 0
        return {"items": newer, "names": names, "num_missed": missed}


def work_of(rows: Iterable[Row]) -> dict[str, int]:
    """What rows compute: tokens, those of them with logits, keys (each read once a row), and pairs
    of a token and a key that it sees where all layers see all that is before it."""
    num_tokens = num_logits = num_keys = num_pairs = 0
    for row in rows:
        length = len(row.input_ids)
        num_tokens += length
        num_logits += len(row.target_ids)
        num_logits += 0 if row.sampling is None else max(1, len(row.sampled_at))
        num_keys += row.start + length
        num_pairs += length * row.start + length * (length + 1) // 2
    return {"tokens": num_tokens, "logits": num_logits, "keys": num_keys, "pairs": num_pairs}


def name_of(request: Request) -> dict[str, Any]:
    """A request's description for people."""
    program = request.program
    return {
        "program": None if program is None else program.label,
        "tenant": str(request.client if program is None else program.tenant),
        "namespace": str(request.namespace),
    }


def _row(row: Row, request: Request, num_forced: int) -> tuple[int, str, int, int, int]:
    """(request, kind, tokens, tokens cached before its first ones, how many of `tokens` a grammar
    forced). Tokens computed again after a preemption count as prefill."""
    num_tokens = row.known_end - row.start
    is_first = row.page_update is not None and row.page_update.first == 0
    is_output = row.start >= request.num_prompt_tokens and num_tokens - num_forced <= 1
    kind = SCORING if not request.samples else DECODE if is_output else PREFILL
    return row.request_id, kind, num_tokens, row.start if is_first else 0, num_forced


def _counts(scheduler: Scheduler) -> tuple[int, ...]:
    """Of what happens within steps."""
    stats = scheduler.stats
    return (
        scheduler.kv_cache.num_evicted_tokens,
        stats.num_preemptions,
        stats.num_jumped_tokens,
        stats.num_draft_tokens,
        stats.num_accepted_tokens,
    )
