"""Images' bytes to patches: transformers' own, and hostile bytes as errors that say why."""

from __future__ import annotations

import io
import random
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_models import MODELS, make_image_model, png
from PIL import Image as Pillow

from stemma.errors import InvalidRequest
from stemma.runtime.images import pixels as module
from stemma.runtime.images.pixels import patches_of, resized_pixels
from stemma.runtime.images.processor_config import ProcessorConfig
from stemma.runtime.images.sizes import resized

MAX_PIXELS = 1_000_000
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
QWEN2_5 = ProcessorConfig(14, 2, 2, 56 * 56, 28 * 28 * 1280, MEAN, STD)
QWEN3 = ProcessorConfig(16, 2, 2, 65_536, 16_777_216, (0.5,) * 3, (0.5,) * 3)


def encoded(image: Pillow.Image, kind: str = "PNG", **options: Any) -> bytes:
    written = io.BytesIO()
    image.save(written, format=kind, **options)
    return written.getvalue()


def patches(data: bytes, config: ProcessorConfig, max_pixels: int) -> np.ndarray[Any, Any]:
    return patches_of(resized_pixels(data, config, max_pixels), config)


def drawn(height: int, width: int, mode: str, seed: int = 0) -> Pillow.Image:
    channels = {"RGB": 3, "RGBA": 4, "L": 1, "LA": 2, "CMYK": 4}[mode]
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)
    return Pillow.fromarray(pixels.squeeze(-1) if channels == 1 else pixels, mode)


