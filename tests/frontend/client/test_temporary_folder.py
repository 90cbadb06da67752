"""Folders of engines: whose maker was killed, the next one removes them."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from stemma.frontend.client.temporary_folder import TemporaryFolder

MAKER = """
import sys
from stemma.frontend.client.temporary_folder import TemporaryFolder
folder = TemporaryFolder()
(folder.path / "engine.log").write_text("left behind")
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def test_what_the_killed_left_is_removed_and_what_the_living_have_is_not(tmp_path: Path) -> None:
    pipe = subprocess.PIPE
    maker = subprocess.Popen(
        [sys.executable, "-P", "-c", MAKER], stdin=pipe, stdout=pipe, text=True
    )
    assert maker.stdout is not None
    left = Path(maker.stdout.readline().strip())
    mine = TemporaryFolder()
    assert left.is_dir() and left.parent == tmp_path, "its maker lives"
    maker.send_signal(signal.SIGKILL)
    maker.communicate()
    assert left.is_dir()
    other = TemporaryFolder()
    assert sorted(tmp_path.iterdir()) == sorted([mine.path, other.path])
    for folder in (mine, other, mine):
        folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_what_others_may_have_made_is_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "owner.lock").touch()
    link = tmp_path / "stemma-engine-link"
    link.symlink_to(precious)
    being_made = tmp_path / "stemma-engine-new"
    being_made.mkdir()
    TemporaryFolder().remove()
    assert link.is_symlink() and (precious / "owner.lock").exists() and being_made.is_dir()
