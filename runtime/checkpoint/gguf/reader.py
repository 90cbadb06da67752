"""GGUF files: metadata and tensor locations, every length checked against the file's size.

Layout (the GGUF specification, ggml's docs/gguf.md), little endian, versions 2 and 3:

    "GGUF" | version | number of tensors | number of metadata entries
    metadata entries: key, type of value, value
    tensor entries:   name, dimensions (the fastest first), number format, offset in the data
    data, its start and each tensor aligned to `general.alignment` (32 where that is absent)

The header is read as a stream, data with pread: a file that is truncated while it is read causes an
error, not a signal. Torch-free.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from ....errors import ModelLoadError
from ..model_files import open_plain_file
from ..parts import Range
from .formats import BlockFormat, format_of

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4  # GGML_MAX_DIMS

# Far above any model's; beyond it a file is malformed.
_MAX_TENSORS = 1 << 20
_MAX_ENTRIES = 1 << 16
_MAX_ARRAY = 1 << 24
_MAX_STRING_BYTES = 1 << 24
_MAX_NAME_BYTES = 1 << 16
_MAX_ALIGNMENT = 1 << 20

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor's bytes are, row after row."""

    name: str
    format: BlockFormat
    shape: tuple[int, ...]  # slowest axis first, as in torch
    offset: int  # from the start of the file
    num_bytes: int

    @property
    def row_values(self) -> int:
        return self.shape[-1]

    @property
    def row_bytes(self) -> int:
        return self.row_values // self.format.block_values * self.format.block_bytes

    @property
    def num_rows(self) -> int:
        return self.num_bytes // self.row_bytes


