"""One id for equal bytes, and never one for two images."""

from __future__ import annotations

import base64
import gc
from array import array
from urllib.parse import quote

import pytest
from image_models import png

from stemma.errors import InvalidRequest
from stemma.runtime.images import registry as module
from stemma.runtime.images.image import Image, spans_of
from stemma.runtime.images.processor_config import ProcessorConfig
from stemma.runtime.images.registry import ImageLimits, ImageRegistry, image_ids

CONFIG = ProcessorConfig(4, 2, 2, 64, 6400, (0.5,) * 3, (0.5,) * 3)


def registry() -> ImageRegistry:
    return ImageRegistry(CONFIG, ImageLimits(max_images=4, max_pixels=10_000))


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def test_equal_bytes_are_one_image_and_others_another() -> None:
    images = registry()
    one, other = images.image(url(png(16, 24, 1))), images.image(url(png(16, 24, 2)))
    assert images.image(url(png(16, 24, 1), "image/jpeg")) is one
    assert one.token_id < 0 and other.token_id < 0 and one.token_id != other.token_id
    assert (one.rows, one.columns, one.num_tokens) == (2, 3, 6)
    assert images.image(url(png(16, 24, 1)), "other namespace").token_id != one.token_id


def test_an_image_that_nobody_has_keeps_its_id_and_is_not_decoded_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images = registry()
    token_id = images.image(url(png(16, 24, 1))).token_id
    gc.collect()
    with pytest.raises(KeyError):
        images.by_id(token_id)
    monkeypatch.setattr(module, "resized_pixels", None)
    image = images.image(url(png(16, 24, 1)))
    assert image.token_id == token_id and images.by_id(token_id) is image
    assert image.patches().shape == (24, 3 * 2 * 16)


def test_pixels_are_bounded_and_read_again_where_they_are_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_PIXEL_BYTES", 16 * 24 * 3)
    images = registry()
    one = images.image(url(png(16, 24, 1)))
    before = one.patches()
    images.image(url(png(16, 24, 2)))
    assert len(images._pixels) == 1 and one.token_id not in images._pixels
    assert (one.patches() == before).all()
    assert images.image(url(png(16, 24, 1))) is one and images._pixel_bytes == 16 * 24 * 3


def test_an_id_is_never_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KNOWN", 2)
    images = registry()
    ids = [images.image(url(png(16, 24, seed))).token_id for seed in (1, 2, 3, 1)]
    assert len(set(ids)) == 4


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("https://example.com/a.png", "the engine fetches nothing"),
        ("file:///etc/passwd", "a data URL"),
        ("data:image/png,plain", "base64"),
        ("data:image/png;base64,@@@", "base64 that is whole"),
        ("data:image/png;base64,AAAAA", "base64 that is whole"),
        (url(png(16, 24)).replace("/", "_").replace("+", "-"), "A-Z, a-z, 0-9, "),
        ("data:image/png;base64,", "a PNG"),
        (url(png(101, 100)), "max_image_pixels"),
        (url(png(2, 402)), "200 times as long"),
    ],
)
def test_what_is_no_image_is_refused(given: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        registry().image(given)


def test_data_urls_are_read_as_clients_write_them() -> None:
    """Wrapped into lines as `base64` does, without padding, percent-encoded, in capitals."""
    images = registry()
    data = png(16, 24, 3) + b"?"  # its base64 has padding, + and /
    plain = url(data)
    head, body = plain.split(",")
    lines = "\r\n".join(body[at : at + 76] for at in range(0, len(body), 76))
    assert body.endswith("=") and "+" in body and "/" in body
    for written in (
        f"{head},{lines}\n",
        plain.rstrip("="),
        f"{head},{quote(body, safe='')}",
        plain.replace("data:image/png;base64", "DATA:image/PNG;charset=utf-8;BASE64"),
    ):
        assert images.image(written) is images.image(plain), written[:60]


def test_spans_say_where_positions_go_on() -> None:
    images = registry()
    wide, small = images.image(url(png(16, 24, 1))), images.image(url(png(8, 8, 2)))
    ids = (
        array("i", [5, 6]) + image_ids(wide) + array("i", [7]) + image_ids(small) + image_ids(wide)
    )
    one, two, three = spans_of(ids, images.by_id)
    assert (one.start, one.end, one.base, one.rope_shift) == (2, 8, 2, -3)
    assert (two.start, two.end, two.base, two.rope_shift) == (9, 10, 6, -3)
    assert (three.start, three.end, three.base, three.rope_shift) == (10, 16, 7, -6)
    assert isinstance(one.image, Image) and spans_of(array("i", [1, 2]), images.by_id) == ()
