"""`prediction`: the output that a client expects, as OpenAI's API has it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from ...protocol.known_fields import FewItems


class PredictedPart(BaseModel):
    """A part of its content."""

    type: Literal["text"]
    text: str


class Prediction(BaseModel):
    """An output that is the same comes sooner; what is made never depends on it."""

    type: Literal["content"]
    content: str | FewItems[PredictedPart]

    @property
    def text(self) -> str:
        """All of it."""
        content = self.content
        return content if isinstance(content, str) else "".join(part.text for part in content)
