"""What happened to a store's blocks, appended record by record, so that a start reads one file.

    head     magic "STEMMAJ1", digest of the layout [16]
    record   kind uint8, 3 zeros, key [32], parent's key [32] (zeros: none), CRC-32 of these
             kind 1: the block was added; 2: it is gone; 3: it was used, with all before it

Records have one size, so a damaged one costs only itself, and an end that was cut off costs what
was cut. It is not synced; the folder's files are the truth, and a writer compares at its start.
Another process reads along: by the number of bytes, or from the start where the file is a new one.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from .block_key import KEY_BYTES

ADDED, GONE, USED = 1, 2, 3
_MAGIC = b"STEMMAJ1"
_NO_PARENT = bytes(KEY_BYTES)
_CHECKED = struct.Struct(f"<B3x{KEY_BYTES}s{KEY_BYTES}s")
_RECORD = struct.Struct(f"<B3x{KEY_BYTES}s{KEY_BYTES}sI")
_HEAD_BYTES = len(_MAGIC) + 16


class Record(NamedTuple):
    """One thing that happened."""

    kind: int
    key: bytes
    parent: bytes | None = None  # of an added block


class JournalReader:
    """Reads what was appended since it last did."""

    def __init__(self, path: Path, layout_digest: bytes) -> None:
        self._path = path
        self._head = _MAGIC + layout_digest
        self._file_id: tuple[int, int] | None = None
        self._offset = 0

    def read(self) -> tuple[bool, list[Record]]:
        """Whether the records begin anew, and the records. No file, or a foreign one: begins anew
        with none. Raises OSError where it cannot be read."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            return self._begin(None), []
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            stat = os.fstat(descriptor)
            file_id = (stat.st_dev, stat.st_ino)
            is_new = file_id != self._file_id or stat.st_size < self._offset
            if is_new:
                self._begin(file_id)
                if file.read(_HEAD_BYTES) != self._head:
                    return self._begin(None), []
                self._offset = _HEAD_BYTES
            num_whole = (stat.st_size - self._offset) // _RECORD.size
            file.seek(self._offset)
            data = file.read(max(0, num_whole) * _RECORD.size)
        data = data[: len(data) - len(data) % _RECORD.size]
        self._offset += len(data)
        return is_new, list(self._records(data))

    def _begin(self, file_id: tuple[int, int] | None) -> bool:
        self._file_id = file_id
        self._offset = 0
        return True

    def _records(self, data: bytes) -> Iterator[Record]:
        view = memoryview(data)
        start = 0
        for kind, key, parent, crc in _RECORD.iter_unpack(data):
            if zlib.crc32(view[start : start + _CHECKED.size]) == crc and ADDED <= kind <= USED:
                yield Record(kind, key, None if parent == _NO_PARENT else parent)
            start += _RECORD.size


class Journal:
    """The writer's end of the file. Every method raises OSError where it cannot write."""

    def __init__(self, path: Path, layout_digest: bytes) -> None:
        self._path = path
        self._head = _MAGIC + layout_digest
        self._descriptor = -1
        self.num_records = 0

    def rewrite(self, blocks: Iterable[tuple[bytes, bytes | None]]) -> None:
        """Begin a new file with these blocks, (key, parent's key), the least recently used first;
        it takes the old one's place when it is whole."""
        records = [_packed(Record(ADDED, key, parent)) for key, parent in blocks]
        temporary = self._path.with_suffix(".tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            _write_all(descriptor, self._head + b"".join(records))
            os.rename(temporary, self._path)
        except OSError:
            os.close(descriptor)
            with suppress(OSError):
                os.unlink(temporary)
            raise
        self.close()
        self._descriptor = descriptor
        self.num_records = len(records)

    def append(self, record: Record) -> None:
        """Add a record at the end."""
        _write_all(self._descriptor, _packed(record))
        self.num_records += 1

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _packed(record: Record) -> bytes:
    checked = _CHECKED.pack(record.kind, record.key, record.parent or _NO_PARENT)
    return checked + zlib.crc32(checked).to_bytes(4, "little")


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
