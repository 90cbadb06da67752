"""The compute threads of an engine's process: how many, and how they wait for each other.

Must be called before torch is imported: OpenMP reads its settings when it is loaded. The default
was measured, see docs/how-it-works/threads.md: threads that never sleep are fastest on a quiet
machine and very slow beside a busy process; threads that sleep at once lose much at batch 1. A
bounded spin has most of both advantages. A small model gets one thread: its operations are too
short to share, and beside a busy process every barrier of a step can cost a time slice.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

DEFAULT_SPIN_US = 50  # for several threads; 43% of the best beside a busy process, 68% in quiet
# One turn of libgomp's loop is a `pause`: 25 ns on an AMD EPYC (Zen 4, measured 2026-11), about
# twice that on recent Intel cores. libgomp counts turns, not time.
SPINS_PER_US = 40
# Below this size of weights, one thread (measured with 9 MB; the break-even point is a guess).
SMALL_MODEL_BYTES = 64 * 2**20


def default_num_threads(model: Path, num_ranks: int = 1) -> int:
    """One for a small model, else the number of cores that this process may use; of each of the
    processes that hold a model together, as many as there are for it."""
    files = [file for kind in ("*.safetensors", "*.gguf") for file in model.glob(kind)]
    num_bytes = sum(file.stat().st_size for file in files)
    if num_bytes < SMALL_MODEL_BYTES:
        return 1
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)


def configure_threads(num_threads: int, spin_us: int | None) -> None:
    """Set OpenMP's environment for this process, unless the user has set it already."""
    assert "torch" not in sys.modules, "threads must be configured before torch is imported"
    spin = DEFAULT_SPIN_US if spin_us is None else spin_us
    os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE" if spin == 0 else "ACTIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", str(spin * SPINS_PER_US))
    if spin_us is not None:
        os.environ.setdefault("STEMMA_SPIN_US", str(spin_us))  # for the compiled kernels' own pool
