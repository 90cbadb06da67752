"""The seam between a program and what carries out its ops: a runtime's connection, or this process.

A program hands its ops to a `Channel` and is handed events through an `EventSink`; it does not know
whether a runtime shares KV between its calls or a client asks some server call by call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ...errors import EngineError
from ..protocol.ir import Op


class EventSink(Protocol):
    """What a channel needs of a program."""

    def handle_event(self, branch: int, seq: int, kind: str, payload: Any) -> None:
        """An event of the op `(branch, seq)`, kinds and payloads as in `wire`; must not block.

        Called on a thread of the channel's.
        """

    def handle_disconnect(self, error: EngineError) -> None:
        """Nothing more will come."""


class Channel(Protocol):
    """Carries out programs; thread-safe."""

    @property
    def info(self) -> dict[str, Any]:
        """What is known of the model: at least `model`, its name."""

    def open_program(self, sink: EventSink, create: dict[str, object]) -> int:
        """Register a program; `create` has seed, instance, stream. Raises EngineError."""

    def send_op(self, program: int, op: Op) -> None:
        """Take the next op; it is carried out at the latest a few milliseconds later.

        Raises InvalidProgram, and has then taken nothing, if it cannot be.
        """

    def flush(self, program: int, *, end: bool = False) -> None:
        """Carry out what was sent now; `end` says that no op of this program follows."""

    def close_program(self, program: int) -> None:
        """Forget a program; if it has not ended, what is left of it is cancelled."""

    def call_soon(self, work: Callable[[], None]) -> None:
        """Have a thread of the channel's run `work`, which must neither block nor raise; it is not
        run once the channel has ended.

        Safe in a finalizer, on any thread: it takes no lock.
        """


class OwnedChannel(Channel, Protocol):
    """A channel that lives until it is closed: what a backend owns."""

    def close(self) -> None:
        """End everything; programs still open are cancelled."""
