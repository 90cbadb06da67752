"""A session's transport against runtimes that answer as none should."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import zmq

from stemma.errors import ProtocolError
from stemma.frontend.client.transport import Transport
from stemma.frontend.protocol import wire


def test_a_runtime_that_never_takes_a_hello_is_given_up(tmp_path: Path) -> None:
    """A hello that is answered with the question for one is not said for ever."""
    endpoint = f"ipc://{tmp_path}/runtime"
    wake_r, wake_w = os.pipe()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as runtime:
        runtime.linger = 0
        runtime.bind(endpoint)
        transport = Transport(context, endpoint, None, wake_r, None, None, connect_s=60.0)
        try:
            answer = wire.encode("welcome", session="s", ack=0)
            num_hellos = 0
            with pytest.raises(ProtocolError, match="before hello"):
                while num_hellos < 4:
                    if runtime.poll(10):
                        identity, *parts = runtime.recv_multipart()
                        num_hellos += wire.decode(parts, wire.CLIENT_OPS).op == "hello"
                        runtime.send_multipart([identity, *answer])
                        answer = wire.encode("error", message="before hello", before_hello=True)
                    if transport._is_up:
                        transport._last_sent_s = 0.0  # it is time for a ping
                        transport.send()
                    transport.poll(0.01)
            assert num_hellos == 2
        finally:
            transport.close()
    os.close(wake_r)
    os.close(wake_w)
