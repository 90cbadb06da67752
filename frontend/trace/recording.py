"""Converts a program as its client knows it to the record of what it did.

The runtime reports by its own clock when a call ran; the rest follows from when the op was sent and
when its value came.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import ProgramError
from ..protocol import ir
from .moments import Moments, Span
from .op_graph import OpGraph, OpKey
from .records import CallRecord, HintRecord, LaneRecord, PauseRecord, ProgramRecord

if TYPE_CHECKING:
    from ..client.program import Pending, Program


def record_of(program: Program, index: int, zero_s: float) -> ProgramRecord:
    """The program's record as number `index` of a report that begins at `zero_s`
    (time.perf_counter())."""
    return _Maker(program, index, zero_s).record()


class _Maker:
    """Internal times are relative to the program's beginning; `shift` converts to the report's."""

    def __init__(self, program: Program, index: int, zero_s: float) -> None:
        self._program = program
        self._index = index
        log = list(program.log)
        self._graph = OpGraph(program.name, [op for _, op in log])
        self._shift = program.started_s - zero_s
        self._sent = {(op.branch, op.seq): at - program.started_s for at, op in log}
        self._pending = dict(program._pending)
        self._errors = dict(program._errors)
        self._failed = program.failed_ops()
        calls = [op for op in self._graph.ops if isinstance(op, ir.Gen | ir.Select)]
        self._calls = {(op.branch, op.seq): op for op in calls}
        self._metas = {key: _samples(self._pending.get(key)) for key in self._calls}
        spans = self._call_spans()
        ended = [span.end_s for span in spans.values()]
        known_end = program.ended_s
        self._end_s = max([0.0, *ended, *self._sent.values()])
        if known_end is not None:
            self._end_s = max(0.0, known_end - program.started_s)
        self._moments = Moments(self._graph, self._sent, spans, self._end_s)
        self._spans = spans
        self._critical = set(self._moments.critical_path())

    def record(self) -> ProgramRecord:
        """The whole record."""
        first = self._errors[min(self._errors)][1] if self._errors else None
        failure: Exception | None = first or self._program._disconnect
        return ProgramRecord(
            name=self._program.name,
            start_s=self._shift,
            end_s=self._shift + self._end_s,
            lanes=tuple(self._lanes()),
            calls=tuple(self._call_records()),
            pauses=tuple(self._pauses()),
            hints=tuple(self._hints()),
            early_calls=self._program.early_calls.counts,
            error=None if failure is None else str(failure) or type(failure).__name__,
            error_kind=None if failure is None else _kind(failure),
        )

    def _call_spans(self) -> dict[OpKey, Span]:
        """When each call ran. The runtime counts from its first sight of the program; the call
        whose value came back fastest shows how much later than here that was."""
        known = {k: _timing(metas) for k, metas in self._metas.items() if metas}
        arrived = {k: self._arrived(k) for k in known}
        lags = [arrived[k] - (t.start_s + t.latency_s) for k, t in known.items() if t.is_complete]
        lag = max(0.0, min(lags, default=0.0))
        spans: dict[OpKey, Span] = {}
        for key, timing in known.items():
            end = arrived[key]
            begin = self._sent[key]
            if timing.latency_s:
                begin = max(0.0, end - timing.latency_s)
            if timing.is_complete:
                begin = timing.start_s + lag
                end = begin + timing.latency_s
            spans[key] = Span(begin, max(begin, end))
        return spans

    def _arrived(self, key: OpKey) -> float:
        done_s = self._pending[key].done_s
        return self._sent[key] if done_s is None else done_s - self._program.started_s

    def _call_records(self) -> Iterable[CallRecord]:
        followed = _followed(self._graph)
        indices = {key: index for index, key in enumerate(self._calls)}
        for key, op in self._calls.items():
            previous = followed[key]
            yield self._call_record(key, op, None if previous is None else indices[previous])

    def _call_record(self, key: OpKey, op: ir.Op, follows: int | None) -> CallRecord:
        metas, span = self._metas[key], self._spans.get(key)
        failure = self._failed.get(key)
        if failure is not None:  # when it failed is unknown, only since when it could run
            reached = self._moments.spans[key].begin_s
            span = Span(reached, reached)
        queue_s, prefill_s, decode_s = _parts(metas)
        return CallRecord(
            program=self._index,
            branch=op.branch,
            seq=op.seq,
            path=self._graph.branch(op.branch).path,
            kind=op.kind,
            name=getattr(op, "name", "") or "",
            source=op.source,
            num_samples=max(1, len(metas)),
            start_s=None if span is None else self._shift + span.begin_s,
            end_s=None if span is None else self._shift + span.end_s,
            queue_s=queue_s,
            prefill_s=prefill_s,
            decode_s=decode_s,
            prompt_tokens=_count(metas, "prompt_tokens"),
            cached_tokens=_count(metas, "cached_tokens"),
            host_tokens=_count(metas, "host_tokens"),
            disk_tokens=_count(metas, "disk_tokens"),
            forced_tokens=_count(metas, "forced_tokens"),
            drafted_tokens=_count(metas, "drafted_tokens"),
            accepted_tokens=_count(metas, "accepted_tokens"),
            generated_tokens=_count(metas, "completion_tokens"),
            evicted=dict(sum((Counter(meta.get("evicted") or {}) for meta in metas), Counter())),
            preemptions=_count(metas, "preemptions"),
            finish_reason=metas[0].get("finish_reason") if metas else None,
            error=None if failure is None else failure.message,
            error_kind=None if failure is None else failure.kind,
            is_critical=key in self._critical,
            follows=follows,
        )

    def _lanes(self) -> Iterable[LaneRecord]:
        spans = self._moments.spans
        joined = {edge.origin[0]: edge.target for edge in self._graph.edges if edge.kind == "join"}
        for branch in self._graph.branches:
            own = [spans[op.branch, op.seq] for op in branch.ops if (op.branch, op.seq) in spans]
            fork = branch.parent
            start = 0.0 if fork is None else spans[fork].end_s
            end = max((span.end_s for span in own), default=start)
            if branch.number in joined:
                end = max(end, spans[joined[branch.number]].end_s)
            yield LaneRecord(
                branch=branch.number,
                path=branch.path,
                depth=branch.depth,
                parent=None if fork is None else fork[0],
                start_s=self._shift + start,
                end_s=self._shift + (self._end_s if branch.number == 0 else end),
                joins=branch.number in joined,
            )

    def _pauses(self) -> Iterable[PauseRecord]:
        for op in self._graph.ops:
            if isinstance(op, ir.Pause):
                span = self._moments.spans[op.branch, op.seq]
                yield PauseRecord(
                    branch=op.branch,
                    path=self._graph.branch(op.branch).path,
                    label=op.label,
                    source=op.source,
                    start_s=self._shift + span.begin_s,
                    end_s=self._shift + span.end_s,
                    expected_s=op.expected_s,
                    is_critical=(op.branch, op.seq) in self._critical,
                )

    def _hints(self) -> Iterable[HintRecord]:
        for op in self._graph.ops:
            if isinstance(op, ir.Hint):
                pending = self._pending.get((op.branch, op.seq))
                value = pending.value if pending is not None else None
                outcome = value if isinstance(value, dict) else {}
                yield HintRecord(
                    branch=op.branch,
                    path=self._graph.branch(op.branch).path,
                    action=op.action,
                    source=op.source,
                    outcome=outcome.get("outcome"),
                    reason=outcome.get("reason"),
                    num_tokens=outcome.get("num_tokens"),
                )


def _followed(graph: OpGraph) -> dict[OpKey, OpKey | None]:
    """For each call the one before it on its branch, or on those that it was forked from."""
    followed: dict[OpKey, OpKey | None] = {}
    last: dict[int, OpKey | None] = {}
    for op in graph.ops:
        if isinstance(op, ir.Fork):
            last.update(dict.fromkeys(op.children, last.get(op.branch)))
        elif isinstance(op, ir.Gen | ir.Select):
            followed[op.branch, op.seq] = last.get(op.branch)
            last[op.branch] = (op.branch, op.seq)
    return followed


def _kind(error: Exception) -> str:
    return error.kind if isinstance(error, ProgramError) else type(error).__name__


@dataclass(frozen=True, slots=True)
class _Timing:
    """When a call's samples ran, by the runtime's clock."""

    start_s: float
    latency_s: float
    is_complete: bool  # both are known


def _timing(metas: Sequence[Mapping[str, Any]]) -> _Timing:
    starts = [meta["start_s"] for meta in metas if meta.get("start_s") is not None]
    latencies = [meta["latency_s"] for meta in metas if meta.get("latency_s") is not None]
    is_complete = len(starts) == len(latencies) == len(metas)
    start = min(starts, default=0.0)
    if not is_complete:
        return _Timing(start, max(latencies, default=0.0), False)
    end = max(s + latency for s, latency in zip(starts, latencies, strict=True))
    return _Timing(start, end - start, True)


def _parts(
    metas: Sequence[Mapping[str, Any]],
) -> tuple[float | None, float | None, float | None]:
    """Queue, prefill and decode time; of several samples those of the slowest."""
    if not metas:
        return None, None, None
    meta = max(metas, key=lambda meta: meta.get("latency_s") or 0.0)
    queue, prefill, decode = (meta.get(name) for name in ("queue_s", "prefill_s", "decode_s"))
    first, latency = meta.get("time_to_first_token_s"), meta.get("latency_s")
    if prefill is None and first is not None and queue is not None:
        prefill = max(0.0, first - queue)
    if decode is None and first is not None and latency is not None:
        decode = max(0.0, latency - first)
    return queue, prefill, decode


def _samples(pending: Pending | None) -> list[Mapping[str, Any]]:
    """The meta of each sample of a finished call."""
    if pending is None or not pending.is_done:
        return []
    return list(pending.meta) if isinstance(pending.meta, list) else [pending.meta]


def _count(metas: Sequence[Mapping[str, Any]], name: str) -> int | None:
    known = [meta[name] for meta in metas if meta.get(name) is not None]
    return sum(known) if known else None
