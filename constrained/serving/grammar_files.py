"""Compiled grammars in a folder, for the next run and for other engines: those that took long.

A file is what a compiler's process answered, behind a hash of it, under a name made of all that
it depends on: the grammar, whose it is, the limit of time, and this code. It is read as a pickle:
whoever may write into the folder decides what the engine runs, so it is the user's alone.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import pickle
import sys
import tempfile
from collections.abc import Hashable
from pathlib import Path

import numpy as np

from ..compiled_grammar import CompiledGrammar
from ..spec import GrammarSpec

log = logging.getLogger(__name__)

LONG_S = 0.05  # what takes longer is written: reading takes 1 ms
MAX_BYTES = 256 * 2**20
_SUFFIX = ".grammar"
_DIGEST_BYTES = 32  # SHA-256


class GrammarFiles:
    """Owns a folder's grammars: at most `max_bytes`, the least recently used go first.

    What cannot be read or written is as good as not there. Thread-safe, and several engines may
    share a folder. Raises OSError where the folder cannot be made or is another user's.
    """

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise PermissionError(
                f"{folder} belongs to or can be written by others, who would decide what runs "
                "here; use a folder of your own (chmod 700)"
            )
        self._folder = folder
        self._max_bytes = max_bytes

    def get(self, name: str) -> CompiledGrammar | None:
        """What was written under this name."""
        path = self._folder / (name + _SUFFIX)
        try:
            written = path.read_bytes()
            digest, data = written[:_DIGEST_BYTES], written[_DIGEST_BYTES:]
            os.utime(path)
            if hashlib.sha256(data).digest() != digest:
                raise ValueError("it is damaged")
            found = pickle.loads(data)
        except Exception as error:  # a damaged file raises whatever its bytes lead to
            if not isinstance(error, FileNotFoundError):
                log.warning("the compiled grammar in %s cannot be read: %s", path, error)
            return None
        return found if isinstance(found, CompiledGrammar) else None

    def put(self, name: str, data: bytes) -> None:
        """Write a pickled CompiledGrammar, and make room for it."""
        with contextlib.suppress(OSError):
            # The suffix, so that what a killed engine was writing is trimmed like all else.
            with tempfile.NamedTemporaryFile(
                dir=self._folder, suffix=_SUFFIX, delete=False
            ) as file:
                try:
                    file.write(hashlib.sha256(data).digest() + data)
                    file.flush()
                    os.replace(file.name, self._folder / (name + _SUFFIX))
                except OSError:
                    os.unlink(file.name)
                    raise
            self._trim()

    def _trim(self) -> None:
        found = [(path.stat(), path) for path in self._folder.glob("*" + _SUFFIX)]
        num_bytes = sum(status.st_size for status, _ in found)
        for status, path in sorted(found, key=lambda one: one[0].st_mtime):
            if num_bytes <= self._max_bytes:
                return
            path.unlink(missing_ok=True)
            num_bytes -= status.st_size


def file_name(spec: GrammarSpec, namespace: Hashable, limit_s: float) -> str:
    """The name of a grammar's file."""
    text = repr((_code(), spec, namespace, limit_s))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@functools.cache
def _code() -> str:
    """A hash of all that makes grammars, and of what reads them."""
    found = hashlib.sha256(repr((sys.version_info, np.__version__)).encode())
    folder = Path(__file__).parents[1]
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".py", ".cpp", ".h"):
            found.update(path.read_bytes())
    return found.hexdigest()
