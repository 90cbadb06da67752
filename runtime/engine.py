"""Connects the two halves: passes the scheduler's plans to the executor, and its results back.

One thread owns an engine and calls `step` while `has_work`. Requests come from any `Listener`; the
engine knows nothing of programs, sockets or text.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ..constrained.serving.compiler_service import GrammarCompiler
from ..errors import PromptTooLong, RankLost
from .memory.disk.block_store import BlockStore
from .schedule.cache.hint_actions import KVHints
from .schedule.cache.kv_cache import KVCacheManager, KVCacheOptions
from .schedule.image_encodings import ImageEncodings
from .schedule.plan import FailedStep, PendingStep, StepPlan
from .schedule.program_record import ProgramRecord
from .schedule.queue.adapter_slots import AdapterSlots
from .schedule.queue.policy import DEFAULT_POLICY
from .schedule.queue.prompt_limits import DEFAULT_SLOWDOWN
from .schedule.queue.waiting_queue import MAX_OVERTAKES
from .schedule.request import Request
from .schedule.scheduler import Scheduler
from .schedule.step_log import StepLog
from .speculate.drafting import Drafting

if TYPE_CHECKING:  # they need ZeroMQ, which benchmarks of a runner do without
    from .memory.peers.kv_receiver import KVReceiver

log = logging.getLogger(__name__)

# Of the last step's time: how long the next one waits for masks that other processes compute. Rows
# whose masks come later run in the step after; the others are slower by no more than this.
PARSER_SHARE = 0.1


class Executor(Protocol):
    """The engine's interface to the device half."""

    segment_cost_tokens: int  # see schedule/tree_order.py

    @property
    def can_overlap(self) -> bool:
        """Whether `submit` may return before the step has been computed, and the next plan refer
        to what it draws."""

    def submit(self, plan: StepPlan) -> PendingStep:
        """Start to compute the plan's tokens. Plans are executed, copies included, in the order in
        which they are submitted; `from_previous` in a plan refers to the plan submitted before.
        With `can_overlap` a second plan, but no third, may come before the first one's result; to
        an executor of several stages one more than those, if they are of other requests."""


