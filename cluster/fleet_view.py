"""What a router shows of its replicas: how each is, what became of programs there, and one tree.

Everything is there at any time, also while no replica answers; what only engines know is what they
said last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import InvalidProgram
from ..radix.fleet import FleetTree
from .cache_mirror import CacheMirror
from .counters import Counts, ReplicaCounters, sum_of_counts
from .placement.load import BYTES_PER_TOKEN
from .replica import Replica, RoutedProgram

MAX_TREE_NODES = 2000  # as of one engine
MAX_NODE_IDS = 1024
_OF_ENGINES = (
    "total_tokens", "free_tokens", "cached_tokens", "evictable_tokens", "num_running",
    "num_waiting", "uptime_s",
)  # fmt: skip


@dataclass(slots=True)
class ProgramCounts:
    """What became of programs at one replica since the router started."""

    num_placed: int = 0  # given to it, as often as that was so
    num_moved: int = 0  # taken from it while it ran, to go on elsewhere
    num_lost: int = 0  # that it had when it ended
    num_rehoused: int = 0  # of those that any replica had lost: given to it


@dataclass(slots=True)
class _Record:
    """Of one number, whichever replicas have it one after the other."""

    replica: Replica
    programs: ProgramCounts = field(default_factory=ProgramCounts)
    counters: ReplicaCounters = field(default_factory=ReplicaCounters)
    num_starts_before: int = 0  # of replicas that had the number
    num_losses: int = 0  # times that it ended, or did not answer, and nobody had asked for it


class FleetView:
    """Owns what is counted of each replica. Invariant: no count decreases while the router runs,
    though engines end, and replicas come and go."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        cached: FleetTree[int],
        mirrors: Mapping[int, CacheMirror],
    ) -> None:
        """`replicas`, `cached`, `mirrors`: the router's own, as they change."""
        self._replicas = replicas
        self._cached = cached
        self._mirrors = mirrors
        self._records: dict[int, _Record] = {}

    # --- what happens ---------------------------------------------------------------------------

    def place(self, program: RoutedProgram, replica: Replica) -> None:
        """A program runs there now."""
        counts = self._record(replica).programs
        counts.num_placed += 1
        counts.num_rehoused += program.was_lost
        program.was_lost = False

    def move(self, replica: Replica) -> None:
        """A program is taken from there, to go on elsewhere."""
        self._record(replica).programs.num_moved += 1

    def lose(self, replica: Replica, *, is_asked: bool) -> None:
        """A replica has ended, or is about to (`is_asked`: as it was to), and its programs with
        it."""
        record = self._record(replica)
        if is_asked:
            record.programs.num_moved += len(replica.programs)
            return
        record.num_losses += replica.is_serving
        record.programs.num_lost += len(replica.programs)
        for program in replica.programs.values():
            program.was_lost = True

    def note(self, replica: Replica, report: dict[str, Any]) -> None:
        """What a replica says of itself, of `info` or `metrics`, in the order in which it does."""
        self._record(replica).counters.note(report)

    def _record(self, replica: Replica) -> _Record:
        record = self._records.get(replica.number)
        if record is None:
            record = self._records[replica.number] = _Record(replica)
        elif record.replica is not replica:
            record.num_starts_before += record.replica.num_starts
            record.replica = replica
        return record

    # --- what is told ---------------------------------------------------------------------------

    def num_placed(self) -> dict[int, int]:
        """Programs given to each replica that there is, by its number."""
        return {each.number: self._record(each).programs.num_placed for each in self._replicas}

    def counts(self) -> Counts:
        """What all engines have counted that there ever were."""
        return sum_of_counts(record.counters.total() for record in self._records.values())

    def reports(self, infos: Mapping[int, dict[str, Any]]) -> list[dict[str, Any]]:
        """How each replica is; `infos`: what they say of themselves, where they do."""
        return [self._report(replica, infos.get(replica.number)) for replica in self._replicas]

    def _report(self, replica: Replica, info: dict[str, Any] | None) -> dict[str, Any]:
        record = self._record(replica)
        num_starts = record.num_starts_before + replica.num_starts
        told = {
            "replica": replica.number,
            "state": "stopped" if replica.is_paused else replica.state.value,
            "role": replica.role,
            "num_starts": replica.num_starts,
            "num_restarts": max(0, num_starts - 1) if replica.is_own else record.num_losses,
            "num_losses": record.num_losses,
            "num_calls": replica.num_calls,
            "num_programs": len(replica.programs),
            "programs": asdict(record.programs),
            "is_cache_known": self._mirrors[replica.number].is_known,
            "stats": record.counters.total().get(("stats",)),
        }
        if info is None:
            return told if replica.is_serving else {**told, "why": replica.why_lost}
        return told | {name: info.get(name) for name in _OF_ENGINES}

    def tree(
        self,
        max_nodes: int = 1000,
        max_token_ids: int = 48,
        namespace: str | None = None,
        **_: object,
    ) -> dict[str, Any]:
        """All replicas' trees as one: the prefixes used last, parents first, and who has them.
        `max_token_ids`: how much text of each, in tokens of usual length. Raises InvalidProgram."""
        rows, is_whole = self._cached.snapshot(
            max_nodes=_bounded("max_nodes", max_nodes, MAX_TREE_NODES),
            max_bytes=int(BYTES_PER_TOKEN * _bounded("max_token_ids", max_token_ids, MAX_NODE_IDS)),
            namespace=namespace,
        )
        return {"nodes": rows, "is_whole": is_whole}


def _bounded(name: str, value: object, most: int) -> int:
    """Raises InvalidProgram."""
    if not isinstance(value, int) or not 0 <= value <= most:
        raise InvalidProgram.of(name, value, f"an integer in [0, {most}]")
    return value
