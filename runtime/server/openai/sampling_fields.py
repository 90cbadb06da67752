"""Fields of a request that both of OpenAI's completion endpoints have.

Values are checked where they are used, by the runtime, whose errors name the field; here only types
are.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from ....errors import InvalidRequest
from ....frontend.ir import MAX_SAMPLES, GenParams, logit_bias_pairs
from ..generation.hint_envelope import HintEnvelope
from .constraint_fields import ConstraintFields
from .reply import Wanted


class StreamOptions(BaseModel):
    """What a stream carries besides text."""

    include_usage: bool = False


class SamplingFields(ConstraintFields):
    """Fields that both endpoints share; `cache_salt`, `priority`, `top_k`, `min_p`,
    `repetition_penalty`, `min_tokens`, `stop_token_ids` and `ignore_eos` are extras that vLLM has
    too; `deadline_s`, seconds from now, is ours."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    n: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    kv_hints: HintEnvelope | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool = False
    cache_salt: str | None = Field(default=None, max_length=1024)
    priority: int | None = None
    deadline_s: float | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def wanted(self) -> Wanted:
        """What the answer is to have."""
        options = self.stream_options or StreamOptions()
        return Wanted(
            n=self.n,
            includes_usage=options.include_usage,
            has_token_ids=self.return_token_ids,
            has_logprobs=self.has_logprobs,
        )

    @property
    def has_logprobs(self) -> bool:
        """Whether the answer has log probabilities."""
        return False

    def gen_params(self, max_tokens: int, logprobs: int | None) -> GenParams:
        if self.best_of not in (None, self.n):
            raise InvalidRequest.of("best_of", self.best_of, "left out, or the same as n")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        return GenParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=None if self.top_k == -1 else self.top_k,
            min_p=self.min_p,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=None if self.logit_bias is None else logit_bias_pairs(self.logit_bias),
            min_tokens=self.min_tokens,
            seed=self.seed,
            stop=None if stop is None else tuple(stop),
            stop_token_ids=None if self.stop_token_ids is None else tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            priority=self.priority,
            deadline_s=self.deadline_s,
            constraint=self.constraint(),
            jump_forward=self.jump_forward,
        )
