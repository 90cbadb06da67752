"""The loop's part of a ROUTER socket: who says what, and what each is owed.

A client is identified by its session's token and may reconnect; it is dismissed when it has had no
connection for the grace period. A malformed message gets an error reply and has no other effect.
What messages mean is their taker's business: an engine's gateway, or a router of many engines.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import zmq

from ...errors import ProtocolError
from ...frontend.protocol import wire
from ...frontend.protocol.awake_clock import AwakeClock
from .clients import MAX_BEHIND_BYTES, C, Client, Clients, NewClient, NoHello, UnknownSession
from .listener import Listener, ServerKeys, key_of

log = logging.getLogger(__name__)

MAX_MESSAGES_A_TURN = 1000  # a flood of messages delays a step, but never prevents it
MAX_BYTES_A_TURN = 32 * 1024 * 1024
SWEEP_S = 1.0  # from one look for clients that are lost to the next


C_contra = TypeVar("C_contra", bound=Client[Any], contravariant=True)


class Taker(Protocol[C_contra]):
    """What a host needs from whoever answers its clients."""

    def describe(self) -> dict[str, Any]:
        """What a welcome says beside the session."""

    def take(self, client: C_contra, message: wire.Message) -> None:
        """A message of `wire.NUMBERED_OPS`. Raises ProtocolError, which is the client's answer."""

    def forget(self, client: C_contra) -> None:
        """The session ends: cancel its programs."""


class SessionHost(Generic[C]):
    """Owns the socket and the sessions at `endpoints`; used by one thread."""

    def __init__(
        self,
        taker: Taker[C],
        new_client: NewClient[C],
        endpoints: Sequence[str],
        *,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        grace_s: float = wire.GRACE_S,
        keys: ServerKeys | None = None,
    ) -> None:
        """`grace_s`: how long a client may be without a connection before its programs are
        cancelled. `keys`: for the tcp endpoints.

        Raises ProtocolError for an endpoint that cannot be bound.
        """
        self.clients = Clients(new_client)
        self.clock = AwakeClock()
        self._taker = taker
        self._grace_s = grace_s
        self._next_sweep_s = time.monotonic() + SWEEP_S
        self._listener = Listener(context or zmq.Context.instance(), endpoints, keys)
        self.socket = self._listener.router

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()

    # --- in -------------------------------------------------------------------------------------

    def receive(self) -> None:
        """Take what has come, up to a limit."""
        num_bytes = 0
        for _ in range(MAX_MESSAGES_A_TURN):
            try:
                sender, *frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            parts = [frame.bytes for frame in frames]
            self._handle(sender, parts)
            num_bytes += sum(len(part) for part in parts)
            if num_bytes > MAX_BYTES_A_TURN:
                return

    def _handle(self, sender: zmq.Frame, parts: list[bytes]) -> None:
        """`sender`: the frame that names its connection."""
        identity, now = sender.bytes, self.clock.read()
        try:
            message = wire.decode(parts, wire.CLIENT_OPS)
            if message.op == "hello":
                client = self.clients.greet(identity, message.header, now, key_of(sender))
                self._send(identity, self._welcome(client))
                return
            client = self.clients.of(identity, message.op)
            client.last_heard_s = now
            if client.link.take(message):
                self._dispatch(client, message)
        except ProtocolError as error:
            self._complain(identity, error)

    def _dispatch(self, client: C, message: wire.Message) -> None:
        if message.op == "intern":
            client.texts.change(message.header)
        elif message.op in wire.NUMBERED_OPS:
            self._taker.take(client, message)
        elif message.op == "ping":
            self._send(client.identity, wire.encode("pong", ack=client.link.take_ack()))
        elif message.op == "bye":
            self.dismiss(client)

    def _welcome(self, client: C) -> list[bytes]:
        return wire.encode(
            "welcome",
            session=client.session,
            ack=client.link.take_ack(),
            credit_bytes=wire.CLIENT_CREDIT_BYTES,
            grace_s=self._grace_s,
            heartbeat_s=wire.HEARTBEAT_S,
            max_frame_bytes=wire.MAX_FRAME_BYTES,
            **self._taker.describe(),
        )

    # --- out ------------------------------------------------------------------------------------

    def complain(self, client: C, error: ProtocolError) -> None:
        """Answer a client's message with an error; nothing else happens."""
        self._complain(client.identity, error)

    def _complain(self, identity: bytes, error: ProtocolError) -> None:
        said: dict[str, Any] = {"message": str(error), "supported": [wire.VERSION]}
        if isinstance(error, NoHello):
            said["before_hello"] = True
        if isinstance(error, UnknownSession):
            said["session_lost"] = True  # and not refused: another one may be begun
        self._send(identity, wire.encode("error", **said))

    def send_events(self) -> None:
        """Send each client what waits for it; end the sessions of those who take nothing."""
        for client in list(self.clients.by_session.values()):
            client.fill_link()
            self._send_link(client)
            if client.behind_bytes > MAX_BEHIND_BYTES:
                reason = (
                    f"this client has not taken its results: more than {MAX_BEHIND_BYTES} bytes "
                    "waited for it, so its programs were cancelled"
                )
                self.dismiss(client, reason)
                self.complain(client, ProtocolError(reason))

    def _send_link(self, client: C) -> None:
        """Send the link's messages, as many as the connection takes; the rest later, or on the
        next connection."""
        link = client.link
        while (parts := link.unsent()) is not None:
            if not self._send(client.identity, parts):
                return
            link.sent()
        if link.owes_ack:
            self._send(client.identity, wire.encode("credit", ack=link.take_ack()))

    def _send(self, identity: bytes, parts: list[bytes]) -> bool:
        try:
            self.socket.send_multipart([identity, *parts], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:  # the connection is gone, or its queue is full
            log.debug("client %s cannot be reached: %s", identity.hex(), error)
            return False
        return True

    # --- clients that end -------------------------------------------------------------------------

    def dismiss(self, client: C, reason: str | None = None) -> None:
        """End a session and its programs."""
        self._taker.forget(client)
        self.clients.remove(client, reason)
        log.info("client %s is gone", client.identity.hex())

    def say_farewell(self) -> None:
        """Report the stop to all clients, so that none waits for a timeout."""
        self.send_events()
        for client in self.clients.by_session.values():
            self.complain(client, UnknownSession("the runtime was stopped"))

    def sweep(self) -> bool:
        """Once a second, dismiss the clients that are lost; whether it was time."""
        if time.monotonic() <= self._next_sweep_s:  # what came during a long step has been read
            return False
        self._next_sweep_s = time.monotonic() + SWEEP_S
        now = self.clock.read()
        for client in list(self.clients.by_session.values()):
            if now - client.last_heard_s <= self._grace_s:
                continue
            if self._is_connected(client):  # stopped, perhaps, or starved: it may yet go on
                client.last_heard_s = now
            else:
                self.dismiss(client, _LOST)
        return True

    def _is_connected(self, client: C) -> bool:
        try:
            self.socket.send_multipart([client.identity, *wire.encode("pong")], zmq.NOBLOCK)
        except zmq.Again:  # its queue is full, so it has one
            return True
        except zmq.ZMQError:
            return False
        return True


_LOST = "this client was without a connection for longer than the grace period, see --grace-s"
