"""Device time of calls, several cases in turn: medians over repeats that saw the same machine.

On a GPU a case's calls are recorded in one graph, whose replay is timed with events: as in the
engine, nothing of the host is counted. Between repeats the second-level cache is filled with other
memory: by reading it, since what was written would have to be written back within the next time.
In the interpreter, and on a CPU, a clock around the calls has to do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

Call = Callable[[], object]

FLUSH_BYTES = 256 * 2**20  # four times an H200's second-level cache
_WARM_UPS = 2
# Cycles that a stream sleeps before timed work, so that the host has queued it by then: 0.2 ms
# at 1.98 GHz for a graph, 2 ms for calls that could not be recorded.
_GRAPH_CYCLES = 400_000
_EAGER_CYCLES = 4_000_000


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call."""

    median_s: float
    least_s: float
    most_s: float
    repeats: int
    how: str  # "graph", "host clock", or "eager: " and why the calls could not be recorded

    def details(self) -> dict[str, Any]:
        """Details for a row."""
        return asdict(self)


class Timer:
    """Times calls on one device."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self._repeats = repeats
        self._is_cuda = device.type == "cuda"
        self._flush = torch.zeros(FLUSH_BYTES // 4, device=device) if self._is_cuda else None

    def time(self, cases: Mapping[str, Sequence[Call]]) -> dict[str, Timing]:
        """Run each case's calls in turn, repeat after repeat; returns seconds of ONE of its calls.

        Several calls, each on its own data, are for calls too short to be timed alone.
        """
        if not self._is_cuda:
            return {name: self._on_host(calls) for name, calls in cases.items()}
        recorded = {name: _recorded(calls) for name, calls in cases.items()}
        spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in cases}
        for _ in range(self._repeats):
            for name, (run, how) in recorded.items():
                spans[name].append(self._span(run, is_eager=how != "graph"))
        torch.cuda.synchronize()
        return {
            name: _timing(
                [first.elapsed_time(last) / 1e3 / len(cases[name]) for first, last in found],
                recorded[name][1],
            )
            for name, found in spans.items()
        }

    def _span(self, run: Call, *, is_eager: bool) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        first = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        last = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        assert self._flush is not None
        self._flush.sum()
        cycles = _EAGER_CYCLES if is_eager else _GRAPH_CYCLES
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        first.record()
        run()
        last.record()
        return first, last

    def _on_host(self, calls: Sequence[Call]) -> Timing:
        seconds = []
        for _ in range(self._repeats):
            started = time.perf_counter()
            for call in calls:
                call()
            seconds.append((time.perf_counter() - started) / len(calls))
        return _timing(seconds, "host clock")


def _recorded(calls: Sequence[Call]) -> tuple[Call, str]:
    """The calls as one graph; unrecorded, where recording fails."""

    def run() -> None:
        for call in calls:
            call()

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except Exception as error:  # any operation that a graph cannot hold
        torch.cuda.synchronize()
        return run, f"eager: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
    graph.replay()  # uploads it
    return graph.replay, "graph"


def _timing(seconds: list[float], how: str) -> Timing:
    return Timing(statistics.median(seconds), min(seconds), max(seconds), len(seconds), how)
