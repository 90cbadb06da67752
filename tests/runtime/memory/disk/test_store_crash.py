"""kill -9 while a store writes: what was reported written is there, and nothing is ever wrong."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from kv_blocks import LAYOUT, PLAIN, fetched, open_store, sequence

import stemma
from stemma.runtime.memory.kv_layout import KVLayout

TESTS = Path(stemma.__file__).parent / "tests" / "support"
# Blocks of 1 MiB, so that a process is killed within the writing of one.
LARGE = replace(LAYOUT, kv=KVLayout(1, (replace(PLAIN, width=1024),)))

# Saves chains of three without end, in a bounded store, and says which are on disk.
WRITER = """
import itertools, sys
from dataclasses import replace
sys.path.insert(0, {tests!r})
from kv_blocks import *
layout = replace(LAYOUT, kv=KVLayout(1, (replace(PLAIN, width=1024),)))
store = open_store(Path({folder!r}), max_blocks={max_blocks}, layout=layout)
assert store.mode.value == "writer"
print("ready", flush=True)
for number in itertools.count({first}):
    blocks = sequence(number % 50, number, 7, layout=layout)
    for block in blocks:
        store.save(block, payload_of(block, layout))
    if number % 3 == 0:
        store.flush(60.0)
        print(number, flush=True)
"""


def killed_writer(folder: Path, first: int, max_blocks: int, delay_s: float) -> list[int]:
    """Let a process write for `delay_s`, kill it; the numbers that it said were on disk."""
    code = WRITER.format(tests=str(TESTS), folder=str(folder), max_blocks=max_blocks, first=first)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
        lines = process.stdout.read().split(b"\n")
    return [int(line) for line in lines[:-1]]


def survive(folder: Path, seed: int, num_rounds: int, max_blocks: int) -> None:
    rng = random.Random(seed)
    first = 0
    for _ in range(num_rounds):
        written = killed_writer(folder, first, max_blocks, rng.uniform(0.0, 0.08))
        last = max(written, default=first)
        store = open_store(folder, max_blocks=max_blocks, layout=LARGE)
        assert store.describe()["num_blocks"] <= max_blocks
        assert len(list(folder.rglob("*.kv"))) == store.describe()["num_blocks"]
        assert not list(folder.rglob("*.tmp"))
        for number in range(max(0, last - 40), last + 40):
            blocks = sequence(number % 50, number, 7, layout=LARGE)
            num_fetched = fetched(store, blocks)
            is_recent = number in written and number > last - max_blocks // 6
            assert num_fetched == 3 or not is_recent, f"{number} of {written} is lost"
        assert store.stats.num_corrupt == 0
        store.close()
        first = last + 1


@pytest.mark.parametrize("max_blocks", [60, 100_000])
def test_a_killed_writer_loses_only_what_it_had_not_written(
    tmp_path: Path, max_blocks: int
) -> None:
    survive(tmp_path, seed=max_blocks, num_rounds=5, max_blocks=max_blocks)


@pytest.mark.slow
@pytest.mark.parametrize("max_blocks", [30, 60, 100_000])
def test_a_writer_killed_two_hundred_times_loses_only_that_too(
    tmp_path: Path, max_blocks: int
) -> None:
    survive(tmp_path, seed=max_blocks, num_rounds=200, max_blocks=max_blocks)