class Engine:
    """A model with its KV pool and scheduler.

    Invariant: between two calls at most one step is pending, or as many as there are stages; none
    unless the executor can overlap or has stages.
    Lifetime: the process's. A step that raises ends only its own requests, with an error.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        num_pages: int,
        page_size: int,
        max_model_len: int,
        token_budget: int,
        max_running_requests: int,
        schedule_policy: str = DEFAULT_POLICY,
        decode_slowdown: float = DEFAULT_SLOWDOWN,
        max_overtakes: int | None = MAX_OVERTAKES,
        vocab_size: int = 0,
        kv_cache: KVCacheOptions | None = None,
        grammars: GrammarCompiler | None = None,
        tenant_weights: Mapping[Hashable, float] | None = None,
        has_overlap: bool = True,
        adapters: AdapterSlots | None = None,
        clock: Callable[[], float] = time.perf_counter,
        drafting: Drafting | None = None,
        images: ImageEncodings | None = None,
        num_layers: int = 1,
        num_stages: int = 1,
        gives_up_kv: bool = False,
    ) -> None:
        """`vocab_size`: needed if requests have grammars; `grammars`: compiles them.
        `tenant_weights`: see schedule/queue/fairness.py. `has_overlap`: plan a step while the
        executor computes the previous one, if it can. `adapters`: needed if requests have any.
        `images`, `num_layers`: see schedule/scheduler.py.
        `clock`: for deadlines and leases, in seconds. `drafting`: guess tokens and verify them;
        steps are then not planned ahead, nor are those of models with recurrent states: a row
        that turns out void would have moved its state on. `num_stages`: of the executor, through
        which several steps of other requests each go at a time. `gives_up_kv`: requests need not
        have all their KV at once, so that a text may be longer than the pool."""
        self._executor = executor
        self._pending: deque[tuple[int, PendingStep]] = deque()  # with their step ids
        has_states = kv_cache is not None and kv_cache.states is not None
        self.has_overlap = (
            has_overlap and executor.can_overlap and drafting is None and not has_states
        )
        self.grammars = grammars
        self._num_slots = num_pages * page_size
        self.max_model_len = max_model_len if gives_up_kv else min(max_model_len, self._num_slots)
        self.scheduler = Scheduler(
            KVCacheManager(num_pages, page_size, kv_cache, clock=clock),
            token_budget=token_budget,
            max_running_requests=max_running_requests,
            policy=schedule_policy,
            decode_slowdown=decode_slowdown,
            max_overtakes=max_overtakes,
            segment_cost_tokens=executor.segment_cost_tokens,
            vocab_size=vocab_size,
            tenant_weights=tenant_weights,
            has_overlap=self.has_overlap,
            adapters=adapters,
            clock=clock,
            drafting=drafting,
            images=images,
            num_layers=num_layers,
            num_stages=num_stages,
        )
        self.hints = KVHints(self.scheduler.kv_cache)
        self.step_log = StepLog()
        self._ids = itertools.count(1)
        self._patience_s = 0.0  # of the next step with parsers
        self.run = secrets.token_hex(8)  # names it: readers of its counters notice another one
        self.started_s = time.monotonic()
        self.last_step_s: float | None = None  # when a step last succeeded

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        has_grammars = self.grammars is not None and self.grammars.is_ready
        return has_grammars or self.scheduler.has_work

    @property
    def next_wake_s(self) -> float | None:
        """Clock time at which there may be work again without any input; None: never."""
        return self.scheduler.next_wake_s

    @property
    def kv_store(self) -> BlockStore | None:
        """The store that keeps prefixes over a restart. The engine's owner also waits for its
        fetches, and closes it."""
        stored = self.scheduler.kv_cache.stored
        return None if stored is None else stored.store

    @property
    def kv_receiver(self) -> KVReceiver | None:
        """KV that other engines compute for this one. The engine's owner also waits for it, and
        closes it."""
        coming = self.scheduler.kv_cache.coming
        return None if coming is None else coming.receiver

    @property
    def state_store(self) -> BlockStore | None:
        """The same for recurrent states, where the model has them."""
        stored = self.scheduler.kv_cache.stored
        return None if stored is None else stored.states

    def next_request_id(self) -> int:
        """Ids are unique within the process."""
        return next(self._ids)

    def submit(self, request: Request) -> None:
        """Queue a request; its max_tokens is cut to what fits the context.

        Raises PromptTooLong if not even one token would fit, DeadlineExceeded if its output is
        not expected in time.
        """
        num_tokens = request.num_prompt_tokens + request.rope_shift
        if request.compressed is not None:  # it is computed before, on its own
            num_tokens = max(num_tokens, request.compressed.num_positions)
        max_model_len = self.max_model_len
        if request.recompression is None:  # all its tokens have KV at once
            max_model_len = min(max_model_len, self._num_slots + request.rope_shift)
        room = max_model_len - request.num_prompt_tokens - request.rope_shift
        if request.recompression is not None and request.recompression.is_endless:
            room = request.sampling.max_tokens
        if max_model_len - num_tokens < request.samples:
            most = max_model_len - request.samples
            size = f"{num_tokens} tokens"
            is_cut = request.encoding is not None or request.hidden is not None
            remedy = "; truncate_prompt_tokens cuts it" if is_cut else ""
            raise PromptTooLong.than(size, most, max_model_len, remedy=remedy)
        if request.samples:
            request.max_output_tokens = min(request.sampling.max_tokens, room)
        self.scheduler.add(request)

    def abort(self, request: Request) -> None:
        """End a request now. Its pages are free on return, or when the pending step that uses them
        is done."""
        self.scheduler.abort(request)

    def end_program(self, program: ProgramRecord) -> None:
        """Note that a program will submit no more requests."""
        self.scheduler.end_program(program)

    def step(self) -> None:
        """Plan a step, execute it and apply its result; with overlap, or stages, apply an earlier
        step's result while this one is computed."""
        if self.grammars is not None:
            self.grammars.collect(self._patience_s)
        is_watched = self.step_log.is_on
        if is_watched:
            self.step_log.begin(self.scheduler)
        plan = self.scheduler.plan()
        if self.grammars is not None:
            self.grammars.parsers.send()  # an output may have begun
        if plan is not None:
            if is_watched:
                self.step_log.note_plan(plan, self.scheduler)
            self._pending.append((plan.step_id, self._submit(plan)))
        if self._is_refused:
            self.settle()
        elif self._pending and (
            plan is None or len(self._pending) >= self.scheduler.max_plans_in_flight
        ):
            self._take_result()

    def settle(self) -> None:
        """Wait for the pending steps, if any; their requests continue."""
        while self._pending:
            self._take_result()

    def _submit(self, plan: StepPlan) -> PendingStep:
        try:
            return self._executor.submit(plan)
        except RankLost:
            raise
        except Exception as error:
            return FailedStep(error)

    @property
    def _is_refused(self) -> bool:
        """Whether the newest step could not be submitted. The device may lack its page updates, so
        that a step after it would write to other requests' pages."""
        return bool(self._pending) and isinstance(self._pending[-1][1], FailedStep)

    def _take_result(self) -> None:
        """Apply the result of the oldest pending step."""
        step_id, pending = self._pending.popleft()
        try:
            result = pending.result()
        except RankLost:
            raise
        except Exception as error:
            log.exception("step %d failed", step_id)
            self._await_void()
            self.scheduler.fail(f"the step failed: {type(error).__name__}: {error}")
            return
        self.scheduler.apply(result)
        if self.grammars is not None:
            self.grammars.parsers.send()
            self._patience_s = PARSER_SHARE * (result.duration_s or 0.0)
        self.last_step_s = time.monotonic()
        if self.step_log.is_on:
            self.step_log.end(result, self.scheduler)

    def _await_void(self) -> None:
        """A step has failed: wait until the device is done with the steps submitted after it."""
        while self._pending:
            step_id, pending = self._pending.popleft()
            try:
                pending.result()
            except Exception as error:
                log.info("step %d, behind the one that failed: %s", step_id, error)

    def flush_cache(self) -> int:
        """Drop cached KV that nothing uses; returns the number of tokens dropped."""
        return self.scheduler.kv_cache.flush()

    def describe(self) -> dict[str, Any]:
        """Pool, queue and counters as plain data."""
        kv_cache, stats = self.scheduler.kv_cache, self.scheduler.stats
        page_size = kv_cache.page_size
        return {
            "max_model_len": self.max_model_len,
            "page_size": page_size,
            "total_tokens": kv_cache.num_pages * page_size,
            "free_tokens": kv_cache.allocator.num_free * page_size,
            "cached_tokens": kv_cache.tree.num_pages * page_size,
            "evictable_tokens": kv_cache.tree.evictable_pages * page_size,
            "forked_tokens": kv_cache.num_forked_tokens,
            "leases": kv_cache.describe_leases(),
            "host": None if kv_cache.host is None else kv_cache.host.describe(),
            "schedule_policy": self.scheduler.policy,
            "compressed": self.scheduler.compressions.describe(),
            "has_overlap": self.has_overlap,
            "num_waiting": self.scheduler.num_waiting,
            "num_running": len(self.scheduler.running),
            "states": {} if kv_cache.states is None else kv_cache.states.describe(),
            "kv_store": {} if kv_cache.stored is None else kv_cache.stored.describe(),
            "coming": {} if kv_cache.coming is None else kv_cache.coming.describe(),
            "run": self.run,
            "uptime_s": time.monotonic() - self.started_s,
            "grammars": {} if self.grammars is None else self.grammars.describe(),
            "speculation": {}
            if (drafts := self.scheduler.speculation) is None
            else drafts.describe(),
            "images": {} if (images := self.scheduler.images) is None else images.describe(),
            "lora": {} if (slots := self.scheduler.adapters) is None else slots.describe(),
            "stats": {name: getattr(stats, name) for name in stats.__slots__},
        }
