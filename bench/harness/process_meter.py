"""CPU and memory of a process tree, and what the rest of the machine did meanwhile (Linux's /proc).

Clock ticks are 10 ms, so a figure of a tree over less than about 0.2 s is coarse.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

IDLE_WINDOW_S = 1.0
QUIET_CORES = 0.1  # what others may use in a valid measurement
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PROCESS_CLOCK = 2  # with a process id: its clock, clock_getcpuclockid(3)


@dataclass(frozen=True, slots=True)
class _Reading:
    """Seconds: wall clock, CPU of the tree, CPU of the machine."""

    wall_s: float
    tree_s: float
    machine_s: float


class ProcessMeter:
    """Measures a block: `with ProcessMeter(pid) as meter: ...`, for `pid` and its descendants."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.cpu_s = 0.0
        self.others_cores = 0.0  # cores that everything outside of the tree used

    def __enter__(self) -> Self:
        self._before = self._read()
        return self

    def __exit__(self, *_: object) -> None:
        before, after = self._before, self._read()
        self.cpu_s = after.tree_s - before.tree_s
        others_s = after.machine_s - before.machine_s - self.cpu_s
        self.others_cores = max(0.0, others_s) / (after.wall_s - before.wall_s)

    def _read(self) -> _Reading:
        tree_s = sum(_cpu_ticks(pid) for pid in process_tree(self._pid)) * _TICK_S
        return _Reading(time.perf_counter(), tree_s, _machine_ticks() * _TICK_S)


def process_tree(root: int) -> list[int]:
    """`root` and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat_fields(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    tree = [root]
    for pid in tree:  # grows during the loop
        tree.extend(children.get(pid, []))
    return tree


def has_ended(pid: int) -> bool:
    """Whether it is gone, or waits only to be waited for."""
    fields = _stat_fields(pid)
    return not fields or fields[0] in "ZX"


def peak_rss_bytes(root: int) -> int:
    """The sum of the tree's peaks; shared pages count once per process: an upper bound."""
    return sum(_peak_rss_kib(pid) for pid in process_tree(root)) * 1024


def peak_rss_bytes_of(pid: int) -> int:
    """Peak memory of one process since its start."""
    return _peak_rss_kib(pid) * 1024


def process_cpu_s(pid: int) -> float:
    """CPU time of one process with its threads, without its children, exact to a microsecond; 0 if
    it has ended."""
    try:
        return time.clock_gettime(~pid << 3 | _PROCESS_CLOCK)
    except OSError:
        return 0.0


def num_descriptors(pid: int) -> int:
    """Open file descriptors of one process; 0 if it has ended."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def wait_until_idle(pid: int, most_s: float) -> float:
    """Wait until everything but `pid`'s tree is idle, at most `most_s` seconds.

    Returns the cores that others used in the last window.
    """
    deadline = time.monotonic() + most_s
    while True:
        with ProcessMeter(pid) as meter:
            time.sleep(IDLE_WINDOW_S)
        if meter.others_cores <= QUIET_CORES or time.monotonic() > deadline:
            return meter.others_cores


def _stat_fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on (proc(5) numbers it 3); none if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return text[text.rindex(")") + 2 :].split()


def _cpu_ticks(pid: int) -> int:
    """User and system time of all its threads, including ended ones."""
    fields = _stat_fields(pid)
    return int(fields[11]) + int(fields[12]) if fields else 0


def _machine_ticks() -> int:
    """All cores' time that was neither idle nor waiting for a disk; stolen time is others' work."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
    return user + nice + system + irq + softirq + steal


def _peak_rss_kib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)