@pytest.mark.parametrize("config", [QWEN2_5, QWEN3], ids=["qwen2.5", "qwen3"])
@pytest.mark.parametrize(
    ("height", "width", "mode", "kind"),
    [
        (1, 1, "RGB", "PNG"),
        (30, 1500, "RGB", "PNG"),
        (333, 217, "RGBA", "PNG"),
        (64, 91, "L", "PNG"),
        (50, 40, "LA", "PNG"),
        (120, 80, "CMYK", "JPEG"),
        (77, 53, "RGB", "WEBP"),
        (97, 55, "RGB", "BMP"),
    ],
)
def test_patches_are_those_of_transformers(
    config: ProcessorConfig, height: int, width: int, mode: str, kind: str
) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    data = encoded(drawn(height, width, mode), kind)
    theirs = Qwen2VLImageProcessorPil(
        size={"shortest_edge": config.min_pixels, "longest_edge": config.max_pixels},
        patch_size=config.patch_size,
        image_mean=list(config.mean),
        image_std=list(config.std),
    )(Pillow.open(io.BytesIO(data)), return_tensors="np")
    found = patches(data, config, MAX_PIXELS)
    size = resized_pixels(data, config, MAX_PIXELS).shape[:2]
    grid = tuple(side // config.patch_size for side in size)
    assert grid == tuple(theirs["image_grid_thw"][0][1:])
    np.testing.assert_allclose(found, theirs["pixel_values"], rtol=0, atol=1e-6)


def test_a_large_image_is_shrunk_to_the_models_bound() -> None:
    height, width = resized(4000, 3000, QWEN2_5)
    assert height * width <= QWEN2_5.max_pixels and not height % 28 and not width % 28


def test_an_image_is_turned_upright_and_its_first_frame_is_read() -> None:
    flat = drawn(40, 80, "RGB")
    exif = Pillow.Exif()
    exif[0x0112] = 6  # by a quarter
    turned = encoded(flat, exif=exif)
    upright = encoded(flat.rotate(-90, expand=True))
    assert np.array_equal(
        patches(turned, QWEN2_5, MAX_PIXELS), patches(upright, QWEN2_5, MAX_PIXELS)
    )
    frames = [drawn(30, 30, "RGB", seed).quantize(16) for seed in range(3)]
    moving = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    still = encoded(frames[0], "GIF")
    assert np.array_equal(patches(moving, QWEN2_5, MAX_PIXELS), patches(still, QWEN2_5, MAX_PIXELS))


def _png_of(width: int, height: int, data: bytes = b"", depth: int = 8, colour: int = 2) -> bytes:
    """A PNG with such a head, whatever its data are."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        crc = zlib.crc32(kind + body)
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", crc)

    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def hostile() -> list[bytes]:
    """A hundred files that are no images, not whole, or too large."""
    rng = random.Random(7)
    whole = [png(40, 60), encoded(drawn(40, 60, "RGB"), "JPEG"), encoded(drawn(9, 9, "L"), "GIF"),
             encoded(drawn(40, 60, "RGBA"), "WEBP", lossless=True)]  # fmt: skip
    files = [
        b"", b"\0", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%PDF-1.7", b"II*\0" + b"\0" * 9,
        b"\x89PNG\r\n\x1a\n", b"GIF89a", b"\xff\xd8", b"RIFF\0\0\0\0WEBPVP8", b"BM" + b"\xff" * 9,
        _png_of(60_000, 60_000), _png_of(2**31 - 1, 1), _png_of(0, 5), _png_of(5, 0),
        _png_of(1001, 1000), _png_of(3, 3), _png_of(3, 3, b"\xff" * 40), _png_of(8, 8, depth=99),
        _png_of(8, 8, colour=5), encoded(Pillow.new("1", (2000, 2000))), png(2, 401), png(500, 2),
        b"MZ" + b"\0" * 500, bytes(rng.randbytes(4000)), b"#!/bin/sh\nexec cat /etc/passwd\n",
    ]  # fmt: skip
    while len(files) < 100:
        data = whole[len(files) % 4]
        end = rng.randrange(1, len(data) * 3 // 4)
        files.append(data[:end])
    return files


@pytest.mark.parametrize("index", range(100))
def test_hostile_bytes_are_refused(index: int) -> None:
    """GIFs and JPEGs that end early have a beginning that Pillow would make up the rest of."""
    data = hostile()[index]
    with pytest.raises(InvalidRequest) as caught:
        patches(data, QWEN2_5, MAX_PIXELS)
    assert caught.value.field == "image" and len(str(caught.value)) < 200


@pytest.mark.parametrize("seed", range(20))
def test_damaged_bytes_are_an_image_or_refused(seed: int) -> None:
    rng = random.Random(seed)
    data = bytearray(encoded(drawn(40, 60, "RGB", seed), ("PNG", "JPEG", "GIF", "WEBP")[seed % 4]))
    for _ in range(10):
        data[rng.randrange(len(data))] = rng.randrange(256)
    try:
        found = patches(bytes(data), QWEN2_5, MAX_PIXELS)
    except InvalidRequest:
        return
    assert np.isfinite(found).all()


@pytest.mark.parametrize("mode", ["I;16", "F", "P", "1", "LA"])
def test_other_modes_are_read_as_pillow_does(mode: str) -> None:
    if mode == "I;16":
        image = Pillow.fromarray(np.arange(900, dtype=np.uint16).reshape(30, 30))
        data = encoded(image)
    else:
        made = drawn(30, 30, "L").convert(mode)
        data = encoded(made, "TIFF" if mode == "F" else "PNG")
    if mode == "F":  # TIFF is not among the formats
        with pytest.raises(InvalidRequest):
            patches(data, QWEN2_5, MAX_PIXELS)
        return
    assert patches(data, QWEN2_5, MAX_PIXELS).shape[1] == 3 * 2 * 14 * 14


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "CMYK", "I;16", "L"])
def test_a_large_image_is_converted_in_bands(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others wait while Pillow converts; and no copy of the whole image is made."""
    if mode == "I;16":
        image = Pillow.fromarray(np.arange(77 * 53, dtype=np.uint16).reshape(77, 53) * 13)
    elif mode == "P":
        image = drawn(77, 53, "RGB").quantize(20)
    else:
        image = drawn(77, 53, mode)
    options = {"transparency": 3} if mode == "P" else {}
    data = encoded(image, "JPEG" if mode == "CMYK" else "PNG", **options)
    whole = resized_pixels(data, QWEN2_5, MAX_PIXELS)
    converted = []
    convert = Pillow.Image.convert

    def noted(self: Pillow.Image, *args: Any, **kwargs: Any) -> Pillow.Image:
        converted.append(self.width * self.height)
        return convert(self, *args, **kwargs)

    monkeypatch.setattr(module, "_BAND_PIXELS", 530)
    monkeypatch.setattr(Pillow.Image, "convert", noted)
    assert np.array_equal(resized_pixels(data, QWEN2_5, MAX_PIXELS), whole)
    assert max(converted) <= 530 and sum(converted) >= 77 * 53


def test_the_processor_of_a_checkpoint_is_read(tmp_path: Path) -> None:
    from stemma.runtime.models.model_config import read_model_config

    folder = make_image_model(tmp_path, "qwen3-vl")
    vision = read_model_config(folder).vision
    assert vision is not None
    config = ProcessorConfig.from_folder(folder, vision)
    assert config.patch_size == MODELS["qwen3-vl"].vision["patch_size"]
    assert config.factor == 8 and config.max_pixels == 64 * 48
