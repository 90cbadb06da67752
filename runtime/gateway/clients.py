"""What an engine holds of its clients: their programs' sessions, and the leases of their hints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..programs.client_leases import StatedLeases
from ..programs.session import ProgramSession
from ..schedule.cache.hint_actions import KVHints
from ..sessions.clients import Client, ClientProgram, Clients


@dataclass(slots=True, eq=False)
class RunningProgram(ClientProgram):
    """A client's program, and what runs it."""

    session: ProgramSession


class EngineClient(Client[RunningProgram]):
    """A client of the engine."""

    def __init__(self, identity: bytes, now: float, hints: KVHints, **who: Any) -> None:
        """`who`: as `Client`."""
        super().__init__(identity, now, **who)
        self.stated = StatedLeases(hints)  # the leases that its hints made


EngineClients = Clients[EngineClient]
