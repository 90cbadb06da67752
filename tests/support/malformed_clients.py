"""A gateway over real sockets, and a client that sends it arbitrary frames."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import zmq
from engine_thread import load
from waiting import PATIENCE_S

from stemma.frontend.protocol import wire
from stemma.frontend.protocol.link import Link
from stemma.runtime.config import EngineConfig
from stemma.runtime.gateway.gateway import Gateway
from stemma.runtime.sessions.listener import ServerKeys


class Served:
    """A gateway in a thread, reachable at a real ipc socket."""

    def __init__(
        self,
        checkpoint: Path,
        folder: Path,
        *,
        port: int | None = None,
        keys: ServerKeys | None = None,
    ) -> None:
        """At an ipc file in `folder`, and at a tcp port of this host."""
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.endpoint = f"ipc://{folder}/gateway.ipc"
        self.tcp_endpoint = f"tcp://127.0.0.1:{port}"
        endpoints = [self.endpoint] if port is None else [self.endpoint, self.tcp_endpoint]
        self.loaded = load(EngineConfig(checkpoint, dtype="float32", max_total_tokens=8192))
        self.gateway = Gateway(
            self.loaded, endpoints, context=self.context, grace_s=120.0, keys=keys
        )
        self.thread = threading.Thread(target=self.gateway.run, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.gateway.stop()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        self.context.term()


class RawClient:
    """A client that sends arbitrary frames."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.socket = served.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, 30_000)
        self.socket.connect(served.endpoint)
        self.link = Link()

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(list(frames))

    def say(self, op: str, **header: Any) -> None:
        if op not in wire.NUMBERED_OPS:
            return self.send(*wire.encode(op, ack=self.link.take_ack(), **header))
        self.link.put(op, **header)
        self.send(*self.link.unsent() or [])
        self.link.sent()

    def say_ops(self, program: object, ops: object, **fields: Any) -> None:
        self.say("ops", programs=[{"program": program, "ops": ops, **fields}])

    def hear(self) -> wire.Message:
        message = wire.decode(self.socket.recv_multipart(), wire.RUNTIME_OPS)
        assert message.op == "welcome" or self.link.take(message), "it came twice"
        return message

    def hello(self) -> wire.Message:
        self.say("hello")
        return self.hear()

    def events(self) -> list[list[Any]]:
        """All events up to and including a DONE."""
        events: list[list[Any]] = []
        while not events or events[-1][3] != wire.DONE:
            message = self.hear()
            assert message.op == "events", message
            events += message.header["events"]
        return events
