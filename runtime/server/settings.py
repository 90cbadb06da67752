"""How the HTTP side behaves: plain data with its flags, none of it the engine's business."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Of one `stemma serve`."""

    host: str = "127.0.0.1"
    port: int = 8000
