"""The gateway's listening ROUTER socket, its limits, and access control over tcp.

With keys, every tcp endpoint uses CURVE and admits the clients whose public keys are in a folder
(read again at each handshake, so that a client can be added while the server runs). ipc endpoints
need none: file permissions decide who may open them (`ipc_file`: who may listen there).
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from ...errors import InvalidRequest, ProtocolError
from ...frontend.protocol import wire
from ...frontend.protocol.keys import is_local, is_tcp, read_public, read_secret
from ...frontend.protocol.wire import PEER_HEARTBEAT_MS, PEER_TIMEOUT_MS
from .ipc_file import IpcFile, has_file

log = logging.getLogger(__name__)

MAX_QUEUED_MESSAGES = 64  # of a connection, each way; beyond that TCP's flow control applies
HANDSHAKE_TIMEOUT_MS = 10_000
LINGER_MS = 200
MIN_GRACE_S = 1.0  # a connection that was cut is there again after 0.1 s
MAX_GRACE_S = 86_400.0


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """The runtime's secret key, and the file or folder of its clients' public ones."""

    secret: bytes
    clients: Path

    @classmethod
    def load(cls, server_key: str | Path, clients: str | Path) -> ServerKeys:
        """Raises InvalidRequest for an invalid key, or if there are no client keys."""
        keys = cls(read_secret("server_key", server_key), Path(clients))
        if not keys.allowed():
            raise InvalidRequest.of("client_keys", str(clients), "a NAME.key or a folder of them")
        return keys

    def allowed(self) -> frozenset[bytes]:
        """The clients' current public keys; unreadable ones are left out."""
        paths = sorted(self.clients.glob("*.key")) if self.clients.is_dir() else [self.clients]
        keys = set()
        for path in paths:
            try:
                keys.add(read_public("client_keys", path))
            except InvalidRequest as error:
                log.warning("%s", error)
        return frozenset(keys)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client with this key may connect (called by zmq.auth)."""
        return (z85.encode(key) if len(key) == 32 else key) in self.allowed()


class Listener:
    """The bound socket, and the thread that checks handshakes. Lifetime: the gateway's.

    Raises ProtocolError for an endpoint that cannot be bound, InvalidRequest for one that others
    can reach without keys.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoints: Sequence[str],
        keys: ServerKeys | None,
    ) -> None:
        for endpoint in endpoints:
            require_keys(endpoint, keys is not None)
        self._authenticator = None if keys is None else _authenticator(context, keys)
        self.router = _router(context)
        self._files: list[IpcFile] = []
        try:
            for endpoint in sorted(endpoints, key=is_tcp):  # options hold for the binds after them
                if is_tcp(endpoint):
                    _watch_peers(self.router)
                    if keys is not None:
                        self.router.curve_server = True
                        self.router.curve_secretkey = keys.secret
                self._bind(endpoint)
        except ProtocolError:
            self.close(linger_ms=0)
            raise

    def _bind(self, endpoint: str) -> None:
        if has_file(endpoint):
            self._files.append(IpcFile(endpoint))
        try:
            self.router.bind(endpoint)
        except zmq.ZMQError as error:
            raise ProtocolError(f"cannot listen at {endpoint}: {error}") from error

    def close(self, linger_ms: int = LINGER_MS) -> None:
        """Stop listening."""
        self.router.close(linger_ms)
        for file in self._files:
            file.release()
        self._files.clear()
        if self._authenticator is not None:
            self._authenticator.stop()


def add_client_flags(parser: argparse._ActionsContainer) -> None:
    """Add the flags for access and for how long a session outlives its connection."""
    parser.add_argument(
        "--server-key", metavar="FILE",
        help="this runtime's secret key: tcp endpoints then speak CURVE, and may be on any address",
    )  # fmt: skip
    parser.add_argument(
        "--client-keys", metavar="PATH",
        help="public keys of the clients that may connect: a folder of NAME.key files, or one",
    )  # fmt: skip
    parser.add_argument(
        "--grace-s", type=float, default=wire.GRACE_S, metavar="SECONDS",
        help="how long a client may be without a connection before its programs are cancelled "
        "(default: %(default)g)",
    )  # fmt: skip


def server_keys(args: argparse.Namespace, endpoints: Sequence[str]) -> ServerKeys | None:
    """The keys that the flags name, or None. Raises InvalidRequest for flags that contradict
    each other, or an endpoint that needs keys."""
    if not MIN_GRACE_S <= args.grace_s <= MAX_GRACE_S:
        allowed = f"seconds in [{MIN_GRACE_S:g}, {MAX_GRACE_S:g}]"
        raise InvalidRequest.of("grace_s", args.grace_s, allowed)
    if (args.server_key is None) != (args.client_keys is None):
        missing = "server_key" if args.server_key is None else "client_keys"
        raise InvalidRequest(f"{missing} is missing: keys are needed of both sides", missing)
    for endpoint in endpoints:
        require_keys(endpoint, args.server_key is not None)
    return None if args.server_key is None else ServerKeys.load(args.server_key, args.client_keys)


def require_keys(endpoint: str, has_keys: bool) -> None:
    """Raises InvalidRequest for an address that others can reach if there are no keys."""
    if has_keys or is_local(endpoint):
        return
    raise InvalidRequest(
        f"endpoint={endpoint!r} can be reached from outside this host: it needs server_key and "
        "client_keys (`stemma keygen` makes them)",
        "endpoint",
    )


def _router(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a message that cannot be sent is an error
    router.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
    router.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
    router.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
    router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)
    return router


def key_of(frame: zmq.Frame) -> str | None:
    """The public key of the client that sent a frame; None where connections have no keys."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return None


def _watch_peers(router: zmq.Socket[bytes]) -> None:
    """Close connections whose peer does not answer. Only over tcp: over ipc the kernel closes those
    of a process that ends, and one that is only stopped keeps its own."""
    router.setsockopt(zmq.HEARTBEAT_IVL, PEER_HEARTBEAT_MS)
    router.setsockopt(zmq.HEARTBEAT_TIMEOUT, PEER_TIMEOUT_MS)


def _authenticator(
    context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys
) -> ThreadAuthenticator:
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback("*", credentials_provider=keys)
    return authenticator
