"""What programs did: every call with its times and tokens, and what the whole came to.

A report is plain data, taken from programs once, while they run or afterwards (`report_of`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from .moments import Span, busy_s
from .recording import record_of
from .records import CallRecord, HintRecord, LaneRecord, PauseRecord, ProgramRecord

if TYPE_CHECKING:
    from ..program import Program

__all__ = [
    "CallRecord",
    "HintRecord",
    "LaneRecord",
    "PauseRecord",
    "ProgramRecord",
    "Report",
    "Totals",
    "report_of",
    "report_of_all",
]


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all calls; None where no call has the number."""

    num_programs: int
    num_calls: int
    num_failed: int
    duration_s: float  # from the first program's beginning to the last one's end
    slowest_s: float  # how long the slowest program took
    critical_s: float  # its critical path
    parallelism: float | None  # calls under way on average, while any was
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
    generated_tokens: int | None
    evicted_tokens: int
    preemptions: int | None


class Report:
    """Programs in the order in which they began, and their calls."""

    def __init__(
        self, programs: Sequence[ProgramRecord], tree: Mapping[str, Any] | None = None
    ) -> None:
        """`tree` is what `backend.tree()` said at the end."""
        self.programs = tuple(programs)
        self.tree = tree

    @property
    def calls(self) -> list[CallRecord]:
        """Of all programs, each program's in the order in which they were made."""
        return [call for program in self.programs for call in program.calls]

    @property
    def totals(self) -> Totals:
        """Over all programs."""
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
            generated_tokens=_sum(calls, "generated_tokens"),
            evicted_tokens=sum(sum(call.evicted.values()) for call in calls),
            preemptions=_sum(calls, "preemptions"),
        )

    def to_text(self) -> str:
        """A table a program and the totals, for a terminal."""
        from .report_text import text_of

        return text_of(self)

    def to_html(self) -> str:
        """The timeline: one standalone file, no network."""
        from .timeline import page_of

        return page_of(self)

    def to_json(self) -> dict[str, Any]:
        """Plain data: programs with lanes, calls, pauses, hints; totals; the tree or None."""
        programs = [
            {**asdict(p), "duration_s": p.duration_s, "critical_s": p.critical_s}
            for p in self.programs
        ]
        tree = None if self.tree is None else dict(self.tree)
        return {"programs": programs, "totals": asdict(self.totals), "tree": tree}


def report_of(program: Program) -> Report:
    """One program, as far as it is known now."""
    return report_of_all([program])


def report_of_all(programs: Iterable[Program], tree: Mapping[str, Any] | None = None) -> Report:
    """Several programs on one time axis."""
    ordered = sorted(programs, key=lambda program: program.started_s)
    zero = ordered[0].started_s if ordered else 0.0
    return Report([record_of(p, i, zero) for i, p in enumerate(ordered)], tree)


def _sum(calls: Sequence[CallRecord], name: str) -> Any:
    known = [getattr(call, name) for call in calls if getattr(call, name) is not None]
    return sum(known) if known else None
