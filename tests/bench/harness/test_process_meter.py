"""CPU of a process tree and of the rest."""

from __future__ import annotations

import os
import subprocess
import sys

from stemma.bench.harness.process_meter import ProcessMeter, peak_rss_bytes, process_tree

_BUSY = "import time\nwhile time.process_time() < 0.3: pass\ninput()"
_PARENT = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {_BUSY!r}])"


def test_a_meter_counts_descendants_and_leaves_others_out() -> None:
    with ProcessMeter(os.getpid()) as own, ProcessMeter(1 << 30) as nobody:
        child = subprocess.Popen([sys.executable, "-c", _PARENT], stdin=subprocess.PIPE)
        try:
            while own_cpu_s(child.pid) < 0.3:
                pass
        finally:
            tree, peak = process_tree(child.pid), peak_rss_bytes(child.pid)
            own.__exit__(None, None, None)
            child.communicate(b"\n")
    assert len(tree) == 2 and peak > 2 * 2**20
    assert nobody.cpu_s == 0 and nobody.others_cores > 0


def own_cpu_s(pid: int) -> float:
    with ProcessMeter(pid) as meter:
        pass
    return meter._read().tree_s
