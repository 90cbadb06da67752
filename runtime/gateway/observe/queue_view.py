"""The running and waiting requests for people: each one's progress, and what it waits for."""

from __future__ import annotations

from itertools import islice
from typing import Any

from ...schedule.request import Request
from ...schedule.scheduler import Scheduler
from ...schedule.step_log import name_of

MAX_RUNNING = 128
MAX_WAITING = 64


def queue_view(scheduler: Scheduler, now_s: float) -> dict[str, Any]:
    """The running requests, in the policy's order, and the first waiting ones, each tenant's in
    order of arrival. Cost: O(reported requests and their prompts)."""
    waiting = islice(scheduler.waiting, MAX_WAITING)
    return {
        "policy": scheduler.policy,
        "num_running": len(scheduler.running),
        "num_waiting": scheduler.num_waiting,
        "running": [_running(request, now_s) for request in scheduler.running[:MAX_RUNNING]],
        "waiting": [
            {**_told(request, now_s), "why": waits_for(request, scheduler)} for request in waiting
        ],
    }


def waits_for(request: Request, scheduler: Scheduler) -> str:
    """What keeps a request from running: the first of these that holds.

    "preempted": it ran, and comes back first once there are pages; "rows": the maximum number of
    requests runs; "gate": the working set has no room for its program; "prefix": another request
    computes what it shares; "pages": its prompt exceeds the free pages; "turn": others come first.
    """
    kv_cache = scheduler.kv_cache
    if scheduler.waiting.is_preempted(request):
        return "preempted"
    if not scheduler.num_free_rows:
        return "rows"
    if scheduler.waiting.is_parked(request):
        return "gate"
    if scheduler.is_behind_prefix(request):
        return "prefix"
    if request.num_tokens > kv_cache.num_available_pages * kv_cache.page_size:
        return "pages"
    return "turn"


def _running(request: Request, now_s: float) -> dict[str, Any]:
    node = request.node
    return {
        **_told(request, now_s),
        "node": None if node is None else node.id,
        "depth": request.num_published,  # its tokens that are in the tree
        "computed": request.num_computed_tokens,
        "cached": request.num_cached_tokens,
        "output": request.num_output_tokens,
        "forced": request.num_forced_tokens,
        "lacks_grammar": request.awaits_grammar,
    }


def _told(request: Request, now_s: float) -> dict[str, Any]:
    return {
        "id": request.id,
        **name_of(request),
        "prompt": request.num_prompt_tokens,
        "max_output": request.max_output_tokens,
        "task": "score" if request.scoring else "embed" if request.hidden else "generate",
        "priority": request.priority,
        "age_s": round(now_s - request.created_s, 3),
        "num_preemptions": request.num_preemptions,
    }
