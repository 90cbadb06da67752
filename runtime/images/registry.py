"""The images that programs have sent: one object, and one token id, for equal bytes.

Ids are given in turn and never again, so no two images share one. An image that nobody has any more
keeps its id: whoever sends it again meets its KV in the cache. The pixels of those that were used
last are kept, decoded and resized, so that encoding them need not wait for that. Thread-safe.
"""

from __future__ import annotations

import base64
import binascii
import threading
from array import array
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from ...errors import InvalidRequest
from ..checkpoint.config.vision_config import VisionConfig
from .image import Image
from .pixels import patches_of, resized_pixels
from .processor_config import ProcessorConfig

MAX_KNOWN = 1 << 16  # images with an id
MAX_PIXEL_BYTES = 256 << 20
_FIRST, _LAST = -1, -(1 << 31)  # token ids
_DATA = "data:"
_HOW = "of images by path, bytes or file the client makes one"


Pixels = npt.NDArray[np.uint8]  # [height, width, 3]


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Of what a program may send."""

    max_images: int  # in one prompt
    max_pixels: int  # of an image before it is resized


class _Known(NamedTuple):
    token_id: int
    grid: tuple[int, int]


class ImageRegistry:
    """Owns the ids of images. Invariant: an id stands for the bytes of one image, for ever."""

    def __init__(self, processor: ProcessorConfig, limits: ImageLimits) -> None:
        self.processor = processor
        self.limits = limits
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._live: WeakValueDictionary[int, Image] = WeakValueDictionary()
        self._pixels: OrderedDict[int, Pixels] = OrderedDict()  # least recently used first
        self._pixel_bytes = 0
        self._next_id = _FIRST
        self._lock = threading.Lock()

    @classmethod
    def of(cls, folder: Path, vision: VisionConfig, limits: ImageLimits) -> ImageRegistry:
        """Raises ModelLoadError."""
        return cls(ProcessorConfig.from_folder(folder, vision), limits)

    def image(self, url: str, namespace: Hashable = "") -> Image:
        """The image of a data URL; may take long. Where namespaces differ, so do ids. Raises
        InvalidRequest."""
        data = bytes_of(url)
        digest = blake2b(repr(namespace).encode() + b"\0" + data, digest_size=32).digest()
        known = self._find(digest)
        if known is None or known.token_id not in self._pixels:
            pixels = resized_pixels(data, self.processor, self.limits.max_pixels)
            known = self._give_id(digest, pixels)
        with self._lock:
            image = self._live.get(known.token_id)
            if image is None:
                read = partial(self._patches, known.token_id)
                image = Image(known.token_id, known.grid, self.processor.merge_size, data, read)
                self._live[known.token_id] = image
            return image

    def by_id(self, token_id: int) -> Image:
        """An image that somebody has."""
        return self._live[token_id]

    def _find(self, digest: bytes) -> _Known | None:
        with self._lock:
            known = self._known.get(digest)
            if known is not None:
                self._known.move_to_end(digest)
            return known

    def _give_id(self, digest: bytes, pixels: Pixels) -> _Known:
        """Keeps the pixels, too."""
        patch = self.processor.patch_size
        grid = pixels.shape[0] // patch, pixels.shape[1] // patch
        with self._lock:
            known = self._known.get(digest)  # it may have one
            if known is None:
                if self._next_id < _LAST:
                    raise InvalidRequest("image: this engine has seen too many images: restart it")
                known = self._known[digest] = _Known(self._next_id, grid)
                self._next_id -= 1
                if len(self._known) > MAX_KNOWN:
                    self._known.popitem(last=False)
            if known.token_id not in self._pixels:
                self._pixels[known.token_id] = pixels
                self._pixel_bytes += pixels.nbytes
            while self._pixel_bytes > MAX_PIXEL_BYTES and len(self._pixels) > 1:
                self._pixel_bytes -= self._pixels.popitem(last=False)[1].nbytes
            return known

    def _patches(self, token_id: int, data: bytes) -> npt.NDArray[np.float32]:
        with self._lock:
            pixels = self._pixels.get(token_id)
            if pixels is not None:
                self._pixels.move_to_end(token_id)
        if pixels is None:  # it has waited for long
            pixels = resized_pixels(data, self.processor, self.limits.max_pixels)
        return patches_of(pixels, self.processor)


def bytes_of(url: str) -> bytes:
    """Of a data URL: its base64 may be wrapped into lines, percent-encoded or without its padding.
    Raises InvalidRequest."""
    head, found, body = url.partition(",")
    head = head.lower()
    if not head.startswith(_DATA):
        shown = url[:100]
        raise InvalidRequest.of("image", shown, f"a data URL: {_HOW}; the engine fetches nothing")
    if not found or not head.endswith(";base64"):
        raise InvalidRequest.of(
            "image", url[:50], "a data URL in base64 (data:image/png;base64,...)"
        )
    try:
        return _decoded(body)
    except (binascii.Error, ValueError):
        try:
            return _decoded("".join(unquote(body).split()))
        except (binascii.Error, ValueError):
            allowed = "base64 that is whole, of A-Z, a-z, 0-9, + and /"
            raise InvalidRequest.of("image", f"{body[:20]}...", allowed) from None


def _decoded(body: str) -> bytes:
    """Raises ValueError."""
    return base64.b64decode(body + "=" * (-len(body) % 4), validate=True)


def image_ids(image: Image) -> array[int]:
    """The token ids that stand for it."""
    return array("i", [image.token_id]) * image.num_tokens
