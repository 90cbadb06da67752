"""Many clients that stream from one server, in one process that reads its plan from stdin.

Closed loop: each client keeps one connection and sends its next request when it has the end of the
last. Raw sockets and one epoll loop, because the clients share the machine's cores with the server
that they measure. Prints a `Findings` as JSON. Standard library only.
"""

from __future__ import annotations

import json
import re
import select
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from ...harness.report import percentile

END_OF_BODY = b"\r\n0\r\n\r\n"
LAST_EVENT = b"data: [DONE]\n\n"
RECEIVE_BYTES = 65_536
MAX_ERRORS_SHOWN = 5
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')


@dataclass(frozen=True, slots=True)
class Plan:
    """What the clients do; `num_requests` counts all clients together."""

    host: str
    port: int
    path: str
    bodies: list[str]  # taken in turn, JSON
    num_clients: int
    num_requests: int
    stuck_s: float  # silence after which a stream counts as stuck


@dataclass(slots=True)
class Findings:
    """The clients' measurements. Times in milliseconds, of successful requests."""

    num_ended: int = 0
    num_errors: int = 0
    num_stuck: int = 0
    num_tokens: int = 0
    num_events: int = 0
    wall_s: float = 0.0
    client_cpu_s: float = 0.0
    first_event_p50_ms: float = 0.0
    first_event_p99_ms: float = 0.0
    first_event_max_ms: float = 0.0
    gap_p50_ms: float = 0.0  # between the arrivals of a stream, one or more events each
    gap_p99_ms: float = 0.0
    gap_max_ms: float = 0.0
    errors: list[str] = field(default_factory=list)


class StreamClients:
    """All clients of a plan; `run` returns when every request has ended or is stuck."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._requests = [_request(plan, body) for body in plan.bodies]
        self._num_sent = 0
        self._epoll = select.epoll()
        self._clients: dict[int, _Client] = {}
        self._first_s: list[float] = []
        self._gaps_s: list[float] = []
        self._findings = Findings()

    def run(self) -> Findings:
        """Run the plan, once."""
        started = time.perf_counter()
        for _ in range(min(self._plan.num_clients, self._plan.num_requests)):
            self._begin()
        while self._clients:
            for fd, _ in self._epoll.poll(1.0):
                self._receive(self._clients[fd])
            self._drop_stuck()
        found = self._findings
        found.wall_s = time.perf_counter() - started
        found.client_cpu_s = time.process_time()
        first, gaps = _in_ms(self._first_s), _in_ms(self._gaps_s)
        found.first_event_p50_ms, found.first_event_p99_ms, found.first_event_max_ms = first
        found.gap_p50_ms, found.gap_p99_ms, found.gap_max_ms = gaps
        return found

    def _begin(self) -> None:
        """Start another client, with its first request."""
        sock = socket.create_connection((self._plan.host, self._plan.port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client = _Client(sock)
        self._clients[sock.fileno()] = client
        self._epoll.register(sock, select.EPOLLIN)
        self._send(client)

    def _send(self, client: _Client) -> None:
        """Send the next request, if any is left."""
        if self._num_sent == self._plan.num_requests:
            return self._end(client)
        request = self._requests[self._num_sent % len(self._requests)]
        self._num_sent += 1
        client.body.clear()
        client.first_s = None
        client.sent_s = client.last_s = time.perf_counter()
        client.sock.sendall(request)  # short: it fits the socket's buffer

    def _end(self, client: _Client) -> None:
        self._epoll.unregister(client.sock)
        del self._clients[client.sock.fileno()]
        client.sock.close()

    def _receive(self, client: _Client) -> None:
        try:
            data = client.sock.recv(RECEIVE_BYTES)
        except OSError as error:
            return self._fail(client, str(error))
        now = time.perf_counter()
        if not data:
            return self._fail(client, "the server closed the connection")
        client.body += data
        if client.first_s is None:
            if b"data: " in data:
                client.first_s = now
        else:
            self._gaps_s.append(now - client.last_s)
        client.last_s = now
        if client.body.endswith(END_OF_BODY):
            self._finish(client)
        elif not client.body.startswith(b"HTTP/1.1 200"):
            self._fail(client, bytes(client.body[:300]).decode(errors="replace"))

    def _finish(self, client: _Client) -> None:
        tokens = _COMPLETION_TOKENS.findall(client.body)
        if client.first_s is None or not tokens or LAST_EVENT not in client.body:
            return self._fail(client, bytes(client.body[-300:]).decode(errors="replace"))
        found = self._findings
        found.num_ended += 1
        found.num_tokens += int(tokens[-1])
        found.num_events += client.body.count(b"data: ")
        self._first_s.append(client.first_s - client.sent_s)
        self._send(client)

    def _fail(self, client: _Client, reason: str) -> None:
        self._findings.num_errors += 1
        if len(self._findings.errors) < MAX_ERRORS_SHOWN:
            self._findings.errors.append(reason)
        self._end(client)
        if self._num_sent < self._plan.num_requests:
            self._begin()

    def _drop_stuck(self) -> None:
        oldest = time.perf_counter() - self._plan.stuck_s
        for client in [c for c in self._clients.values() if c.last_s < oldest]:
            self._findings.num_stuck += 1
            self._end(client)


class _Client:
    """A connection and the response being received on it."""

    __slots__ = ("body", "first_s", "last_s", "sent_s", "sock")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.body = bytearray()
        self.sent_s = self.last_s = 0.0
        self.first_s: float | None = None


def _request(plan: Plan, body: str) -> bytes:
    head = (
        f"POST {plan.path} HTTP/1.1\r\nHost: {plan.host}:{plan.port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body.encode())}\r\n\r\n"
    )
    return (head + body).encode()


def _in_ms(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Median, 99th percentile and maximum; zeros without values."""
    ordered = sorted(seconds)
    if not ordered:
        return 0.0, 0.0, 0.0
    return percentile(ordered, 50) * 1e3, percentile(ordered, 99) * 1e3, ordered[-1] * 1e3


if __name__ == "__main__":
    print(json.dumps(asdict(StreamClients(Plan(**json.load(sys.stdin))).run())))