class GgufFile:
    """Owns an open file until `close`. Arrays of the metadata are lists.

    Raises ModelLoadError, naming the file and the field, for anything malformed, and for number
    formats that are not supported.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._stream = stream = os.fdopen(open_plain_file(self.path), "rb")
        try:
            self.num_bytes = os.fstat(stream.fileno()).st_size
            header = GgufHeader(stream, self.path, self.num_bytes)
            self.metadata = header.metadata
            self.tensors = header.tensors
            self.header_digest = header.digest
        except OSError as error:
            stream.close()
            raise ModelLoadError(f"{self.path} cannot be read: {error.strerror}") from None
        except BaseException:
            stream.close()
            raise

    def read(
        self, place: TensorPlace, first_row: int, num_rows: int, columns: Range | None = None
    ) -> NDArray[np.uint8]:
        """[num_rows, row_bytes] of a tensor; rows are counted over all leading axes. columns: these
        values of each row alone, which begin and end with blocks; nothing else is read."""
        assert 0 <= first_row <= first_row + num_rows <= place.num_rows, "rows outside the tensor"
        offset = place.offset + first_row * place.row_bytes
        if columns is None:
            rows = np.empty((num_rows, place.row_bytes), dtype=np.uint8)
            self._fill(place, rows.reshape(-1), offset)
            return rows
        begin, end = (place.format.bytes_of(column) for column in columns)
        rows = np.empty((num_rows, end - begin), dtype=np.uint8)
        for row in range(num_rows):
            self._fill(place, rows[row], offset + row * place.row_bytes + begin)
        return rows

    def _fill(self, place: TensorPlace, target: NDArray[np.uint8], offset: int) -> None:
        """target [N]: of the bytes of a tensor from `offset` of the file on."""
        buffer = target.data
        while len(buffer):
            try:
                count = os.preadv(self._stream.fileno(), [buffer], offset)
            except OSError as error:
                raise ModelLoadError(
                    f"{self.path}: tensor {place.name!r} cannot be read: {error.strerror}"
                ) from None
            if count == 0:
                raise ModelLoadError(
                    f"{self.path}: tensor {place.name!r}: the file ends at byte {offset}, "
                    f"{len(buffer)} bytes too early"
                )
            buffer, offset = buffer[count:], offset + count

    def close(self) -> None:
        self._stream.close()


class Readable(Protocol):
    """The interface that a stream must have."""

    def read(self, count: int, /) -> bytes:
        """The next `count` bytes, fewer only at the end."""


class GgufHeader:
    """Everything before the data, read from the start of a file of `num_bytes`; `path` names it in
    errors. Raises ModelLoadError as `GgufFile` does."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorPlace]
    digest: str  # of all header bytes

    def __init__(self, stream: Readable, path: str | Path, num_bytes: int) -> None:
        self._stream = stream
        self._path = path
        self._position = 0
        self._num_bytes = num_bytes
        self._state = blake2b(digest_size=16)
        num_tensors, num_entries = self._start()
        self.metadata = self._entries(num_entries)
        self._alignment = self._checked_alignment()
        self.tensors = self._places(num_tensors)
        self.digest = self._state.hexdigest()

    def _start(self) -> tuple[int, int]:
        """The numbers of tensors and of metadata entries."""
        if self._num_bytes < len(MAGIC) or self._bytes(len(MAGIC), "magic") != MAGIC:
            raise ModelLoadError(f"{self._path} is not a GGUF file: it does not begin with 'GGUF'")
        version = self._number("<I", "version")
        if version not in VERSIONS and int.from_bytes(version.to_bytes(4, "big"), "little") < 100:
            raise self._fail("version", "a little-endian file", "a big-endian one")
        if version not in VERSIONS:
            raise self._fail("version", "2 or 3", str(version))
        num_tensors = self._count("<Q", "number of tensors", _MAX_TENSORS)
        return num_tensors, self._count("<Q", "number of metadata entries", _MAX_ENTRIES)

    def _entries(self, count: int) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for index in range(count):
            key = self._name(f"key of metadata entry {index}")
            if key in entries:
                raise self._fail(key, "one entry of this name", "two")
            entries[key] = self._value(self._number("<I", key), key)
        return entries

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._text(key)
        if kind == _ARRAY:
            return self._array(key)
        return self._number(self._scalar(kind, key), key)

    def _array(self, key: str) -> list[Any]:
        kind = self._number("<I", key)
        if kind == _STRING:
            count = self._count("<Q", key, _MAX_ARRAY, item_bytes=8)
            return [self._text(key) for _ in range(count)]
        layout = self._scalar(kind, key)
        size = struct.calcsize(layout)
        count = self._count("<Q", key, _MAX_ARRAY, item_bytes=size)
        values = np.frombuffer(self._bytes(count * size, key), dtype=layout)
        return [bool(value) for value in values] if kind == _BOOL else values.tolist()

    def _scalar(self, kind: int, key: str) -> str:
        if kind not in _SCALARS:
            raise self._fail(key, "a value of a known type", f"type {kind}")
        return _SCALARS[kind]

    def _checked_alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        is_number = isinstance(alignment, int) and not isinstance(alignment, bool)
        if not is_number or not 1 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._fail("general.alignment", "a power of two", repr(alignment)[:50])
        return int(alignment)

    def _places(self, count: int) -> dict[str, TensorPlace]:
        found = [self._place(index) for index in range(count)]
        start = -(-self._position // self._alignment) * self._alignment
        places: dict[str, TensorPlace] = {}
        end = start
        for place in sorted(found, key=lambda place: place.offset):
            where = f"tensor {place.name!r}"
            if place.name in places:
                raise self._fail(where, "one tensor of this name", "two")
            offset = start + place.offset
            if offset < end:
                raise self._fail(where, f"an offset from byte {end} on", f"byte {offset}")
            end = offset + place.num_bytes
            if end > self._num_bytes:
                raise self._fail(where, f"an end by byte {self._num_bytes}", f"byte {end}")
            places[place.name] = TensorPlace(
                place.name, place.format, place.shape, offset, place.num_bytes
            )
        return {place.name: places[place.name] for place in found}

    def _place(self, index: int) -> TensorPlace:
        """A tensor's place, with its offset from the start of the data."""
        name = self._name(f"name of tensor {index}")
        where = f"tensor {name!r}"
        num_axes = self._number("<I", where)
        if not 1 <= num_axes <= _MAX_DIMENSIONS:
            raise self._fail(where, f"1 to {_MAX_DIMENSIONS} dimensions", str(num_axes))
        shape = tuple(self._number("<Q", where) for _ in range(num_axes))[::-1]
        if 0 in shape:
            raise self._fail(where, "dimensions above 0", str(list(shape)))
        form = format_of(self._number("<I", where), f"{self._path}: {where}")
        if shape[-1] % form.block_values:
            expected = f"rows of a multiple of {form.block_values} values, as {form.name} needs"
            raise self._fail(where, expected, str(shape[-1]))
        offset = self._number("<Q", where)
        if offset % self._alignment:
            raise self._fail(where, f"an offset aligned to {self._alignment}", str(offset))
        num_blocks = 1
        for size in shape:
            num_blocks *= size
        return TensorPlace(
            name, form, shape, offset, num_blocks // form.block_values * form.block_bytes
        )

    def _name(self, field: str) -> str:
        size = self._count("<Q", field, _MAX_NAME_BYTES, item_bytes=1)
        try:
            return self._bytes(size, field).decode()
        except UnicodeDecodeError:
            raise self._fail(field, "UTF-8", "other bytes") from None

    def _text(self, field: str) -> str:
        size = self._count("<Q", field, _MAX_STRING_BYTES, item_bytes=1)
        return self._bytes(size, field).decode(errors="replace")

    def _count(self, layout: str, field: str, largest: int, item_bytes: int = 1) -> int:
        """A number of items that follow, each of at least `item_bytes` bytes."""
        count = int(self._number(layout, field))
        remaining = self._num_bytes - self._position
        if count > largest or count * item_bytes > remaining:
            expected = f"at most {min(largest, remaining // item_bytes)} items"
            raise self._fail(field, expected, str(count))
        return count

    def _number(self, layout: str, field: str) -> Any:
        return struct.unpack(layout, self._bytes(struct.calcsize(layout), field))[0]

    def _bytes(self, count: int, field: str) -> bytes:
        data = self._stream.read(count) if count <= self._num_bytes - self._position else b""
        if len(data) != count:
            place = f"byte {self._position}"
            raise self._fail(field, f"{count} bytes at {place}", "the end of the file")
        self._position += count
        self._state.update(data)
        return data

    def _fail(self, field: str, expected: str, found: str) -> ModelLoadError:
        return ModelLoadError(f"{self._path}: {field}: expected {expected}, found {found}")


def copy_header(stream: BinaryIO, num_bytes: int, name: str, copy: Path) -> None:
    """Write the header of the file that `stream` begins to `copy`, which is as long as that file
    (`num_bytes`) but takes no space for its data. Nothing after the header is read.

    Raises ModelLoadError, calling the file `name`, if it is malformed.
    """
    with copy.open("wb") as out:
        GgufHeader(_Copied(stream, out), name, num_bytes)
        out.truncate(num_bytes)


class _Copied:
    """Writes everything read from `stream` to `out`, too."""

    def __init__(self, stream: BinaryIO, out: BinaryIO) -> None:
        self._stream = stream
        self._out = out

    def read(self, count: int, /) -> bytes:
        data = self._stream.read(count)
        self._out.write(data)
        return data
