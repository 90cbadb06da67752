"""Seconds until something happens: `import stemma`, and process start to first token."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

from ...flags import count
from ...frontend.backend import Engine
from ...frontend.dsl.function import function
from ...frontend.dsl.generation import gen
from ...frontend.dsl.state import ProgramState
from ..harness.report import write_report

_IMPORT = "import time; t = time.perf_counter(); import stemma; print(time.perf_counter() - t)"

# On a quiet machine with two cores; the second of `stemma bench model`'s llama-160m.
_EMBEDDED_TARGET_S = 1.5
_LLAMA_160M_TARGET_S = 2.0


@function
def _one_token(s: ProgramState) -> None:
    s += "Hello"
    s += gen("token", max_tokens=1, temperature=0)


def import_s() -> float:
    """Seconds that `import stemma` takes in a fresh interpreter."""
    command = [sys.executable, "-c", _IMPORT]
    return float(subprocess.run(command, capture_output=True, check=True).stdout)


def first_token_s(model: str | None) -> tuple[float, float]:
    """Seconds from `Engine()` to its first token, and the engine's peak memory then in MB."""
    started = time.perf_counter()
    with Engine(model) as engine:
        _one_token.run(backend=engine)["token"]
        seconds = time.perf_counter() - started
        return seconds, engine.get_server_info()["peak_rss_bytes"] / 2**20


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench startup`."""
    parser.add_argument("--repeats", type=count, default=5)
    parser.add_argument("--model", help="checkpoint folder (default: the embedded model)")


def run(args: argparse.Namespace) -> int:
    """Measure and report medians."""
    target_s = _EMBEDDED_TARGET_S if args.model is None else _LLAMA_160M_TARGET_S
    imports = [import_s() for _ in range(args.repeats)]
    starts = [first_token_s(args.model) for _ in range(args.repeats)]
    write_report(
        "startup",
        [
            _row("import stemma, s", imports, 0.150),
            _row("start to first token, s", [seconds for seconds, _ in starts], target_s),
            _row("peak memory then, MB", [peak for _, peak in starts], None),
        ],
        args,
    )
    return 0


def _row(what: str, values: list[float], target: float | None) -> dict[str, object]:
    median = statistics.median(values)
    share = median / target if target else None
    return {
        "what": what,
        "median": median,
        "min": min(values),
        "max": max(values),
        "target": target,
        "share": share,
    }
