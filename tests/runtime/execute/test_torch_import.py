"""An engine's torch: without what only tracing and training read, until something does."""

from __future__ import annotations

import subprocess
import sys

_TRACE = """
import sys
from stemma.runtime.execute.torch_import import import_torch
import_torch()
from stemma.runtime.execute import model_runner
import torch
unread = "_decomp", "_refs", "_dynamo", "export.exported_program", "distributions.normal"
print([name for name in unread if f"torch.{name}" in sys.modules])
shifted = torch.compile(lambda x: torch.nn.functional.silu(x) + 1, backend="aot_eager")
print(shifted(torch.zeros(2)).tolist(), torch.empty(2, 3, device="meta").T.shape)
print(torch.export.export(torch.nn.ReLU(), (torch.zeros(2),)).module()(torch.ones(2)).tolist())
"""


def test_torch_traces_though_the_engine_imported_it_without_what_tracing_reads() -> None:
    done = subprocess.run([sys.executable, "-c", _TRACE], capture_output=True, text=True)
    expected = ["[]", "[1.0, 1.0] torch.Size([3, 2])", "[1.0, 1.0]"]
    assert done.stdout.splitlines() == expected, done.stderr
