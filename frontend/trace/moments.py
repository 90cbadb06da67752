"""When the ops of a program happened, and its critical path.

The runtime reports when a call began and how long it took; for other ops only the time of sending
and what they waited for are known. Times are seconds since the program began.

The critical path is traced backwards from what ended last: each step goes to the op that its
successor waited for longest (its predecessor on the branch, a fork, the ends of joined branches, a
var's origin). An op sent later than all of these were ready was held back by the author's code; the
path then continues from the call whose value had come back last before.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..protocol import ir
from .op_graph import OpGraph, OpKey


@dataclass(frozen=True, slots=True)
class Span:
    """From `begin_s` to `end_s`."""

    begin_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """Never negative."""
        return max(0.0, self.end_s - self.begin_s)


class Moments:
    """The span of every op: a call's or pause's own; for others the moment of passing it."""

    def __init__(
        self,
        graph: OpGraph,
        sent_s: Mapping[OpKey, float],
        calls: Mapping[OpKey, Span],
        end_s: float,
    ) -> None:
        """`sent_s` of every op; `calls`: the spans of those that ran; `end_s`: of the program."""
        self.spans: dict[OpKey, Span] = {}
        self._graph = graph
        self._causes: dict[OpKey, OpKey | None] = {}
        self._needs = _needs(graph)
        self._ends = sorted((span.end_s, key) for key, span in calls.items())
        pauses = _pauses(graph, sent_s, end_s)
        for op in graph.ops:
            key = (op.branch, op.seq)
            sent = sent_s.get(key, 0.0)
            cause, ready_s = self._cause(key, sent)
            self._causes[key] = cause
            own = calls.get(key) or pauses.get(key)
            self.spans[key] = own or Span(max(sent, ready_s), max(sent, ready_s))

    def critical_path(self) -> list[OpKey]:
        """Calls and pauses on the critical path, in order of time."""
        if not self.spans:
            return []
        key: OpKey | None = max(self.spans, key=lambda k: (self.spans[k].end_s, k))
        path: list[OpKey] = []
        seen: set[OpKey] = set()
        while key is not None and key not in seen:
            seen.add(key)
            if self.spans[key].duration_s > 0:
                path.append(key)
            key = self._causes[key]
        return path[::-1]

    def _cause(self, key: OpKey, sent_s: float) -> tuple[OpKey | None, float]:
        """What the op waited for longest, and when that was ready."""
        needed = [n for n in self._needs.get(key, ()) if n in self.spans]
        latest = max(needed, key=lambda n: self.spans[n].end_s, default=None)
        ready_s = 0.0 if latest is None else self.spans[latest].end_s
        if sent_s <= ready_s:
            return latest, ready_s
        index = bisect_right(self._ends, (sent_s, (1 << 62, 0))) - 1
        if index >= 0 and self._ends[index][0] > ready_s and self._ends[index][1] in self.spans:
            return self._ends[index][1], ready_s
        return latest, ready_s


def busy_s(spans: Sequence[Span]) -> float:
    """Time in which at least one of them was running."""
    total, until = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.begin_s):
        total += max(0.0, span.end_s - max(span.begin_s, until))
        until = max(until, span.end_s)
    return total


def _needs(graph: OpGraph) -> dict[OpKey, list[OpKey]]:
    """Every op's predecessor on its branch, and the origins of the edges into it."""
    needs: dict[OpKey, list[OpKey]] = {}
    for op in graph.ops:
        if op.seq:
            needs.setdefault((op.branch, op.seq), []).append((op.branch, op.seq - 1))
    for edge in graph.edges:
        needs.setdefault(edge.target, []).append(edge.origin)
    return needs


def _pauses(graph: OpGraph, sent_s: Mapping[OpKey, float], end_s: float) -> dict[OpKey, Span]:
    """A pause lasts until its branch sends its next op that appends something."""
    pauses: dict[OpKey, Span] = {}
    for branch in graph.branches:
        until = end_s
        for op in reversed(branch.ops):
            key = (op.branch, op.seq)
            if isinstance(op, ir.Pause):
                pauses[key] = Span(sent_s.get(key, 0.0), until)
            elif not isinstance(op, ir.Hint):
                until = sent_s.get(key, until)
    return pauses
