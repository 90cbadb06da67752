"""`sampling_params` of `/generate`, under SGLang's names."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ....errors import InvalidRequest
from ....frontend.protocol.constraint import Constraint
from ....frontend.protocol.ir import MAX_SAMPLES, GenParams, logit_bias_pairs
from ...protocol.items import Entries, Items
from ..openai.constraint_fields import ConstraintFields

_FIXED = {  # what these may be: the only thing they are here
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "no_stop_trim": False,
    "custom_params": None,
    "stream_interval": 1,
}


class SamplingObject(BaseModel):
    """Of one prompt. Ranges are checked by the runtime, whose errors name the field."""

    model_config = ConfigDict(extra="forbid", strict=True)

    max_new_tokens: int | None = Field(default=None, ge=1)
    min_new_tokens: int | None = Field(default=None, ge=0)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Entries[str, float] | None = None
    seed: int | None = None
    sampling_seed: int | None = None
    n: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    stop: str | Items[str] | None = None
    stop_token_ids: Items[int] | None = None
    stop_regex: str | Items[str] | None = None
    ignore_eos: bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | dict[str, Any] | bool | None = None
    structural_tag: str | dict[str, Any] | None = None
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
        for field, only in _FIXED.items():
            if getattr(params, field) not in (None, only):
                value = getattr(params, field)
                raise InvalidRequest.of(f"{name}.{field}", value, f"{only!r}, or left out")
        return params

    @property
    def constraint_field(self) -> str | None:
        """The field that says what the output must be."""
        return self._constraint_fields().constraint_field

    def gen_params(
        self, *, logprobs: int | None, logprob_start: int | None, priority: int | None
    ) -> GenParams:
        """As the program's gen takes it. Raises InvalidRequest."""
        return GenParams(
            max_tokens=self.max_new_tokens,
            min_tokens=self.min_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=None if self.top_k == -1 else self.top_k,
            min_p=self.min_p,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=None if self.logit_bias is None else logit_bias_pairs(self.logit_bias),
            seed=self.sampling_seed if self.seed is None else self.seed,
            stop=_strings(self.stop),
            stop_token_ids=None if self.stop_token_ids is None else tuple(self.stop_token_ids),
            stop_regex=_strings(self.stop_regex),
            ignore_eos=self.ignore_eos,
            constraint=self._constraint(),
            logprobs=logprobs,
            logprob_start=logprob_start,
            priority=priority,
        )

    def _constraint(self) -> Constraint | None:
        return self._constraint_fields().constraint()

    def _constraint_fields(self) -> ConstraintFields:
        return ConstraintFields(
            regex=self.regex,
            ebnf=self.ebnf,
            json_schema=self.json_schema,
            structural_tag=self.structural_tag,
        )


def _strings(given: str | list[str] | None) -> tuple[str, ...] | None:
    if given is None:
        return None
    return (given,) if isinstance(given, str) else tuple(given)
