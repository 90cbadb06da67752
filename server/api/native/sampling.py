"""`sampling_params` of `/generate`, under SGLang's names."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field, ValidationError

from ....errors import InvalidRequest
from ....frontend.protocol.ir import GenParams
from ....frontend.protocol.kv_policy import KVPolicy
from ....frontend.protocol.native_answer import FIXED_SAMPLING
from ..openai.constraint_fields import GrammarFields
from ..openai.sampler_fields import SamplerFields


class SamplingObject(SamplerFields, GrammarFields):
    """Of one prompt. Ranges are checked by the runtime, whose errors name the field."""

    model_config = ConfigDict(extra="forbid", strict=True)

    max_new_tokens: int | None = Field(default=None, ge=0)
    min_new_tokens: int | None = Field(default=None, ge=0)
    sampling_seed: int | None = None
    prediction: str | None = None  # ours
    kv_policy: dict[str, Any] | None = None  # ours
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    custom_params: dict[str, Any] | None = None
    stream_interval: int | None = None

    @classmethod
    def read(cls, given: dict[str, Any], name: str) -> SamplingObject:
        """`name`: what the client calls it. Raises InvalidRequest that names the field."""
        unknown = next((field for field in given if field not in cls.model_fields), None)
        if unknown is not None:  # pydantic would word an error for each
            field = f"{name}.{unknown[:64]}"
            raise InvalidRequest(f"{field}: there is no such field", field)
        try:
            params = cls.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join([name, *map(str, first["loc"])])
            raise InvalidRequest(f"{field}: {first['msg']}", field) from error
        for field, only in FIXED_SAMPLING.items():
            if getattr(params, field) not in (None, only):
                value = getattr(params, field)
                raise InvalidRequest.of(f"{name}.{field}", value, f"{only!r}, or left out")
        return params

    def gen_params(
        self, *, logprobs: int | None, logprob_start: int | None, priority: int | None
    ) -> GenParams:
        """As the program's gen takes it. Raises InvalidRequest."""
        return self.params_with(
            max_tokens=self.max_new_tokens,
            min_tokens=self.min_new_tokens,
            top_k=self.top_k,
            seed=self.sampling_seed if self.seed is None else self.seed,
            constraint=self.constraint(),
            logprobs=logprobs,
            logprob_start=logprob_start,
            priority=priority,
            prediction=self.prediction,
            kv_policy=None if self.kv_policy is None else KVPolicy.from_wire(self.kv_policy),
        )
