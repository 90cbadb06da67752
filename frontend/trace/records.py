"""Records of a run: programs, their branches, calls, pauses and hints, as plain data.

A number that the runtime did not send is None. Times are seconds since the first program of the
report began.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..client.early_calls import EarlyCallCounts
from .moments import Span, busy_s


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One gen or select. Counts of a gen with n samples are sums, and times span all samples."""

    program: int  # index in the report
    branch: int
    seq: int
    path: str  # of its branch: "main", "main.0", ...
    kind: str  # "gen" or "select"
    name: str
    source: str | None
    num_samples: int = 1
    start_s: float | None = None  # None: it never began; for a failed call, when it could have
    end_s: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None  # those from the host and the disk included
    host_tokens: int | None = None
    disk_tokens: int | None = None
    forced_tokens: int | None = None  # generated tokens that a grammar forced
    drafted_tokens: int | None = None  # guesses of what follows that were verified
    accepted_tokens: int | None = None  # of these: were right
    generated_tokens: int | None = None
    evicted: Mapping[str, int] = field(default_factory=dict)  # whose cached tokens it evicted
    preemptions: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    error_kind: str | None = None  # the class of the runtime's error
    is_critical: bool = False  # on its program's critical path
    follows: int | None = None  # index of the call whose prompt and output its own continues

    @property
    def duration_s(self) -> float:
        """From its arrival to its end; 0 if it did not run."""
        if self.start_s is None or self.end_s is None:
            return 0.0
        return max(0.0, self.end_s - self.start_s)


@dataclass(frozen=True, slots=True)
class PauseRecord:
    """A time in which the author's code worked outside the model."""

    branch: int
    path: str
    label: str
    source: str | None
    start_s: float
    end_s: float
    expected_s: float | None
    is_critical: bool = False


@dataclass(frozen=True, slots=True)
class HintRecord:
    """An action on KV, and the runtime's outcome (None: it did not come)."""

    branch: int
    path: str
    action: str
    source: str | None
    outcome: str | None
    reason: str | None
    num_tokens: int | None


@dataclass(frozen=True, slots=True)
class LaneRecord:
    """One branch: from its fork to its last op or its join."""

    branch: int
    path: str
    depth: int
    parent: int | None
    start_s: float
    end_s: float
    joins: bool  # it flows back into its parent


@dataclass(frozen=True, slots=True)
class ProgramRecord:
    """One program; lanes depth first."""

    name: str
    start_s: float
    end_s: float
    lanes: tuple[LaneRecord, ...]
    calls: tuple[CallRecord, ...]
    pauses: tuple[PauseRecord, ...]
    hints: tuple[HintRecord, ...]
    early_calls: EarlyCallCounts = field(default_factory=EarlyCallCounts)  # of pure tools
    error: str | None = None  # the first failure of any branch
    error_kind: str | None = None

    @property
    def duration_s(self) -> float:
        """From its beginning to its end."""
        return self.end_s - self.start_s

    @property
    def critical_s(self) -> float:
        """Length of the critical path: its calls and pauses, without the gaps between them."""
        spans = [
            Span(call.start_s, call.end_s)
            for call in self.calls
            if call.is_critical and call.start_s is not None and call.end_s is not None
        ]
        spans += [Span(pause.start_s, pause.end_s) for pause in self.pauses if pause.is_critical]
        return busy_s(spans)
