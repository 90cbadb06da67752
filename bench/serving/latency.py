"""What a client's distance costs: a chain of calls that is captured, and one that reads each value.

Ten short gens on the embedded model, over tcp on loopback and through a proxy that adds latency to
each round trip. A chain that never looks at its values is captured: all of it travels at once, so
distance costs it one round trip; a loop that reads each value pays one a call, as does any client
that asks a server call by call. Reported in round trips: (time - time on loopback) / latency.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from ...errors import InvalidRequest
from ...flags import count
from ..harness.report import write_report
from ..harness.tcp_proxy import TcpProxy
from .runners.ports import free_port

NUM_CALLS = 10
DEFAULT_LATENCY_MS = 50.0
DEFAULT_REPEATS = 9

Program = Callable[..., Any]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument(
        "--latency-ms", type=float, default=DEFAULT_LATENCY_MS, metavar="MS",
        help="added to a round trip (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--repeats", type=count, default=DEFAULT_REPEATS, metavar="N",
        help="runs of each, of which the median counts (default: %(default)s)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measure and write the report."""
    if not 0 < args.latency_ms <= 10_000:
        raise InvalidRequest.of("latency_ms", args.latency_ms, "in (0, 10000]")
    write_report("latency", measure(args.latency_ms / 1000, args.repeats), args)
    return 0


def measure(latency_s: float, repeats: int) -> list[dict[str, Any]]:
    """A row per program: milliseconds near and far, and the round trips between them."""
    from ...frontend.backend import Engine, Runtime

    port = free_port()
    with (
        Engine(listen=(f"tcp://127.0.0.1:{port}",)),
        TcpProxy(port, latency_s) as proxy,
        Runtime(f"tcp://127.0.0.1:{port}") as near,
        Runtime(f"tcp://127.0.0.1:{proxy.port}") as far,
    ):
        rows = []
        for name, program in programs().items():
            here, there = _median_s(program, near, repeats), _median_s(program, far, repeats)
            rows.append(
                {
                    "program": name,
                    "loopback_ms": here * 1000,
                    f"plus_{latency_s * 1000:g}_ms": there * 1000,
                    "round_trips": (there - here) / latency_s,
                }
            )
        return rows


def programs() -> dict[str, Program]:
    """The two chains; both append the same ops."""
    from ...frontend.dsl.function import function
    from ...frontend.dsl.generation import gen

    def chain(s: Any, reads: bool) -> None:
        s += "Count:"
        for index in range(NUM_CALLS):
            s += f" {index}" + gen(f"x{index}", max_tokens=2, temperature=0, ignore_eos=True)
            if reads:
                s[f"x{index}"]

    program = function(chain)
    return {
        "captured chain": program.bind(reads=False).run,
        "reads each value": program.bind(reads=True).run,
    }


def _median_s(program: Program, backend: Any, repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):  # the first warms the cache
        start = time.perf_counter()
        program(backend=backend)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
