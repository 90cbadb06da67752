"""What the router of several engines costs: its CPU a call, over real sockets.

A router's own process before stand-ins for engines, which answer at once
(`bench/cluster/scripted_engine.py`), and a client of this package. Programs of one call go out as
one batch; those of three calls stream 8 tokens of each and read each value before the next call, 32
programs at a time; chats have a system message of 1 kB, one of eight, and 1 to 7 kB of their own.
`cpu_us` is CPU time of the router's process, all its threads, a call; `hop_us` that of a process
that passes one message of the same size there, and one back, between ZeroMQ sockets and knows
nothing of them: the limit. Repeats take turns; others on the machine only add to either, so the
least counts. `calls/s` is what all processes together reached on this machine, `calls/core s` what
the router can with a core of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import zmq

from ...flags import count
from ...frontend.backend import Runtime
from ...frontend.dsl.expr import assistant, user
from ...frontend.dsl.expr import system as said_by_system
from ...frontend.dsl.function import function
from ...frontend.dsl.generation import gen
from ...frontend.dsl.state import ProgramState
from ..harness.process_meter import process_cpu_s
from ..harness.report import write_report

TARGET_US = 60.0
NUM_STREAMS = 32  # programs at a time
NUM_TURNS, NUM_TOKENS = 3, 8  # of each of these
ANSWER_BYTES = 700  # of a value, about
MAX_HOPS = 64  # messages under way
READY_S = 60.0


@function
def one_call(s: ProgramState, number: int) -> None:
    """A question."""
    s += f"Question {number}: what is the answer?" + gen("answer", max_tokens=16)


@function
def turns(s: ProgramState, number: int) -> None:
    """An agent that reads what it has said."""
    s += f"Agent {number}. "
    for turn in range(NUM_TURNS):
        s += f"Turn {turn}: " + gen(f"t{turn}", max_tokens=NUM_TOKENS)
        s[f"t{turn}"]


@function
def chat(s: ProgramState, system: str, text: str) -> None:
    """A chat's turn."""
    s += said_by_system(system) + user(text) + assistant(gen("answer", max_tokens=16))


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent: `run` makes so many calls, each with `num_bytes` of text."""

    name: str
    num_bytes: int
    run: Callable[[Runtime, int], None]


def run_calls(runtime: Runtime, num_calls: int) -> None:
    """Programs of one call, all at once."""
    one_call.run_batch([{"number": n} for n in range(num_calls)], backend=runtime)


def run_turns(runtime: Runtime, num_calls: int) -> None:
    """Programs of several calls."""

    def stream(number: int) -> None:
        state = turns.stream(number=number, backend=runtime)
        assert sum(map(len, state.text_iter())) > 0

    with ThreadPoolExecutor(NUM_STREAMS) as programs:
        list(programs.map(stream, range(num_calls // NUM_TURNS)))


def run_chats(runtime: Runtime, num_calls: int) -> None:
    """Chats of 2 to 8 kB."""
    rng = random.Random(num_calls)
    systems = [_text(rng, 1000) for _ in range(8)]
    rows = [
        {"system": rng.choice(systems), "text": _text(rng, rng.randrange(1000, 7000))}
        for _ in range(num_calls)
    ]
    chat.run_batch(rows, backend=runtime)


LOADS = (
    Load("one call", 60, run_calls),
    Load("3 calls, streamed", 60, run_turns),
    Load("chats, 2 to 8 kB", 5000, run_chats),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench router`."""
    add = parser.add_argument
    add("--engines", type=count, default=2, metavar="N", help="stand-ins (default: %(default)s)")
    add("--calls", type=count, default=3000, metavar="N", help="a repeat (default: %(default)s)")
    add("--repeats", type=count, default=5, metavar="N", help="of each (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    found: dict[str, list[tuple[float, float, float]]] = {load.name: [] for load in LOADS}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="stemma-bench-")))
        router, runtime = stack.enter_context(routed(folder, args.engines))
        hops = {load.name: stack.enter_context(Hop(folder, load)) for load in LOADS}
        for repeat in range(args.repeats + 1):
            for load in LOADS:
                num_calls = max(args.calls, NUM_TURNS) if repeat else NUM_TURNS * 20  # warms up
                cpu_s, began_s = process_cpu_s(router), time.perf_counter()
                load.run(runtime, num_calls)
                wall_s, cpu_s = time.perf_counter() - began_s, process_cpu_s(router) - cpu_s
                hop_us = hops[load.name].cpu_us(num_calls)
                if repeat:
                    found[load.name].append((1e6 * cpu_s / num_calls, wall_s / num_calls, hop_us))
    write_report("router", [_row(load, args, found[load.name]) for load in LOADS], args)
    return 0


def _row(
    load: Load, args: argparse.Namespace, found: list[tuple[float, float, float]]
) -> dict[str, object]:
    cpu_us, wall_s, hop_us = zip(*found, strict=True)
    return {
        "load": load.name,
        "engines": args.engines,
        "cpu_us": min(cpu_us),
        "median": statistics.median(cpu_us),
        "target_us": TARGET_US,
        "hop_us": min(hop_us),
        "ratio": min(cpu_us) / min(hop_us),
        "calls/s": 1 / min(wall_s),
        "calls/core s": 1e6 / min(cpu_us),
    }


@contextlib.contextmanager
def routed(folder: Path, num_engines: int) -> Iterator[tuple[int, Runtime]]:
    """A router before so many stand-ins: its process id, and a client of it."""
    engines = [f"ipc://{folder}/engine{number}" for number in range(num_engines)]
    endpoint = f"ipc://{folder}/router"
    with contextlib.ExitStack() as stack:
        for engine in engines:
            stack.enter_context(child("stemma.bench.cluster.scripted_engine", "--endpoint", engine))
        flags = ["--endpoint", endpoint, "--watch-stdin", "--engines", *engines]
        router = stack.enter_context(child("stemma.cluster", *flags))
        runtime = Runtime(endpoint, timeout_s=READY_S)
        stack.callback(runtime.shutdown)
        _wait_ready(runtime)
        yield router.pid, runtime


def _wait_ready(runtime: Runtime) -> None:
    """Until no engine is missing: a router that has one takes clients."""
    until_s = time.monotonic() + READY_S
    while any(each["state"] != "ready" for each in runtime.get_server_info()["replicas"]):
        assert time.monotonic() < until_s, "an engine did not start"
        time.sleep(0.05)


class Hop:
    """A bare hop for one load, in a process of its own, and what answers behind it."""

    def __init__(self, folder: Path, load: Load) -> None:
        self._stack = contextlib.ExitStack()
        name, module = load.run.__name__, "stemma.bench.cluster.zeromq_hop"
        front, back = f"ipc://{folder}/{name}-front", f"ipc://{folder}/{name}-back"
        echo = child(module, "--endpoint", back, "--echo", str(ANSWER_BYTES))
        self._stack.enter_context(echo)
        hop = child(module, "--endpoint", front, "--backs", back)
        self._pid = self._stack.enter_context(hop).pid
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._stack.callback(self._socket.close, 0)
        self._socket.connect(front)
        self._message = b"x" * (load.num_bytes + 200)

    def cpu_us(self, num_calls: int) -> float:
        """Of one message there and one back."""
        before_s = process_cpu_s(self._pid)
        for number in range(num_calls + MAX_HOPS):
            if number >= MAX_HOPS:
                self._socket.recv(copy=False)
            if number < num_calls:
                self._socket.send(self._message, copy=False)
        return 1e6 * (process_cpu_s(self._pid) - before_s) / num_calls

    def __enter__(self) -> Hop:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


@contextlib.contextmanager
def child(module: str, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of this package that ends with its standard input."""
    command = [sys.executable, "-P", "-m", module, *flags]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert process.stdin is not None
    try:
        yield process
    finally:
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _text(rng: random.Random, num_bytes: int) -> str:
    """Words that nobody else has said."""
    words = (f"{rng.getrandbits(24):x} " for _ in range(num_bytes // 6))
    return "".join(words)[:num_bytes]
