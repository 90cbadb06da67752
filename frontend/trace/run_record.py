"""What the programs of a run did, as plain data: every call, and the totals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .moments import Span, busy_s
from .records import CallRecord, ProgramRecord


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all calls; None where no call has the number."""

    num_programs: int
    num_calls: int
    num_failed: int
    duration_s: float  # from the first program's beginning to the last one's end
    slowest_s: float  # duration of the slowest program
    critical_s: float  # its critical path
    parallelism: float | None  # average number of concurrent calls, while any ran
    hit_rate: float | None  # cached of prompt tokens
    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None
    pause_s: float
    prompt_tokens: int | None
    cached_tokens: int | None
    host_tokens: int | None
    disk_tokens: int | None
    forced_tokens: int | None
    drafted_tokens: int | None
    accepted_tokens: int | None
    generated_tokens: int | None
    evicted_tokens: int
    preemptions: int | None


class RunRecord:
    """Programs in the order in which they began, and their calls."""

    def __init__(
        self, programs: Sequence[ProgramRecord], tree: Mapping[str, Any] | None = None
    ) -> None:
        """`tree`: result of `backend.tree()` at the end."""
        self.programs = tuple(programs)
        self.tree = tree

    @property
    def calls(self) -> list[CallRecord]:
        """The calls of all programs, each program's in the order in which they were made."""
        return [call for program in self.programs for call in program.calls]

    @property
    def totals(self) -> Totals:
        """Totals of all programs."""
        calls, programs = self.calls, self.programs
        spans = [Span(c.start_s, c.end_s) for c in calls if c.start_s is not None and c.end_s]
        busy = busy_s(spans)
        prompt, cached = _sum(calls, "prompt_tokens"), _sum(calls, "cached_tokens")
        slowest = max(programs, key=lambda p: p.duration_s, default=None)
        return Totals(
            num_programs=len(programs),
            num_calls=len(calls),
            num_failed=sum(program.error is not None for program in programs),
            duration_s=max((p.end_s for p in programs), default=0.0),
            slowest_s=0.0 if slowest is None else slowest.duration_s,
            critical_s=0.0 if slowest is None else slowest.critical_s,
            parallelism=sum(span.duration_s for span in spans) / busy if busy else None,
            hit_rate=cached / prompt if prompt and cached is not None else None,
            queue_s=_sum(calls, "queue_s"),
            prefill_s=_sum(calls, "prefill_s"),
            decode_s=_sum(calls, "decode_s"),
            pause_s=sum(p.end_s - p.start_s for program in programs for p in program.pauses),
            prompt_tokens=prompt,
            cached_tokens=cached,
            host_tokens=_sum(calls, "host_tokens"),
            disk_tokens=_sum(calls, "disk_tokens"),
            forced_tokens=_sum(calls, "forced_tokens"),
            drafted_tokens=_sum(calls, "drafted_tokens"),
            accepted_tokens=_sum(calls, "accepted_tokens"),
            generated_tokens=_sum(calls, "generated_tokens"),
            evicted_tokens=sum(sum(call.evicted.values()) for call in calls),
            preemptions=_sum(calls, "preemptions"),
        )


def _sum(calls: Sequence[CallRecord], name: str) -> Any:
    known = [getattr(call, name) for call in calls if getattr(call, name) is not None]
    return sum(known) if known else None
