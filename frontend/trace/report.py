"""Reports of what programs did: as text, as a page, as data.

A report is a snapshot of programs, taken while they run or afterwards (`report_of`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .notebook import framed
from .recording import record_of
from .report_text import text_of
from .run_record import RunRecord
from .timeline import page_of

if TYPE_CHECKING:
    from ..client.program import Program


class Report(RunRecord):
    """Programs in the order in which they began, and their calls."""

    def to_text(self) -> str:
        """A table per program and the totals, for a terminal."""
        return text_of(self)

    def to_html(self) -> str:
        """The timeline: one standalone file, no network."""
        return page_of(self)

    def __str__(self) -> str:
        """The same as `to_text()`."""
        return self.to_text()

    def _repr_html_(self) -> str:
        return framed(self.to_html())

    def to_json(self) -> dict[str, Any]:
        """Plain data: programs with lanes, calls, pauses, hints; totals; the tree or None."""
        programs = [
            {**asdict(p), "duration_s": p.duration_s, "critical_s": p.critical_s}
            for p in self.programs
        ]
        tree = None if self.tree is None else dict(self.tree)
        return {"programs": programs, "totals": asdict(self.totals), "tree": tree}


def report_of(program: Program) -> Report:
    """A report of one program, as far as it is known now."""
    return report_of_all([program])


def report_of_all(programs: Iterable[Program], tree: Mapping[str, Any] | None = None) -> Report:
    """Several programs on one time axis."""
    ordered = sorted(programs, key=lambda program: program.started_s)
    zero = ordered[0].started_s if ordered else 0.0
    return Report([record_of(p, i, zero) for i, p in enumerate(ordered)], tree)
