"""Programs that can go on, whose tenants take turns: nobody waits for all of another."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator

from ..programs.session import ProgramSession


class ReadyPrograms:
    """Owns their order: of a tenant first come, first served.

    Invariant: a program is in it once; a tenant with some has one turn in each round.
    """

    def __init__(self) -> None:
        self._of: OrderedDict[Hashable, dict[ProgramSession, None]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._of)

    def __iter__(self) -> Iterator[ProgramSession]:
        for sessions in self._of.values():
            yield from sessions

    def add(self, session: ProgramSession) -> None:
        """It can go on; where it is here already it keeps its place."""
        self._of.setdefault(session.record.tenant, {})[session] = None

    def discard(self, session: ProgramSession) -> None:
        """It has ended, or never was here."""
        sessions = self._of.get(session.record.tenant)
        if sessions is not None and session in sessions:
            del sessions[session]
            if not sessions:
                del self._of[session.record.tenant]

    def take(self) -> ProgramSession:
        """The next one, of the tenant whose turn it is; there must be one."""
        tenant, sessions = self._of.popitem(last=False)
        session = next(iter(sessions))
        del sessions[session]
        if sessions:
            self._of[tenant] = sessions
        return session
