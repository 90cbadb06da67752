"""An engine's torch: without what only tracing reads, until something traces."""

from __future__ import annotations

import subprocess
import sys

_TRACE = """
import sys
from stemma.runtime.execute.torch_import import import_torch
import_torch()
from stemma.runtime.execute import model_runner
import torch
print([name for name in ("torch._decomp", "torch._refs", "torch._dynamo") if name in sys.modules])
shifted = torch.compile(lambda x: torch.nn.functional.silu(x) + 1, backend="aot_eager")
print(shifted(torch.zeros(2)).tolist(), torch.empty(2, 3, device="meta").T.shape)
"""


def test_torch_traces_though_the_engine_imported_it_without_shapes() -> None:
    done = subprocess.run([sys.executable, "-c", _TRACE], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["[]", "[1.0, 1.0] torch.Size([3, 2])"], done.stderr
