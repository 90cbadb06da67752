"""An image of a prompt as the URL by which OpenAI's API takes it."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

from ...errors import InvalidProgram

MAX_IMAGE_BYTES = 20 * 1024 * 1024  # OpenAI's bound of old; larger ones are scaled down anyway
MAX_ENGINE_URL_CHARS = 15 * 1024 * 1024  # a frame of an engine's wire holds 16 MiB
_SIGNATURES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"RIFF", "image/webp"),
    (b"BM", "image/bmp"),
)
_ALLOWED = "a path, an http(s) or data URL, bytes, an open file, or an image of Pillow's"


def image_url(source: Any) -> str:
    """A URL as it is, everything else as a data URL. Raises InvalidProgram."""
    if isinstance(source, str) and source.startswith(("http://", "https://", "data:image/")):
        return source
    data = _bytes_of(source)
    if len(data) > MAX_IMAGE_BYTES:
        allowed = f"at most {MAX_IMAGE_BYTES} bytes"
        raise InvalidProgram.of("image", f"{len(data)} bytes", allowed)
    kind = next((kind for begin, kind in _SIGNATURES if data.startswith(begin)), None)
    if kind is None:
        raise InvalidProgram.of(
            "image", data[:16], "the bytes of a PNG, JPEG, GIF, WebP or BMP file"
        )
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _bytes_of(source: Any) -> bytes:
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if isinstance(source, str | Path):
        try:
            return Path(source).expanduser().read_bytes()
        except (OSError, ValueError) as error:
            raise InvalidProgram(f"image: {str(source)[:200]!r} cannot be read: {error}") from error
    if hasattr(source, "save"):  # Pillow's
        return _png_of(source)
    if hasattr(source, "read") and isinstance(data := source.read(), bytes):
        return data
    raise InvalidProgram.of("image", source, _ALLOWED)


def _png_of(image: Any) -> bytes:
    """Of an image of Pillow's; in RGB where a PNG has no such pixels, as of CMYK."""
    written = io.BytesIO()
    try:
        image.save(written, format="PNG")
    except OSError:
        written = io.BytesIO()
        image.convert("RGB").save(written, format="PNG")
    return written.getvalue()
