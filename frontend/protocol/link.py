"""One side's half of a session: every numbered message arrives exactly once and in order.

Each side numbers its messages from 1 and keeps them until the other has acknowledged them; a
connection may break at any point. On the next one both sides report how many they have received,
and each resends the rest. The user of a link bounds the kept messages: it checks `unacked_bytes`
before it puts more. Knows neither sockets nor the messages' contents.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import ProtocolError
from . import wire


@dataclass(frozen=True, slots=True)
class _Kept:
    parts: list[bytes]
    num_bytes: int


class Link:
    """Numbers, keeps and resends outgoing messages; accepts incoming ones in order, once each.

    Invariant: `_kept` holds the messages `num_acked + 1` to `num_put`, of which those up to
    `num_sent` have been passed to a socket. Lifetime: the session's.
    """

    def __init__(self) -> None:
        self.num_put = 0
        self.num_sent = 0
        self.num_acked = 0
        self.num_taken = 0
        self.unacked_bytes = 0
        self._kept: deque[_Kept] = deque()
        self._taken_bytes = 0  # since the last acknowledgement

    # --- out ------------------------------------------------------------------------------------

    def put(self, op: str, **header: Any) -> None:
        """Number a message and keep it for `unsent`. Raises ProtocolError if it is too large."""
        self._keep(wire.encode(op, n=self.num_put + 1, ack=self.take_ack(), **header))

    def put_list(self, op: str, name: str, items: Sequence[bytes]) -> None:
        """The same for a message whose field `name` is a list of encoded items."""
        self._keep(wire.encode_list(op, name, items, n=self.num_put + 1, ack=self.take_ack()))

    def _keep(self, parts: list[bytes]) -> None:
        num_bytes = sum(len(part) for part in parts)
        self._kept.append(_Kept(parts, num_bytes))
        self.num_put += 1
        self.unacked_bytes += num_bytes

    def unsent(self) -> list[bytes] | None:
        """The parts of the next message to send; confirm with `sent`."""
        if self.num_sent == self.num_put:
            return None
        return self._kept[self.num_sent - self.num_acked].parts

    def sent(self) -> None:
        """The message that `unsent` returned is on its way."""
        self.num_sent += 1

    def resume(self, num_taken: object) -> None:
        """A new connection: the other side has received this many. Raises ProtocolError."""
        self.acknowledge(num_taken)
        self.num_sent = self.num_acked

    def acknowledge(self, num_taken: object) -> None:
        """The other side has received this many. Raises ProtocolError for an impossible number."""
        count = _count("ack", num_taken)
        if count > self.num_put:
            raise ProtocolError(f"ack={count} is not allowed: only {self.num_put} were sent")
        while self.num_acked < count:
            self.unacked_bytes -= self._kept.popleft().num_bytes
            self.num_acked += 1
        self.num_sent = max(self.num_sent, self.num_acked)

    # --- in -------------------------------------------------------------------------------------

    def take(self, message: wire.Message) -> bool:
        """Whether to handle this message: not if it was received before. Raises ProtocolError where
        one before it is missing."""
        if "ack" in message.header:
            self.acknowledge(message.header["ack"])
        if message.op not in wire.NUMBERED_OPS:
            return True
        number = _count("n", message.header.get("n"))
        if number <= self.num_taken:
            return False
        if number != self.num_taken + 1:
            raise ProtocolError(
                f"message {number} came after {self.num_taken}: say hello with the session's token "
                "to send again what is missing"
            )
        self.num_taken = number
        self._taken_bytes += message.num_bytes
        return True

    @property
    def owes_ack(self) -> bool:
        """Whether the other side is due an acknowledgement."""
        return self._taken_bytes >= wire.ACK_AFTER_BYTES

    def take_ack(self) -> int:
        """The number of messages received, for a message that is sent now."""
        self._taken_bytes = 0
        return self.num_taken


def _count(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise ProtocolError(
            f"{name}={value!r:.200} is not allowed; allowed: an integer in [0, 2**63)"
        )
    return value
