"""Where a server listens by default: in a folder that no other user can have prepared."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from stemma.cli.connect import default_endpoint
from stemma.errors import InvalidRequest
from stemma.frontend.backend import Engine


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"stemma-{os.getuid()}"


def test_the_default_endpoint_lies_in_a_folder_of_ones_own(folder: Path) -> None:
    for _ in range(2):
        assert default_endpoint(8001) == f"ipc://{folder}/8001.ipc"
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_path_too_long_for_sockets_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 100)))
    for begin in (lambda: default_endpoint(8001), Engine):
        with pytest.raises(InvalidRequest, match=r"TMPDIR='.*' .* at most 73 bytes.*a shorter one"):
            begin()


@pytest.mark.parametrize("kind", ["link", "file", "open to all"])
def test_a_folder_that_another_may_have_prepared_is_refused(folder: Path, kind: str) -> None:
    if kind == "link":
        (folder.parent / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(folder.parent / "elsewhere")
    elif kind == "file":
        folder.touch()
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with pytest.raises(InvalidRequest, match=rf"endpoint='{folder}' .* no other may enter"):
        default_endpoint(8001)
