"""A client's session with a runtime, over connections that come and go.

Each connection is its own DEALER socket, so that nothing of an old one arrives late; its monitor
reports its loss (ZeroMQ's heartbeats notice within seconds, also when a peer just vanished). Then a
new socket says hello with the session's token, and both sides resend what the other has not taken.
One thread owns a transport; this file knows no programs.

A connection to a process of this host breaks when that process ends, and only then: the kernel says
so, and there are no heartbeats. Silence is judged on an `AwakeClock`, and not at all while the
system says that the runtime's process is stopped.
"""

from __future__ import annotations

import time
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from ...errors import EngineError, ProtocolError
from ..protocol import wire
from ..protocol.awake_clock import AwakeClock
from ..protocol.keys import ClientKeys, is_tcp
from ..protocol.link import Link
from ..protocol.wire import PEER_HEARTBEAT_MS, PEER_TIMEOUT_MS
from .greeting import mechanism_of
from .peer_process import PeerProcess, local_peer

LINGER_MS = 500
RECONNECT_AFTER_S = 0.1
NUM_HANG_UPS = 3  # failed handshakes before the first welcome, until the cause is looked for

_WATCHED = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class RuntimeSilent(EngineError):
    """The runtime's process may exist, but does not answer."""


class SessionLost(EngineError):
    """The runtime has ended, or was started anew: it knows nothing of this session."""


