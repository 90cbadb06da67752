"""What an engine and a process that follows a grammar tell each other: frames on a socket.

engine                              process
the compiled grammar         --->
                             <---   Opened, or a Refusal
Advance (several outputs)    --->
                             <---   a Position an output, in order

With the host that forks such processes, without frames, it exchanges on a socket:

FORK, and the parser's end   --->
                             <---   ENDING, of a parser that has not ended by itself; only then its
                                    channel ends
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
from dataclasses import dataclass
from typing import Any

TOKEN_LIMIT_S = 0.25  # of CPU time, for one token: 5 times what `pushdown.LIMITS` allows a mask
MAX_EXTRA_BYTES = 500 * 2**20  # of a parser's memory, beyond what all of them share

FORK = struct.Struct("<q")  # the parser's number
ENDING = struct.Struct("<qi")  # and its exit code, negative for a signal

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Position:
    """Where an output stands in its grammar once it has followed `forced`; with an `error` it
    cannot go on."""

    forced: tuple[int, ...] = ()
    mask: bytes | None = None  # uint32 [num_words]; None: ask again behind the forced tokens
    is_accepting: bool = False
    is_finished: bool = False
    error: str | None = None
    # Of the tokens expected here those that it allows, each with the position behind it.
    ahead: tuple[tuple[int, Position], ...] = ()

    def allows(self, token_id: int) -> bool:
        """Whether it may be the next token."""
        if self.mask is None or self.error is not None:
            return False
        return bool(self.mask[token_id >> 3] >> (token_id & 7) & 1)


@dataclass(frozen=True, slots=True)
class Opened:
    """The process follows the grammar; `first` is where each output begins."""

    first: Position
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Advance:
    """Tokens that outputs have taken, by the outputs' numbers, and outputs that have ended. Before
    that, `forks`: new outputs that begin where others stand, by both numbers. `expected`: tokens
    that may follow what some have taken, what is forced among them."""

    taken: tuple[tuple[int, tuple[int, ...]], ...]
    ended: tuple[int, ...]
    forks: tuple[tuple[int, int], ...] = ()
    expected: tuple[tuple[int, tuple[int, ...]], ...] = ()


class Channel:
    """The engine's end of a socket to such a process; never waits. `number` names the process."""

    def __init__(self, connection: socket.socket, number: int) -> None:
        connection.setblocking(False)
        self.number = number
        self._socket = connection
        self._unsent = bytearray()
        self._received = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether `push` is to be called when the socket takes more."""
        return bool(self._unsent)

    def send(self, payload: bytes) -> None:
        """Send a frame, now or by `push`. Raises OSError where the process has ended."""
        self._unsent += _LENGTH.pack(len(payload)) + payload
        self.push()

    def push(self) -> None:
        """Send what the socket takes. Raises OSError where the process has ended."""
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]

    def receive(self) -> list[Any]:
        """What has come whole. Raises OSError or EOFError where the process has ended."""
        with contextlib.suppress(BlockingIOError):
            data = self._socket.recv(1 << 20)
            if not data:
                raise EOFError
            self._received += data
        messages = []
        while len(self._received) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                break
            messages.append(pickle.loads(self._received[_LENGTH.size : end]))
            del self._received[:end]
        return messages

    def close(self) -> None:
        self._socket.close()
