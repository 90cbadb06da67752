"""The content of a chat message: text, or a list of parts; only text parts are supported."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from ....errors import InvalidRequest


class ContentPart(BaseModel):
    """A part of a message; a model's earlier refusal is text that it wrote."""

    model_config = ConfigDict(extra="allow")  # an image: refused by its type

    type: str
    text: str | None = None
    refusal: str | None = None


def texts_of(content: str | Sequence[ContentPart], field: str) -> list[str]:
    """The text of each part; `field`: path of the content. Raises InvalidRequest naming the
    part."""
    if isinstance(content, str):
        return [content]
    return [_text_of_part(part, f"{field}.{i}") for i, part in enumerate(content)]


def _text_of_part(part: ContentPart, field: str) -> str:
    texts = {"text": part.text, "refusal": part.refusal}
    if part.type not in texts:
        raise InvalidRequest.of(f"{field}.type", part.type, 'text: the model reads "text" only')
    text = texts[part.type]
    if text is None:
        raise InvalidRequest(f"{field}.{part.type}: missing", field)
    return text
