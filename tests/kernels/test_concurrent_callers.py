from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import concurrent_callers
import pytest
import torch
from waiting import PATIENCE_S

from stemma.kernels.native.bindings import why_not_native


@pytest.mark.skipif(
    why_not_native(torch.bfloat16) is not None, reason="nothing is compiled on this machine"
)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_callers_in_threads_of_one_process_each_get_what_they_get_alone(num_threads: int) -> None:
    """In a process of its own: what goes wrong here ends a process, or lasts for ever."""
    program = Path(concurrent_callers.__file__)
    done = subprocess.run(
        [sys.executable, program],
        env={**os.environ, "OMP_NUM_THREADS": str(num_threads)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 3 * concurrent_callers.CALLERS * concurrent_callers.ROUNDS
