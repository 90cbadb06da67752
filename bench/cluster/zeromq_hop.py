"""`python -m stemma.bench.cluster.zeromq_hop`: the least that a hop through Python can cost.

A ROUTER before DEALERs that passes on what comes, frame by frame, and knows nothing of it. With
`--echo` it is what stands behind such a hop: each message is answered with so many bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import zmq


def pass_on(front: zmq.Socket[bytes], backs: Sequence[zmq.Socket[bytes]], stop_fd: int) -> None:
    """Messages of clients to the backs, which take turns; what they say to the clients."""
    poller = zmq.Poller()
    for socket in (front, *backs, stop_fd):
        poller.register(socket, zmq.POLLIN)
    turn = 0
    while stop_fd not in (ready := dict(poller.poll())):
        if front in ready:
            for frames in _received(front):
                turn = (turn + 1) % len(backs)
                backs[turn].send_multipart(frames, copy=False)
        for back in backs:
            if back in ready:
                for frames in _received(back):
                    front.send_multipart(frames, copy=False)


def echo(socket: zmq.Socket[bytes], num_bytes: int, stop_fd: int) -> None:
    """Answer who asks: the first two frames name the way back."""
    answer = b"x" * num_bytes
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(stop_fd, zmq.POLLIN)
    while stop_fd not in (ready := dict(poller.poll())):
        if socket in ready:
            for frames in _received(socket):
                socket.send_multipart([*frames[:2], answer], copy=False)


def _received(socket: zmq.Socket[bytes]) -> list[list[zmq.Frame]]:
    """All that has come."""
    messages: list[list[zmq.Frame]] = []
    while True:
        try:
            messages.append(socket.recv_multipart(zmq.NOBLOCK, copy=False))
        except zmq.Again:
            return messages


def main() -> int:
    """Serve until standard input closes."""
    parser = argparse.ArgumentParser(prog="python -m stemma.bench.cluster.zeromq_hop")
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--backs", nargs="*", default=[])
    parser.add_argument("--echo", type=int, default=0, metavar="BYTES")
    args = parser.parse_args()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    front = context.socket(zmq.ROUTER)
    front.bind(args.endpoint)
    if args.echo:
        echo(front, args.echo, sys.stdin.fileno())
        return 0
    backs = [context.socket(zmq.DEALER) for _ in args.backs]
    for back, endpoint in zip(backs, args.backs, strict=True):
        back.connect(endpoint)
    pass_on(front, backs, sys.stdin.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
