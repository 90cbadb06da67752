"""KV from one engine's memory to another's on one host, by each transport that there is.

No model runs. A process sends streams as an engine that computes prompts does: each layer's KV is
copied out of a pool and handed to the sender (pieces of at most 4 MiB), then proved. This process
asks, and waits until all of it is there, before it would be copied into pages. The transports take
turns at each size. `ms` is the median time of a stream, `cpu ms` the median CPU time of all
processes on both sides: that of a stream that nobody waits for.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import select
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

from ...errors import MissingDependency
from ...flags import count
from ...runtime.memory.disk.block_key import BlockLayout
from ...runtime.memory.kv_layout import KVLayout, KVPart
from ...runtime.memory.peers.kv_receiver import KVReceiver
from ...runtime.memory.peers.kv_sender import Asked, KVSender
from ...runtime.memory.peers.nixl_memory import NixlWorker
from ...runtime.memory.peers.transports import offers_by
from ...runtime.memory.peers.wire import MAX_PIECE_BYTES
from ..harness.process_meter import process_cpu_s, process_tree
from ..harness.report import write_report

_PART = KVPart("kv", 16, 128, "bfloat16")  # 8 heads of 128, as Llama 3 8B has
_LAYOUT = BlockLayout("bench", "bfloat16", KVLayout(32, (_PART,)))
_MIB = 2**20
_TOKEN_BYTES = _LAYOUT.kv.bytes_per_token  # 128 KiB
_PATIENCE_S = 60.0
_PORT = 25990  # where the address is not a path


@dataclass(frozen=True, slots=True)
class _Transport:
    name: str
    kv_transport: str  # as the flag
    endpoint: str  # with {} for a folder


_TRANSPORTS = (
    _Transport("shared memory", "auto", "ipc://{}/auto"),
    _Transport("NIXL", "nixl", "ipc://{}/nixl"),
    _Transport("ZeroMQ, ipc", "zmq", "ipc://{}/zmq"),
    _Transport("ZeroMQ, tcp", "zmq", f"tcp://127.0.0.1:{_PORT}"),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench kv-transport`."""
    add = parser.add_argument
    add("--mib", type=count, nargs="+", default=[1, 16, 256], help="default: 1 16 256")
    add("--repeats", type=count, default=9, help="of each size and transport; default: %(default)s")


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        links = [link for each in _TRANSPORTS if (link := _link(stack, each, Path(folder)))]
        rows = [row for mib in args.mib for row in _measured(links, mib, args.repeats)]
        write_report("kv-transport", rows, args)
    return 0


@dataclass(frozen=True, slots=True)
class _Link:
    """A sender's process, which is connected, and the receiver here."""

    name: str
    receiver: KVReceiver

    def stream(self, num_tokens: int, pids: list[int]) -> tuple[float, float]:
        """Seconds until all of it is there, and CPU seconds of these processes."""
        peer = self.receiver.best_peer()
        assert peer is not None, f"{self.name}: the sender has gone"
        cpu_s, began_s = _cpu_s(pids), time.perf_counter()
        prefix = self.receiver.ask(peer, "", array("i", [1]) * num_tokens, 0, _PATIENCE_S)
        assert prefix is not None
        while not prefix.is_done:
            select.select([self.receiver], [], [], _PATIENCE_S)
            self.receiver.collect()
        took_s, cpu_s = time.perf_counter() - began_s, _cpu_s(pids) - cpu_s
        assert prefix.error is None, prefix.error
        self.receiver.release(prefix)
        return took_s, cpu_s


def _link(stack: contextlib.ExitStack, transport: _Transport, folder: Path) -> _Link | None:
    """None where its library is not installed."""
    try:
        offers = offers_by(transport.kv_transport)
    except MissingDependency as error:
        print(f"{transport.name} is left out: {error}")
        return None
    endpoint = transport.endpoint.format(folder)
    receiver = KVReceiver([endpoint], _LAYOUT, offers=offers, min_patience_s=_PATIENCE_S)
    stack.callback(receiver.close)
    stack.enter_context(_sending(endpoint, transport.kv_transport))
    while receiver.best_peer() is None:
        time.sleep(0.01)
    return _Link(transport.name, receiver)


@contextlib.contextmanager
def _sending(endpoint: str, kv_transport: str) -> Iterator[None]:
    """A process that sends what is asked for."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_send, args=(endpoint, kv_transport, theirs))
    process.start()
    try:
        yield
    finally:
        ours.send(None)
        process.join()


def _send(endpoint: str, kv_transport: str, stop: Connection) -> None:
    """The sender's process."""
    nixl = NixlWorker() if kv_transport == "nixl" else None
    sender = KVSender(endpoint, _LAYOUT, vocab_size=2, nixl=nixl)
    pool = np.ones((_PART.num_vectors, 1, _PART.vector_bytes), np.uint8)
    while stop.fileno() not in select.select([sender.fileno(), stop.fileno()], [], [])[0]:
        for asked in (each for each in sender.take() if isinstance(each, Asked)):
            num_tokens = len(asked.token_ids)
            if pool.shape[1] < num_tokens:
                pool = np.ones((_PART.num_vectors, num_tokens, _PART.vector_bytes), np.uint8)
            most = MAX_PIECE_BYTES // _PART.bytes_per_token
            for piece in range(_LAYOUT.kv.num_layers):
                for start in range(0, num_tokens, most):
                    sender.send_kv(asked.key, piece, start, pool[:, start : start + most].copy())
            sender.prove(asked.key, num_tokens)
            sender.end(asked.key, None)
    sender.close()


def _measured(links: list[_Link], mib: int, repeats: int) -> list[dict[str, object]]:
    found: dict[str, list[tuple[float, float]]] = {link.name: [] for link in links}
    pids = process_tree(os.getpid())
    for repeat in range(repeats + 1):
        for link in links:
            one = link.stream(mib * _MIB // _TOKEN_BYTES, pids)
            if repeat:  # the first one connects
                found[link.name].append(one)
    rows: list[dict[str, object]] = []
    for name, streams in found.items():
        took_s, cpu_s = (median(column) for column in zip(*streams, strict=True))
        speed = mib * _MIB / took_s / 1e9
        rows.append(
            {
                "MiB": mib,
                "transport": name,
                "ms": 1e3 * took_s,
                "GB/s": speed,
                "cpu ms": 1e3 * cpu_s,
            }
        )
    return rows


def _cpu_s(pids: list[int]) -> float:
    return sum(process_cpu_s(pid) for pid in pids)
