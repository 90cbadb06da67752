"""Prompts in the format of SGLang's requests: `text` or `input_ids`, one or several."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from ....errors import InvalidRequest
from ...protocol.known_fields import Items
from ...protocol.task import MAX_PROMPTS, Prompt


class PromptFields(BaseModel):
    """Mixed into bodies."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    text: str | Items[str] | None = None
    input_ids: Items[int] | Items[Items[int]] | None = None
    cache_salt: str | None = Field(default=None, max_length=1024)

    @property
    def is_batch(self) -> bool:
        """Whether the response is a list."""
        if isinstance(self.text, list):
            return True
        return bool(self.input_ids) and isinstance(self.input_ids[0], list)  # type: ignore[index]

    def prompts(self) -> list[Prompt]:
        """The prompts, one by one. Raises InvalidRequest."""
        if (self.text is None) == (self.input_ids is None):
            raise InvalidRequest("one of text and input_ids is needed", "text")
        field, given = ("input_ids", self.input_ids) if self.text is None else ("text", self.text)
        prompts = list(given or []) if self.is_batch else [given]
        if not 1 <= len(prompts) <= MAX_PROMPTS or not all(prompts):
            allowed = f"1 to {MAX_PROMPTS} prompts, none of them empty"
            raise InvalidRequest.of(field, f"{len(prompts)} prompts", allowed)
        return prompts  # type: ignore[return-value]