class Transport:
    """Sends and receives messages of one session; used by one thread.

    Lifetime: from the first hello to `close`. `poll` raises EngineError for fatal errors.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        keys: ClientKeys | None,
        wake_fd: int | None,
        process: PeerProcess | None,
        tenant: str | None,
        connect_s: float,
        silence_s: float = wire.RUNTIME_TIMEOUT_S,
    ) -> None:
        """`wake_fd`: becomes readable to end a `poll`, None: none does; `process`: the runtime's,
        where it is known beforehand; `tenant`: the tenant that this client's work counts for;
        `connect_s`, `silence_s`: after which a runtime that never answered, or no longer does, is
        given up."""
        self.link = Link()
        self.welcome: dict[str, Any] | None = None  # the first one
        self.silence_s = silence_s
        self._connect_s = connect_s
        self._refusal: ProtocolError | SessionLost | None = None  # the runtime's last message
        self._context = context
        self._endpoint = endpoint
        self._keys = keys
        self._wake_fd = wake_fd
        self._process = process
        self._tenant = tenant
        self._session: str | None = None
        self._is_up = False  # welcomed on this socket
        self._was_replaced = False  # the connection, by one that has not said hello
        self._num_hang_ups = 0
        self._reopen_at: float | None = None
        self._last_sent_s = time.monotonic()
        self._clock = AwakeClock()
        self._silent_since_s = self._clock.read()  # or, without a connection, since when that is so
        self._dealer: zmq.Socket[bytes]
        self._monitor: zmq.Socket[bytes] | None = None
        self._poller = zmq.Poller()
        self._open()

    # --- connections ----------------------------------------------------------------------------

    def _open(self) -> None:
        """Open a new socket and say hello on it."""
        self._dealer = dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, LINGER_MS)
        dealer.setsockopt(zmq.SNDHWM, 0)  # credits bound what is in flight
        dealer.setsockopt(zmq.RCVHWM, 0)
        if is_tcp(self._endpoint):
            dealer.setsockopt(zmq.HEARTBEAT_IVL, PEER_HEARTBEAT_MS)
            dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, PEER_TIMEOUT_MS)
        if self._keys is not None:
            dealer.curve_serverkey = self._keys.server_public
            dealer.curve_publickey = self._keys.public
            dealer.curve_secretkey = self._keys.secret
        self._poller = self._new_poller()
        self._poller.register(dealer, zmq.POLLIN)
        if not self._endpoint.startswith("inproc://"):
            self._monitor = dealer.get_monitor_socket(_WATCHED)
            self._poller.register(self._monitor, zmq.POLLIN)
        self._reopen_at = None
        self._was_replaced = False
        dealer.connect(self._endpoint)
        self._say_hello()

    def _new_poller(self) -> zmq.Poller:
        poller = zmq.Poller()
        if self._wake_fd is not None:
            poller.register(self._wake_fd, zmq.POLLIN)
        return poller

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """Those of the current connection, for who polls several transports at once: `poll(0)` when
        one is readable, and now and then besides."""
        if self._reopen_at is not None:
            return []
        return [socket for socket in (self._dealer, self._monitor) if socket is not None]

    def _say_hello(self) -> None:
        who = {"session": self._session, "tenant": self._tenant}
        known: dict[str, Any] = {name: value for name, value in who.items() if value is not None}
        self._send(wire.encode("hello", client="stemma", ack=self.link.take_ack(), **known))

    def _shut(self, linger_ms: int) -> None:
        if self._monitor is not None:
            self._dealer.disable_monitor()
            self._monitor.close()
            self._monitor = None
        self._dealer.close(linger_ms)

    def close(self) -> None:
        """Say goodbye, send what remains, close."""
        if self._is_up:
            self._send(wire.encode("bye"))
        self._shut(LINGER_MS)

    def _lose(self, now: float) -> None:
        """The connection is lost: say hello on a new one soon."""
        self._shut(0)
        self._poller = self._new_poller()
        if self._is_up:
            self._silent_since_s = now
        self._is_up = False
        self._reopen_at = now + RECONNECT_AFTER_S

    # --- in -------------------------------------------------------------------------------------

    def poll(self, timeout_s: float) -> list[wire.Message]:
        """Wait for messages, `wake_fd` or the timeout; returns the messages to handle, in order.

        Raises EngineError where the session cannot continue, ProtocolError where the runtime says
        so.
        """
        if self._refusal is not None:
            raise self._refusal
        if self._reopen_at is not None:
            timeout_s = min(timeout_s, RECONNECT_AFTER_S)
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        now = self._clock.read()
        messages: list[wire.Message] = []
        if self._monitor in ready and self._has_broken():
            messages = self._receive()  # received before the loss: may include a farewell
            self._lose(now)
        elif self._dealer in ready and self._reopen_at is None:
            self._silent_since_s = now
            messages = self._receive()
            if self._was_replaced:
                self._lose(now)
        if self._reopen_at is not None and now >= self._reopen_at:
            self._open()
        self._check_peer(now)
        return messages

    def _receive(self) -> list[wire.Message]:
        messages: list[wire.Message] = []
        while True:
            try:
                frames = self._dealer.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return messages
            message = wire.decode([frame.bytes for frame in frames], wire.RUNTIME_OPS)
            if message.op == "error":
                # A socket connects again by itself, and what this thread sends before it sees the
                # loss goes to a runtime that does not know from whom it is.
                self._was_replaced = message.header.get("before_hello") is True
                if self._was_replaced and self._is_up:
                    return messages
                is_lost = message.header.get("session_lost") is True and self.welcome is not None
                refusal = SessionLost if is_lost else ProtocolError
                self._refusal = refusal(str(message.header.get("message")))
                if not messages:  # else the next poll raises it: these came before it
                    raise self._refusal
                return messages
            if message.op == "welcome":
                if self._process is None and self._endpoint.startswith("ipc://"):
                    self._process = local_peer(frames[0])
                self._be_welcomed(message.header)
            elif self.link.take(message) and message.op not in ("pong", "credit"):
                messages.append(message)

    def _be_welcomed(self, header: dict[str, Any]) -> None:
        session = str(header.get("session", ""))
        if self._session is not None and session != self._session:
            raise SessionLost(
                f"the runtime at {self._endpoint} does not know this session any more: it was "
                "started anew, or the connection was away for longer than its grace period"
            )
        self._session = session
        self.link.resume(header.get("ack", 0))
        self._is_up = True
        if self.welcome is None:
            self.welcome = header

    def _has_broken(self) -> bool:
        """Whether the monitor has seen a loss. Raises EngineError for a failed handshake."""
        is_lost = False
        while self._monitor is not None and self._monitor.poll(0):
            event = int(parse_monitor_message(self._monitor.recv_multipart())["event"])
            is_lost = is_lost or event == zmq.EVENT_DISCONNECTED
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise EngineError(
                    f"the runtime at {self._endpoint} refused client_key: it does not know this key"
                )
            if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                raise self._mismatch()
            if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and self.welcome is None:
                self._num_hang_ups += 1
                if self._num_hang_ups % NUM_HANG_UPS == 0:
                    self._explain_hang_ups()
        return is_lost

    def _explain_hang_ups(self) -> None:
        """Raises EngineError, unless the runtime may not be listening yet."""
        mechanism = mechanism_of(self._endpoint)
        if mechanism is None:
            return
        if (mechanism == "NULL") != (self._keys is None):
            raise self._mismatch()
        if self._keys is not None:
            raise EngineError(
                f"{self._endpoint} hung up on the handshake: server_key is not its key"
            )

    def _mismatch(self) -> EngineError:
        own = "none" if self._keys is None else "keys"
        return EngineError(
            f"{self._endpoint} does not shake hands: one side has keys (CURVE), this has {own}"
        )

    def _check_peer(self, now: float) -> None:
        process = self._process
        if process is not None and (death := process.death()) is not None:
            raise SessionLost(death)
        patience_s = self._patience_s
        silent_s = now - self._silent_since_s
        if silent_s > patience_s / 2 and process is not None and process.is_stopped():
            self._silent_since_s = now  # once it is continued, half of its time is left at least
        elif silent_s > patience_s:
            raise self._silence(patience_s)

    def _silence(self, patience_s: float) -> RuntimeSilent:
        if self.welcome is None:
            return RuntimeSilent(f"no runtime answered at {self._endpoint} within {patience_s:g} s")
        if not self._is_up:
            lost = f"the connection to {self._endpoint} broke"
            return RuntimeSilent(f"{lost} and was not back in {patience_s:g} s")
        return RuntimeSilent(f"the runtime has been silent for {patience_s:g} s")

    @property
    def _patience_s(self) -> float:
        """How long the runtime may be silent in the current state."""
        if self.welcome is None:
            return self._connect_s
        return self.silence_s if self._is_up else float(self.welcome.get("grace_s", wire.GRACE_S))

    # --- out ------------------------------------------------------------------------------------

    def send(self) -> bool:
        """Send the link's messages, acknowledge, and ping the runtime; returns whether any of the
        link's messages were sent."""
        if not self._is_up:
            is_overdue = time.monotonic() - self._last_sent_s > wire.HEARTBEAT_S
            if is_overdue and self._reopen_at is None:  # the hello, or its answer, may be lost
                self._say_hello()
            return False
        has_sent = False
        while (parts := self.link.unsent()) is not None:
            if not self._send(parts):
                break
            self.link.sent()
            has_sent = True
        if self.link.owes_ack:
            self._send(wire.encode("credit", ack=self.link.take_ack()))
        elif time.monotonic() - self._last_sent_s > min(wire.HEARTBEAT_S, self.silence_s / 4):
            self._send(wire.encode("ping", ack=self.link.take_ack()))
        return has_sent

    def _send(self, parts: list[bytes]) -> bool:
        """False where the socket cannot send now: there is no connection, as its monitor will
        report, or the system lacks something. The link's messages are sent again later."""
        try:
            self._dealer.send_multipart(parts, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno in (zmq.ETERM, zmq.ENOTSOCK):
                raise
            return False
        self._last_sent_s = time.monotonic()
        return True
