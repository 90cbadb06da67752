"""How many compute threads, and how they should wait for each other: quiet and disturbed.

For one thread, and for all cores with several spin times, an engine decodes at batch 1 and 32,
first alone, then beside one process that keeps a core busy. Settings are interleaved; medians are
printed, with the ratio to the best of the column.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack

from ...flags import count
from ...frontend.backend import Engine
from ...frontend.dsl.function import function
from ...frontend.dsl.generation import gen
from ...frontend.dsl.state import ProgramState
from ..harness.report import write_report

CORES = len(os.sched_getaffinity(0))
SETTINGS = ((1, 0), *((CORES, spin_us) for spin_us in (0, 50, 200, 1000, 100_000)))
BATCHES = (1, 32)
NUM_TOKENS = 64
_BUSY = "while True: pass"


@function
def _decode(s: ProgramState, number: int) -> None:
    s += f"Text {number}: "
    s += gen("text", max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)


def tokens_per_s(engine: Engine, batch: int, seed: int) -> float:
    """Decoded tokens per second, over all rows of the batch."""
    rows = [{"number": seed * 1000 + i} for i in range(batch)]
    started = time.perf_counter()
    _decode.run_batch(rows, backend=engine)
    return batch * NUM_TOKENS / (time.perf_counter() - started)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench threads`."""
    parser.add_argument("--repeats", type=count, default=3)
    parser.add_argument("--model", help="checkpoint folder (default: the embedded model)")


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    found: dict[tuple[tuple[int, int], int, bool], list[float]] = {}
    with ExitStack() as stack:
        engines = {
            (threads, spin): stack.enter_context(
                Engine(args.model, num_threads=threads, spin_us=spin)
            )
            for threads, spin in SETTINGS
        }
        for repeat in range(args.repeats):
            for is_busy in (False, True):
                neighbour = subprocess.Popen([sys.executable, "-c", _BUSY]) if is_busy else None
                try:
                    for setting, engine in engines.items():
                        for batch in BATCHES:
                            speed = tokens_per_s(engine, batch, repeat)
                            found.setdefault((setting, batch, is_busy), []).append(speed)
                finally:
                    if neighbour is not None:
                        neighbour.kill()
                        neighbour.wait()
    write_report("threads", _rows(found), args)
    return 0


def _rows(
    found: dict[tuple[tuple[int, int], int, bool], list[float]],
) -> list[dict[str, object]]:
    medians = {key: statistics.median(values) for key, values in found.items()}
    rows: list[dict[str, object]] = []
    for setting in SETTINGS:
        row: dict[str, object] = {"threads": setting[0], "spin_us": setting[1]}
        for is_busy in (False, True):
            for batch in BATCHES:
                best = max(medians[other, batch, is_busy] for other in SETTINGS)
                name = f"{'busy' if is_busy else 'quiet'} b{batch}"
                row[f"{name} tok/s"] = medians[setting, batch, is_busy]
                row[f"{name} share"] = medians[setting, batch, is_busy] / best
        rows.append(row)
    return rows
