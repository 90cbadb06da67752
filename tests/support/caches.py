"""A user's cache of its own for a test, in which nothing but compiled code is."""

from __future__ import annotations

from pathlib import Path

import pytest

from stemma.native_library import cache_folder


def own_cache(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Have this process and those that it starts keep theirs in `folder`. Code that was compiled
    before is there too: to compile it again takes half a minute."""
    compiled = list(cache_folder().glob("*.so"))
    (folder / "stemma").mkdir(parents=True)
    for path in compiled:
        (folder / "stemma" / path.name).symlink_to(path)
    patch.setenv("XDG_CACHE_HOME", str(folder))
