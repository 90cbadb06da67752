"""Prints the lowest versions that pyproject.toml declares, as pip's constraints.

torch, triton and numpy are left out, and taken as they are there: another torch of the CPU is not
on every index.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

LEFT_OUT = {"torch", "triton", "numpy"}
_LOWEST = re.compile(r"([A-Za-z0-9_.-]+)\s*>=\s*([0-9][0-9.]*)")


def lowest(requirements: list[str]) -> dict[str, str]:
    """Name to version, of the requirements that have a lower bound."""
    found = (_LOWEST.match(each) for each in requirements)
    return {match[1]: match[2] for match in found if match and match[1] not in LEFT_OUT}


if __name__ == "__main__":
    root = Path(__file__).parent.parent
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    for name, version in lowest(project["dependencies"]).items():
        print(f"{name}=={version}")
