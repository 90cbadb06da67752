"""Images of prompts: sent to endpoints that read them, refused by models that read text."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from openai_stand_in import standing_in
from PIL import Image as Pillow

import stemma as st
from stemma.frontend.dsl.images import MAX_IMAGE_BYTES, image_url

PNG = b"\x89PNG\r\n\x1a\n" + bytes(8)
DATA_URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"


class Drawn:
    """As Pillow's images are written."""

    def save(self, file: io.BytesIO, format: str) -> None:
        assert format == "PNG"
        file.write(PNG)


@st.function
def look(s: st.ProgramState, source: Any) -> None:
    s += st.user("What is this? " + st.image(source) + " In a word.")
    s += st.assistant(st.gen("a", max_tokens=4))


@pytest.mark.parametrize("kind", ["path", "text", "bytes", "file", "pillow", "data", "url"])
def test_an_image_is_sent_as_a_url_between_the_texts(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "drawn.png"
    path.write_bytes(PNG)
    source = {
        "path": path, "text": str(path), "bytes": PNG, "file": io.BytesIO(PNG), "pillow": Drawn(),
        "data": DATA_URL, "url": "https://example.org/a.png",
    }[kind]  # fmt: skip
    with standing_in() as server:
        backend = st.OpenAI("some", base_url=server.url, api_key="k", is_chat_model=True)
        state = look.run(source=source, backend=backend)
        assert state.messages()[0] == {"role": "user", "content": "What is this?  In a word."}
        (message,) = server.bodies[0]["messages"]
    url = "https://example.org/a.png" if kind == "url" else DATA_URL
    assert message["content"] == [
        {"type": "text", "text": "What is this? "},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": " In a word."},
    ]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("no/such/file.png", "'no/such/file.png' cannot be read"),
        (b"GIF", "the bytes of a PNG, JPEG, GIF, WebP or BMP file"),
        (PNG + bytes(MAX_IMAGE_BYTES), f"at most {MAX_IMAGE_BYTES} bytes"),
        (7, "a path, an http"),
    ],
)
def test_what_is_no_image_is_refused(source: Any, problem: str) -> None:
    with pytest.raises(st.InvalidProgram, match=problem):
        image_url(source)


@pytest.mark.parametrize("mode", ["CMYK", "F", "P", "YCbCr"])
def test_an_image_of_pillows_is_sent_whatever_its_mode(mode: str) -> None:
    image = Pillow.new("RGB", (5, 3), (200, 10, 90)).convert(*(["L"] if mode == "F" else []))
    _, _, body = image_url(image.convert(mode)).partition("base64,")
    assert Pillow.open(io.BytesIO(base64.b64decode(body))).size == (5, 3)


def test_each_format_that_an_engine_reads_is_sent_as_it_is() -> None:
    for kind in ("PNG", "JPEG", "GIF", "WEBP", "BMP"):
        written = io.BytesIO()
        Pillow.new("RGB", (5, 3)).save(written, format=kind)
        head, _, body = image_url(written.getvalue()).partition(";base64,")
        assert head == f"data:image/{kind.lower()}"
        assert base64.b64decode(body) == written.getvalue()


def test_an_image_outside_of_a_message_is_refused() -> None:
    @st.function
    def outside(s: st.ProgramState) -> None:
        s += st.image(PNG) + st.user("Hi") + st.assistant(st.gen("a"))

    with standing_in() as server:
        backend = st.OpenAI("some", base_url=server.url, api_key="k", is_chat_model=True)
        with pytest.raises(st.ProgramError, match="image: only within a message"):
            outside.run(backend=backend)
