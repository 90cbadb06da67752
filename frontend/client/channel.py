"""The interface between a program and what runs its ops: a runtime's connection, or this process.

A program passes its ops to a `Channel` and receives events through an `EventSink`; it does not know
whether a runtime shares KV between its calls or a client asks a server call by call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ...errors import EngineError
from ..protocol.ir import Op


class EventSink(Protocol):
    """What a channel needs from a program."""

    def handle_event(self, branch: int, seq: int, kind: str, payload: Any) -> None:
        """An event of the op `(branch, seq)`, kinds and payloads as in `wire`; must not block.

        Called on one of the channel's threads.
        """

    def handle_disconnect(self, error: EngineError) -> None:
        """No more events will come."""


class Channel(Protocol):
    """Runs programs; thread-safe."""

    @property
    def info(self) -> dict[str, Any]:
        """Facts about the model: at least `model`, its name."""

    def open_program(self, sink: EventSink, create: dict[str, object]) -> int:
        """Register a program; `create` has seed, instance, stream. Raises EngineError."""

    def send_op(self, program: int, op: Op) -> None:
        """Accept the next op; it runs at the latest a few milliseconds later.

        Raises InvalidProgram, without accepting the op, if it cannot run.
        """

    def flush(self, program: int, *, end: bool = False) -> None:
        """Run now what was sent; `end` means that no op of this program follows."""

    def close_program(self, program: int) -> None:
        """Remove a program; if it has not ended, the rest of it is cancelled."""

    def call_soon(self, work: Callable[[], None]) -> None:
        """Run `work` on one of the channel's threads; it must neither block nor raise, and does not
        run once the channel has ended.

        Safe in a finalizer, on any thread: it takes no lock.
        """


class OwnedChannel(Channel, Protocol):
    """A channel that lives until it is closed: owned by a backend."""

    def close(self) -> None:
        """End everything; programs still open are cancelled."""
