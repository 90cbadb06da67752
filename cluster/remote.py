"""Replicas that somebody else starts, as systemd, Kubernetes or a person do, on any machine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import zmq

from ..frontend.client.peer_process import PeerProcess
from ..frontend.protocol.keys import ClientKeys
from .replica import Replica
from .settings import ClusterSettings

CONNECT_S = 10.0  # until an address without an answer counts as an engine that is lost


@dataclass(frozen=True, slots=True)
class Found:
    """A `Started` engine that is not ours to end."""

    endpoint: str
    keys: ClientKeys | None

    @property
    def peer(self) -> PeerProcess | None:
        """Its connection tells which, where it is a process of this host."""
        return None

    def kill(self) -> None:
        """It may serve others."""

    def stop(self) -> None:
        """It may serve others."""


def remote_replicas(
    settings: ClusterSettings, context: zmq.Context[zmq.Socket[bytes]]
) -> list[Replica]:
    """Of each address one; not connected yet."""
    return [
        Replica(
            number,
            partial(Found, endpoint, settings.keys_for(endpoint)),
            context=context,
            connect_s=CONNECT_S,
            is_own=False,
        )
        for number, endpoint in enumerate(settings.engines)
    ]
