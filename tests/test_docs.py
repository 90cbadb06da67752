"""`.ci/check_docs.py`, which `make check` runs, finds what is broken in the documentation."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stemma as st

SCRIPT = Path(st.__file__).parent / ".ci" / "check_docs.py"
Faults = Callable[[Path], list[str]]


@pytest.fixture(scope="module")
def faults() -> Faults:
    spec = importlib.util.spec_from_file_location("check_docs", SCRIPT)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda root: list(module.faults(root))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with two pages, in order."""
    files = {
        "README.md": "[docs](docs/index.md), [a section](docs/use/a.md#what-it-does)",
        "CHANGELOG.md": "# Changelog",
        "CONTRIBUTING.md": "[mail](mailto:a@b.c), [site](https://example.org/x#y)",
        "docs/index.md": "[a](use/a.md)",
        "docs/use/a.md": "# A\n\n## What *it* `does`\n\n```text\n[no](link.md)\n```\n`[nor](b.md)`",
        "mkdocs.yml": "site_name: x\nnav:\n  - index.md\n  - Use:\n      - A: use/a.md\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    return tmp_path


def test_nothing_is_found_where_nothing_is_broken(faults: Faults, root: Path) -> None:
    assert faults(root) == []


@pytest.mark.parametrize(
    ("page", "text", "fault"),
    [
        ("README.md", "[x](docs/b.md)", "README.md: docs/b.md: no such file"),
        ("CHANGELOG.md", "![x](a.png)", "CHANGELOG.md: a.png: no such file"),
        ("docs/use/a.md", "[x](../b.md)", "docs/use/a.md: ../b.md: no such file"),
        ("README.md", "[x](docs/use/a.md#why)", "README.md: docs/use/a.md#why: no such heading"),
        ("docs/index.md", "[a](use/a.md#)[x](#y)", "docs/index.md: #y: no such heading"),
        ("docs/index.md", "", "docs/use/a.md: no chain of links from docs/index.md leads here"),
        ("mkdocs.yml", "nav:\n", "mkdocs.yml: nav lacks index.md"),
        ("mkdocs.yml", "x:\nnav:\n  - index.md\n  - use/a.md\n  - b.md\n",
         "mkdocs.yml: nav has no such page: b.md"),
    ],
)  # fmt: skip
def test_what_is_broken_is_found(
    faults: Faults, root: Path, page: str, text: str, fault: str
) -> None:
    (root / page).write_text(text, "utf-8")
    assert fault in faults(root)


def test_the_documentation_of_this_repository_holds_together(faults: Faults) -> None:
    assert faults(SCRIPT.parents[1]) == []
