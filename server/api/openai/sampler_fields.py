"""Fields of a sampler that `/generate` and OpenAI's completion endpoints call by the same names.

Values are checked where they are used, by the runtime, whose errors name the field; here only types
are.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from ....frontend.protocol.ir import GenParams, logit_bias_of, texts_of
from ....frontend.protocol.numbers import MAX_SAMPLES
from ...protocol.known_fields import Entries, FewItems


class SamplerFields(BaseModel):
    """Mixed into the bodies of these endpoints."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Entries[str, float] | None = None
    seed: int | None = None
    n: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    stop: str | FewItems[str] | None = None
    stop_token_ids: FewItems[int] | None = None
    stop_regex: str | FewItems[str] | None = None
    ignore_eos: bool | None = None

    def params_with(self, *, seed: int | None, top_k: int | None, **others: Any) -> GenParams:
        """As the program's gen takes them, without `n`, which is the task's. Raises
        InvalidRequest."""
        return GenParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=None if top_k == -1 else top_k,
            min_p=self.min_p,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=logit_bias_of(self.logit_bias),
            seed=seed,
            stop=texts_of(self.stop),
            stop_token_ids=None if self.stop_token_ids is None else tuple(self.stop_token_ids),
            stop_regex=texts_of(self.stop_regex),
            ignore_eos=self.ignore_eos,
            **others,
        )
