"""Help costs no benchmark's imports, and a benchmark none but its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SHOWN = """
import sys
from stemma.__main__ import main
try:
    main(sys.argv[1:])
finally:
    subjects = {tuple(name.split(".")[2:4]) for name in sys.modules if "stemma.bench." in name}
    print(*(".".join(one) for one in subjects if one[0] != "harness" and one[1:]), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("command", "imported"),
    [("--help", ""), ("bench latency --help", "serving.latency serving.runners")],
)
def test_help_imports_only_what_it_shows(command: str, imported: str) -> None:
    full = [sys.executable, "-c", _SHOWN, *command.split()]
    done = subprocess.run(full, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage:") and sorted(done.stderr.split()) == imported.split()
