"""Fields of a request that both of OpenAI's completion endpoints have.

A field that is null is one that was left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ....errors import MAX_MODEL_NAME_CHARS, InvalidRequest
from ....frontend.protocol.ir import GenParams
from ....frontend.protocol.kv_policy import KVPolicy
from ....frontend.protocol.numbers import MAX_DEADLINE_S, MAX_LOGPROBS
from ...generation.service import Served
from ...protocol.hint_envelope import HintEnvelope
from ...protocol.task import Prompt, Task
from .constraint_fields import ConstraintFields
from .other_fields import OtherFields
from .prediction import Prediction
from .reply import Wanted
from .sampler_fields import SamplerFields

_SEEDS = 2**63  # the runtime's are [0, 2**63)


class StreamOptions(BaseModel):
    """What a stream carries besides text. `include_obfuscation` is OpenAI's padding against those
    who read the sizes of encrypted packets; there is none here."""

    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False
    include_timing: bool = False


class SamplingFields(SamplerFields, ConstraintFields, OtherFields):
    """Fields that both endpoints share. Those that OpenAI does not have: `top_k`, `min_p`,
    `repetition_penalty`, `min_tokens`, `stop_token_ids`, `ignore_eos`, `priority`, `cache_salt`,
    `prompt_logprobs`, `return_token_ids`, `include_stop_str_in_output`, `use_beam_search`,
    `length_penalty` and `early_stopping` are vLLM's, `stop_regex` and `no_stop_trim` SGLang's;
    `deadline_s`, seconds from now, `include_timing` and `kv_policy` are ours."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    kv_hints: HintEnvelope | None = None
    best_of: int | None = None
    min_tokens: int | None = None
    seed: int | None = Field(default=None, ge=-_SEEDS, lt=_SEEDS)
    include_stop_str_in_output: bool = False
    no_stop_trim: bool = False
    priority: int | None = None  # higher runs first
    deadline_s: float | None = Field(default=None, gt=0, le=MAX_DEADLINE_S)
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    return_token_ids: bool = False
    cache_salt: str | None = Field(default=None, max_length=1024)
    lora_path: str | None = Field(default=None, max_length=MAX_MODEL_NAME_CHARS)  # SGLang's
    rid: str | None = Field(default=None, min_length=1, max_length=256)  # SGLang's, see /abort
    include_timing: bool = False
    prediction: Prediction | None = None
    session_id: str | None = Field(default=None, max_length=1024)
    prompt_cache_key: str | None = Field(default=None, max_length=1024)
    stream: bool = False
    stream_options: StreamOptions | None = None
    use_beam_search: bool = False  # vLLM's: `n` hypotheses at a time, and that many choices
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    kv_policy: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value is not None}

    def to_task(
        self,
        prompts: Sequence[Prompt],
        params: GenParams,
        served: Served,
        *,
        tools: str | None = None,
        template_kwargs: str | None = None,
    ) -> Task:
        """What these ask of the engine. Raises InvalidRequest."""
        form = params.constraint
        if self.use_beam_search and form is not None and form.is_lenient:
            allowed = "only with schemas and tools that are `strict`, none that are lenient"
            raise InvalidRequest.of("use_beam_search", True, allowed)
        return Task(
            prompts,
            params,
            n=self.num_drawn,
            stream=self.stream,
            has_token_ids=self.wanted.needs_token_ids,
            tools=tools,
            template_kwargs=template_kwargs,
            hints=self.kv_hints,
            cache_salt=self.cache_salt,
            constraint_field=self.constraint_field,
            words=None if form is None else self.words(form),
            rid=self.rid,
            lora_path=served.lora_path,
            history=self.session_id or self.prompt_cache_key,
        )

    @property
    def wanted(self) -> Wanted:
        """What the answer is to have."""
        options = self.stream_options or StreamOptions()
        return Wanted(
            n=self.n,
            num_drawn=self.num_drawn,
            includes_usage=options.include_usage,
            has_running_usage=options.include_usage and options.continuous_usage_stats,
            has_token_ids=self.return_token_ids,
            num_logprobs=self.num_logprobs,
            num_prompt_logprobs=self.prompt_logprobs,
            has_stop_text=self.include_stop_str_in_output or self.no_stop_trim,
            has_timing=self.include_timing or options.include_timing,
        )

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens are told at each place; None: nothing is."""
        raise NotImplementedError

    @property
    def num_drawn(self) -> int:
        """Samples of each prompt."""
        return self.n

    @property
    def beam(self) -> int | None:
        """Hypotheses at a time; None: tokens are drawn. Raises InvalidRequest."""
        if self.use_beam_search:
            if self.stream:
                raise InvalidRequest.of("use_beam_search", True, "only without stream")
            return self.n if self.best_of is None else self.best_of
        for name, harmless in (("length_penalty", 1), ("early_stopping", False)):
            value = getattr(self, name)
            if value is not None and value != harmless:
                raise InvalidRequest.of(name, value, "only together with use_beam_search")
        return None

    def gen_params(self, max_tokens: int, *, has_prompt_logprobs: bool = False) -> GenParams:
        """Sampling as the program's gen takes it. Raises InvalidRequest."""
        self.refuse_others()
        scores_prompt = has_prompt_logprobs or self.prompt_logprobs is not None
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest.of("prompt_logprobs", self.prompt_logprobs, "only without stream")
        return self.params_with(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            top_k=self.top_k or None,  # 0: all
            seed=None if self.seed is None else self.seed % _SEEDS,
            logprobs=self._num_asked_logprobs(),
            logprob_start=0 if scores_prompt else None,
            priority=self.priority,
            deadline_s=self.deadline_s,
            constraint=self.constraint(),
            jump_forward=self.jump_forward,
            prediction=None if self.prediction is None else self.prediction.text,
            kv_policy=None if self.kv_policy is None else KVPolicy.from_wire(self.kv_policy),
            **self._beam_params(),
        )

    def _beam_params(self) -> dict[str, Any]:
        beam = self.beam
        if beam is None:
            return {}
        return {
            "n": self.n,
            "beam": beam,
            "length_penalty": self.length_penalty,
            "early_stopping": self.early_stopping,
        }

    def _num_asked_logprobs(self) -> int | None:
        """To be told of, or to choose by."""
        wanted = [num for num in (self.num_logprobs, self.prompt_logprobs) if num is not None]
        if self.num_drawn > self.n:
            wanted.append(0)
        return max(wanted, default=None)
