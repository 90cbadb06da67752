"""The content of a chat message: text, or a list of parts, which are texts and images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from ....errors import InvalidRequest

_DETAILS = (None, "auto", "low", "high", "original")
IMAGES = ("image_url", "input_image", "image")
ImageField = tuple[str, str]
"""The path by which a client named an image's kind or place in its request, and what it is."""
_ALLOWED = "text, or image_url where the model reads images"


class ContentPart(BaseModel):
    """A part of a message; a model's earlier refusal is text that it wrote. An image is in the
    words of OpenAI's chats or responses, of Anthropic's API, or of LangChain's messages."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    detail: Any = None


class Content(NamedTuple):
    """The text of each part that is one; and the images, each with how many texts are before it."""

    texts: list[str]
    images: list[tuple[int, str]]


def content_of(content: str | Sequence[ContentPart], field: str) -> Content:
    """`field`: path of the content. Raises InvalidRequest naming the part."""
    if isinstance(content, str):
        return Content([content], [])
    texts: list[str] = []
    images: list[tuple[int, str]] = []
    for index, part in enumerate(content):
        if part.type in IMAGES:
            images.append((len(texts), _url_of(part, f"{field}.{index}")))
        else:
            texts.append(_text_of_part(part, f"{field}.{index}"))
    return Content(texts, images)


def image_fields(content: str | Sequence[ContentPart] | None, field: str) -> Iterator[ImageField]:
    """Of the images of a content."""
    if content is None or isinstance(content, str):
        return
    for index, part in enumerate(content):
        if part.type in IMAGES:
            yield f"{field}.{index}.type", part.type


def refuse_images(fields: Iterable[ImageField], why: str | None = None) -> None:
    """`why`: if not for the model's reading text only. Raises InvalidRequest naming the first."""
    for field, value in fields:
        why = why or 'the model reads "text" only'
        raise InvalidRequest.of(field, value, f"text: {why}")


def _text_of_part(part: ContentPart, field: str) -> str:
    texts = {"text": part.text, "refusal": part.refusal}
    if part.type not in texts:
        raise InvalidRequest.of(f"{field}.type", part.type, _ALLOWED)
    text = texts[part.type]
    if text is None:
        raise InvalidRequest(f"{field}.{part.type}: missing", field)
    return text


def _url_of(part: ContentPart, field: str) -> str:
    given, others = part.image_url, part.model_extra or {}
    detail = part.detail
    if isinstance(given, Mapping):
        detail = given.get("detail", detail)
        given = given.get("url")
    elif given is None:
        given = _url_of_source(others.get("source")) or _url_of_source(others)
    if detail not in _DETAILS:
        raise InvalidRequest.of(f"{field}.detail", detail, "auto, low, high or original")
    if not isinstance(given, str) or not given:
        raise InvalidRequest(f"{field}.image_url: an object with a url is missing", field)
    return given


def _url_of_source(source: object) -> str | None:
    """Of data or a URL in others' words."""
    if not isinstance(source, Mapping):
        return None
    data = source.get("data", source.get("base64"))
    kind = source.get("media_type", source.get("mime_type", "image/png"))
    if isinstance(data, str):
        return f"data:{kind};base64,{data}"
    url = source.get("url")
    return url if isinstance(url, str) else None
