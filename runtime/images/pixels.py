"""Images' bytes to patches, as transformers' Qwen2VLImageProcessor makes them with Pillow.

The one file that imports Pillow and needs the extra `vision`. Bytes are hostile until they are
decoded: their size is read and judged before their pixels are.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from ...errors import InvalidRequest
from .processor_config import ProcessorConfig
from .sizes import resized

try:
    import PIL.Image
    import PIL.ImageOps
except ImportError:  # pragma: no cover - the extra is not installed
    HAS_PILLOW = False
else:
    HAS_PILLOW = True

FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP")
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)  # of EXIF: those are turned by a quarter
_BAND_PIXELS = 1 << 20  # some 10 ms; guess
_ALLOWED = "a PNG, JPEG, GIF, WebP or BMP file that is whole"


def resized_pixels(data: bytes, config: ProcessorConfig, max_pixels: int) -> npt.NDArray[np.uint8]:
    """[height, width, 3]: the first frame, upright, on white where it is transparent, in the size
    that is cut into patches. `max_pixels`: before it is resized. Raises InvalidRequest."""
    image = _opened(data, max_pixels)
    height, width = resized(image.height, image.width, config)
    return np.asarray(image.resize((width, height), resample=PIL.Image.Resampling.BICUBIC))


def patches_of(pixels: npt.NDArray[np.uint8], config: ProcessorConfig) -> npt.NDArray[np.float32]:
    """[height, width, 3] -> [N, patch_dim]; the patches of a token stand together."""
    scaled = (pixels.astype(np.float64) * (1 / 255)).astype(np.float32)
    mean, std = (np.array(each, dtype=np.float32) for each in (config.mean, config.std))
    return _cut((scaled - mean) / std, config)


def _cut(pixels: npt.NDArray[np.float32], config: ProcessorConfig) -> npt.NDArray[np.float32]:
    """[height, width, 3] -> [N, 3 * frames * patch_size**2]"""
    height, width, _ = pixels.shape
    merge, patch, frames = config.merge_size, config.patch_size, config.temporal_patch_size
    rows, columns = height // (patch * merge), width // (patch * merge)
    split = pixels.reshape(rows, merge, patch, columns, merge, patch, 3)
    ordered = split.transpose(0, 3, 1, 4, 6, 2, 5)  # token, patch within it, channel, pixel
    repeated = np.repeat(ordered[:, :, :, :, :, None], frames, axis=5)
    return np.ascontiguousarray(repeated.reshape(rows * columns * merge**2, -1))


def upright_size(data: bytes) -> tuple[int, int]:
    """Height and width before it is resized; only its head is read. Raises InvalidRequest."""
    with _refusing(data, None) as image:
        is_turned = image.getexif().get(_ORIENTATION) in _TURNED
        return (image.width, image.height) if is_turned else (image.height, image.width)


def _opened(data: bytes, max_pixels: int) -> PIL.Image.Image:
    """The decoded image in RGB."""
    with _refusing(data, max_pixels) as image:
        _require_pixels(image, max_pixels)
        PIL.ImageOps.exif_transpose(image, in_place=True)
        return _in_rgb(image)


@contextmanager
def _refusing(data: bytes, max_pixels: int | None) -> Iterator[PIL.Image.Image]:
    """An image whose head is read. Raises InvalidRequest for whatever a decoder finds wrong with
    it within the block. `max_pixels`: to be named where there are far more."""
    if not HAS_PILLOW:
        raise InvalidRequest(
            "image: no images can be read: pip install 'stemma-lm[vision]'", "image"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of metadata, and of sizes that are judged here
            yield PIL.Image.open(io.BytesIO(data), formats=FORMATS)
    except InvalidRequest:
        raise
    except PIL.Image.DecompressionBombError:
        raise _too_large("far more", max_pixels) from None
    except Exception as error:  # a decoder may raise anything over hostile bytes
        shown = f"{len(data)} bytes ({type(error).__name__})"
        raise InvalidRequest.of("image", shown, _ALLOWED) from None


def _require_pixels(image: PIL.Image.Image, max_pixels: int) -> None:
    if image.width * image.height > max_pixels:
        raise _too_large(f"{image.width} x {image.height}", max_pixels)


def _too_large(shown: str, max_pixels: int | None) -> InvalidRequest:
    allowed = f"at most {max_pixels or PIL.Image.MAX_IMAGE_PIXELS} pixels (max_image_pixels)"
    return InvalidRequest.of("image", f"{shown} pixels", allowed)


def _in_rgb(image: PIL.Image.Image) -> PIL.Image.Image:
    """On white where it is transparent. Band by band: Pillow converts without giving up the
    interpreter's lock, and each step is another copy."""
    image.load()
    rgb = PIL.Image.new("RGB", image.size)
    num_rows = max(1, _BAND_PIXELS // image.width)
    for top in range(0, image.height, num_rows):
        bottom = min(top + num_rows, image.height)
        rgb.paste(_band_in_rgb(image.crop((0, top, image.width, bottom))), (0, top))
    return rgb


def _band_in_rgb(image: PIL.Image.Image) -> PIL.Image.Image:
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = PIL.Image.new("RGBA", image.size, (255, 255, 255, 255))
    return PIL.Image.alpha_composite(white, image).convert("RGB")
