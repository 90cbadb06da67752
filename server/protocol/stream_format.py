"""How the pieces of a streamed response are framed."""

from __future__ import annotations

from dataclasses import dataclass

from .server_sent_events import PING


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """`ping`: what may be sent at any time between two pieces and changes nothing."""

    media_type: str
    ping: bytes


EVENT_STREAM = StreamFormat("text/event-stream; charset=utf-8", PING)
