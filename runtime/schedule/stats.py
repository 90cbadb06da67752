"""What the scheduler has done since the start, counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerStats:
    """Tokens, steps and requests."""

    num_finished: int = 0
    num_gated: int = 0  # times that a request had to wait for the working set
    num_missed_deadlines: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_generated_tokens: int = 0
    num_jumped_tokens: int = 0  # of these: forced by a grammar, not sampled
    num_shared_tokens: int = 0  # KV that rows did not read because a segment was read once for all
    num_steps: int = 0
    num_overlapped_steps: int = 0  # of these: planned while the one before was computed
    num_void_rows: int = 0  # computed in vain, since their requests had ended meanwhile
