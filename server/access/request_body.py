"""A request's body as it comes in: how large it may be, how slow, and how much all have together.

The bytes of all bodies under way are a `SharedLimit`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from starlette.types import Message, Receive

from ...shared_limit import SharedLimit
from ..protocol.awake_timer import AwakeTimer
from ..protocol.failures import Refusal

BYTES_PER_TOKEN = 64  # of a context: text, its escapes, and what is around it (guess)
LEAST_DEFAULT_BYTES = 4_000_000  # for batches, schemas and tools
MOST_DEFAULT_BYTES = 32_000_000
GRACE_S = 10.0  # a body may take so long,
LEAST_BYTES_PER_S = 32_768  # and a second more for so much of it (guess: a poor uplink)
SMALL_BYTES = 65_536  # of each body are not counted among those of all
ROOM_BYTES = 256_000_000  # for all bodies; more where a single one may be large:
LARGEST_IN_ROOM = 8


def default_max_bytes(context_tokens: int) -> int:
    """The largest body by default: about what a context of so many tokens can hold."""
    return min(max(LEAST_DEFAULT_BYTES, BYTES_PER_TOKEN * context_tokens), MOST_DEFAULT_BYTES)


@dataclass(frozen=True, slots=True)
class BodyLimit:
    """How large a body may be, and how long a context the model has, where that is known."""

    num_bytes: int
    max_model_len: int | None = None

    @property
    def text(self) -> str:
        """In the words by which clients recognise a context that is exceeded, as it mostly is by
        a body that is too large."""
        most = f"a body may have at most {self.num_bytes / 1e6:g} MB"
        if self.max_model_len is None:
            return most
        return f"{most}. This model's maximum context length is {self.max_model_len} tokens"


class RequestBody:
    """Receives one body. Its room is given back when the context is left."""

    def __init__(
        self,
        receive: Receive,
        room: SharedLimit,
        owner: str | None,
        limit: BodyLimit,
        length: str | None,
    ) -> None:
        """`length`: the announced Content-Length. Raises Refusal where that is too much."""
        self._receive = receive
        self._room = room
        self._owner = owner
        self._limit = limit
        self._num_bytes = self._num_held = 0
        self._timer = AwakeTimer(asyncio.get_running_loop())
        self._left_s = GRACE_S  # that may be spent on waiting for it
        self._is_whole = False
        if (
            length is not None
            and length.isdecimal()
            and (len(length) > 18 or int(length) > limit.num_bytes)
        ):
            raise self._too_large()

    async def receive(self) -> Message:
        """The ASGI callable. Raises Refusal."""
        if self._is_whole:
            return await self._receive()
        try:
            message = await self._receive_in_time()
        except TimeoutError:
            may_take_s = GRACE_S + self._num_bytes / LEAST_BYTES_PER_S
            reason = f"the body is too slow: {self._num_bytes} bytes of it in {may_take_s:.3g} s"
            raise Refusal(408, reason, headers={"connection": "close"}) from None
        if message["type"] == "http.request":
            self._count(len(message.get("body", b"")))
            self._is_whole = not message.get("more_body", False)
        return message

    async def _receive_in_time(self) -> Message:
        """Raises TimeoutError."""
        async with asyncio.timeout(None) as patience:
            self._timer.start(self._left_s, lambda: patience.reschedule(0))
            try:
                return await self._receive()
            finally:
                self._left_s = self._timer.stop()

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._left_s += num_bytes / LEAST_BYTES_PER_S
        if self._num_bytes > self._limit.num_bytes:
            raise self._too_large()
        fresh = max(0, self._num_bytes - SMALL_BYTES) - self._num_held
        if fresh:
            room_bytes = max(ROOM_BYTES, LARGEST_IN_ROOM * self._limit.num_bytes)
            if self._room.num_missing(self._owner, fresh, room_bytes):
                raise self._too_much(room_bytes)
            self._room.take(self._owner, fresh)
            self._num_held += fresh

    def _too_large(self) -> Refusal:
        return Refusal(413, self._limit.text, headers={"connection": "close"})

    def _too_much(self, room_bytes: int) -> Refusal:
        used_bytes, own_bytes = self._room.num_used, self._room.used_by(self._owner)
        return Refusal(
            503,
            f"the bodies of requests under way have {used_bytes / 1e6:.3g} MB, "
            f"{own_bytes / 1e6:.3g} MB of them yours; of {room_bytes / 1e6:.3g} MB one "
            "caller may have as much as is free",
            code="too_many_bytes",
            headers={"connection": "close"},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._num_held:
            self._room.give_back(self._owner, self._num_held)
