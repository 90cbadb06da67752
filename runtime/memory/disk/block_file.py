"""One block in one file: written whole or not at all, and never believed unchecked.

    offset  size
    0       8     magic "STEMMAKV"
    8       4     version, uint32 little-endian, as all numbers
    12      4     number of tokens
    16      16    digest of the layout
    32      32    key
    64      32    parent's key; zeros for a first block
    96      8     payload bytes
    104     1024  token ids, int32: a wrong file under a right name is found out
    1128    4     CRC-32 of the header so far
    1132    n     payload, see block_copy.py
    1132+n  4     CRC-32 of the payload

A file is written under a temporary name in its own folder and renamed. It is not synced: after a
power failure a file may be short, or hold zeros, and is then found out and dropped; after the death
of the process alone every renamed file is whole.

The checksum is zlib's CRC-32: it finds every flipped bit and every burst of up to 32 bits, and
other damage but for one in 2**32, at 4.0 GB/s where BLAKE2b makes 0.95 and SHA-1 1.9 (AMD EPYC with
AVX-512, one thread, 3 MiB, minimum of 9 runs). It is no protection against somebody who may write
to the folder: nothing here is.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .block_key import BLOCK_TOKENS, KEY_BYTES, TOKEN_BYTES, Block, StoredLayout

Payload = npt.NDArray[np.uint8]  # [layout.block_bytes], contiguous

_MAGIC = b"STEMMAKV"
_VERSION = 1
_FIELDS = struct.Struct(f"<8sII16s{KEY_BYTES}s{KEY_BYTES}sQ")
_CRC = struct.Struct("<I")
_NO_PARENT = bytes(KEY_BYTES)
_HEADER_BYTES = _FIELDS.size + BLOCK_TOKENS * TOKEN_BYTES + _CRC.size


class CorruptBlock(Exception):
    """A file that is not what its name says; the text says how."""


def file_bytes(layout: StoredLayout) -> int:
    """Size of every file of a layout."""
    return _HEADER_BYTES + layout.block_bytes + _CRC.size


def write_block(path: Path, layout: StoredLayout, block: Block, payload: Payload) -> None:
    """Make the file, replacing what was there. Raises OSError; then there is no new file."""
    crc = _CRC.pack(zlib.crc32(payload.data))
    parts = [memoryview(_header(layout, block)), payload.data, memoryview(crc)]
    temporary = path.with_suffix(".tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            _write_all(descriptor, parts)
        finally:
            os.close(descriptor)
        os.rename(temporary, path)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def read_block(path: Path, layout: StoredLayout, block: Block) -> Payload:
    """The payload of just this block. Raises CorruptBlock, or OSError where there is no file."""
    header = bytearray(_HEADER_BYTES)
    payload: Payload = np.empty(layout.block_bytes, dtype=np.uint8)
    crc = bytearray(_CRC.size)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _require_size(descriptor, layout)
        _read_all(descriptor, [memoryview(header), payload.data, memoryview(crc)])
    finally:
        os.close(descriptor)
    if bytes(header) != _header(layout, block):
        found = _parse(header, layout)
        raise CorruptBlock("other tokens" if found.key == block.key else "another block")
    if _CRC.unpack(crc)[0] != zlib.crc32(payload.data):
        raise CorruptBlock("the payload's checksum is wrong")
    return payload


def packed(layout: StoredLayout, block: Block, payload: Payload) -> bytes:
    """What the file of a block would contain."""
    crc = _CRC.pack(zlib.crc32(payload.data))
    return b"".join((_header(layout, block), payload.data, crc))


def unpacked(data: bytes, layout: StoredLayout, block: Block) -> Payload:
    """The payload of just this block. Raises CorruptBlock."""
    if len(data) != file_bytes(layout):
        raise CorruptBlock(f"{len(data)} bytes in place of {file_bytes(layout)}")
    header, end = data[:_HEADER_BYTES], len(data) - _CRC.size
    if header != _header(layout, block):
        found = _parse(bytearray(header), layout)
        raise CorruptBlock("other tokens" if found.key == block.key else "another block")
    payload = np.frombuffer(data, np.uint8, layout.block_bytes, _HEADER_BYTES)
    if _CRC.unpack_from(data, end)[0] != zlib.crc32(payload.data):
        raise CorruptBlock("the payload's checksum is wrong")
    return payload


def read_header(path: Path, layout: StoredLayout) -> Block:
    """Which block a file holds, its payload unchecked. Raises CorruptBlock or OSError."""
    header = bytearray(_HEADER_BYTES)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _require_size(descriptor, layout)
        _read_all(descriptor, [memoryview(header)])
    finally:
        os.close(descriptor)
    return _parse(header, layout)


def will_read(path: Path) -> None:
    """Let the system begin to read a file that will be wanted, where it can be told so."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)


def _header(layout: StoredLayout, block: Block) -> bytes:
    parent = block.parent or _NO_PARENT
    fields = _FIELDS.pack(
        _MAGIC, _VERSION, BLOCK_TOKENS, layout.digest, block.key, parent, layout.block_bytes
    )
    checked = fields + block.token_ids
    return checked + _CRC.pack(zlib.crc32(checked))


def _parse(header: bytearray, layout: StoredLayout) -> Block:
    """Raises CorruptBlock unless it is a header of this layout."""
    checked = bytes(header[: -_CRC.size])
    magic, version, num_tokens, digest, key, parent, size = _FIELDS.unpack_from(checked)
    if magic != _MAGIC or version != _VERSION:
        raise CorruptBlock("not a KV block of this version")
    if _CRC.unpack(header[-_CRC.size :])[0] != zlib.crc32(checked):
        raise CorruptBlock("the header's checksum is wrong")
    if (num_tokens, digest, size) != (BLOCK_TOKENS, layout.digest, layout.block_bytes):
        raise CorruptBlock("of another layout")
    return Block(key, None if parent == _NO_PARENT else parent, checked[_FIELDS.size :])


def _require_size(descriptor: int, layout: StoredLayout) -> None:
    size = os.fstat(descriptor).st_size
    if size != file_bytes(layout):
        raise CorruptBlock(f"{size} bytes in place of {file_bytes(layout)}")


def _write_all(descriptor: int, parts: Sequence[memoryview]) -> None:
    rest = list(parts)
    while rest:
        num_written = os.writev(descriptor, rest)
        rest = _behind(rest, num_written)


def _read_all(descriptor: int, parts: Sequence[memoryview]) -> None:
    """Fill the parts. Raises CorruptBlock where the file is shorter."""
    rest = list(parts)
    while rest:
        num_read = os.readv(descriptor, rest)
        if num_read == 0:
            raise CorruptBlock("the file ends early")
        rest = _behind(rest, num_read)


def _behind(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What of the views lies behind the first `num_bytes`."""
    for index, view in enumerate(views):
        if num_bytes < len(view):
            return [view[num_bytes:], *views[index + 1 :]]
        num_bytes -= len(view)
    return []
