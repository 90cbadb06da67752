"""Where a store's files lie, and who may write them.

    DIR/<digest of the layout>/LOCK          held (flock) by the one process that writes
                               layout.json   what the digest stands for, for people
                               journal       see store_journal.py
                               00 ... ff/    <key in hex>.kv, by the key's first byte

Each layout (model, arithmetic) has a folder of its own, with its own writer and its own bound.
Names that do not look like these are left alone. Files and folders are the owner's only: they hold
what prompts said.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from .block_key import KEY_BYTES, StoredLayout

_SHARD = re.compile(r"[0-9a-f]{2}")
_BLOCK = re.compile(rf"([0-9a-f]{{{2 * KEY_BYTES}}})\.(kv|tmp)")


class StoreFolder:
    """The paths of one layout's store. Holds the lock from `try_lock` to `unlock`."""

    def __init__(self, root: Path, layout: StoredLayout) -> None:
        self.path = root / layout.digest.hex()
        self.journal_path = self.path / "journal"
        self._layout = layout
        self._lock_descriptor = -1

    def prepare(self) -> None:
        """Make the folder where it is missing. Raises OSError."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = self.path / "layout.json"
        if not about.exists():
            about.write_text(json.dumps(asdict(self._layout), indent=1) + "\n", encoding="utf-8")

    def path_of(self, key: bytes) -> Path:
        """The file of a block."""
        name = key.hex()
        return self.path / name[:2] / f"{name}.kv"

    def tidy(self) -> set[bytes]:
        """Remove what a writer that died has left half written; the keys of the blocks that there
        are files for, whatever is in them. Only for the one who writes. Raises OSError."""
        keys = set()
        for path, name, kind in self._files():
            if kind == "kv":
                keys.add(bytes.fromhex(name))
            else:
                with suppress(OSError):
                    os.unlink(path)
        return keys

    def try_lock(self) -> bool:
        """Become the one that writes; False where another process is. Raises OSError."""
        descriptor = os.open(self.path / "LOCK", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError:
            os.close(descriptor)
            raise
        os.truncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        self._lock_descriptor = descriptor
        return True

    def unlock(self) -> None:
        """Let another process write; nothing happens without the lock."""
        if self._lock_descriptor >= 0:
            os.close(self._lock_descriptor)
            self._lock_descriptor = -1

    def _files(self) -> Iterator[tuple[str, str, str]]:
        """(path, key in hex, "kv" or "tmp") of what lies in the right place."""
        with os.scandir(self.path) as shards:
            found = [shard for shard in shards if _SHARD.fullmatch(shard.name)]
        for shard in found:
            with suppress(NotADirectoryError), os.scandir(shard) as files:
                for file in files:
                    match = _BLOCK.fullmatch(file.name)
                    if match and match[1].startswith(shard.name):
                        yield file.path, match[1], match[2]
