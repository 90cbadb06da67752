"""Bodies of llama.cpp's /completion and /infill, and their conversion to tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from ....errors import InvalidRequest
from ....frontend.protocol.numbers import MAX_LOGPROBS, MAX_SAMPLES
from ...generation.infill import InfillText
from ...generation.model_text import ModelText
from ...generation.service import Served
from ...protocol.fixed_fields import only, refuse_others
from ...protocol.known_fields import MAX_ENTRIES, FewItems, Items, NullableFields
from ...protocol.llamacpp_sampling import repetition_penalty, seed_of
from ...protocol.task import MAX_PROMPTS, UNBOUNDED, Prompt, Task
from ..openai.completions import CompletionRequest, completion_request

NEVER_BIAS = -100.0  # of a token that shall not come
_SAME = ("stream", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "ignore_eos",
         "json_schema", "lora_path", "cache_salt", "priority", "deadline_s")  # fmt: skip
_SHOWN = ("n_predict", "seed", "temperature", "top_k", "top_p", "min_p", "repeat_penalty",
          "presence_penalty", "frequency_penalty", "stop", "ignore_eos", "n_probs",
          "stream")  # fmt: skip
_OFF = (None, 0, 0.0)


class PromptObject(NullableFields):
    """A prompt as an object."""

    prompt_string: str
    multimodal_data: Any = only((None, []), "left out: the model reads text only")


Parts = Items[int | str]  # of one prompt: token ids, and texts between them
AnyPrompt = str | PromptObject | Parts


class SamplerBody(NullableFields):
    """Fields of both endpoints. What is not given is the model's own default; ranges are checked
    by the runtime. `lora_path`, `cache_salt`, `priority` and `deadline_s` are extras."""

    model: str | None = None
    n_predict: int | None = Field(default=None, ge=-2)
    max_tokens: int | None = Field(default=None, ge=-2)  # the same
    n_cmpl: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    stream: bool = False
    temperature: float | None = None  # below 0: greedy
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None  # below 0: any
    stop: str | FewItems[str] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    ignore_eos: bool | None = None
    logit_bias: FewItems[Items[Any]] | dict[str, float | bool] | None = None
    n_probs: int = Field(default=0, ge=0, le=MAX_LOGPROBS)
    json_schema: dict[str, Any] | bool | None = None
    grammar: str | None = None
    return_tokens: bool = False
    lora_path: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    deadline_s: float | None = None

    # Of no effect here, or parameters of samplers that are refused.
    cache_prompt: Any = None
    id_slot: Any = None
    n_keep: Any = None
    n_discard: Any = None
    n_cache_reuse: Any = None
    timings_per_token: Any = None
    return_progress: Any = None
    sse_ping_interval: Any = None
    dynatemp_exponent: Any = None
    mirostat_tau: Any = None
    mirostat_eta: Any = None
    dry_base: Any = None
    dry_allowed_length: Any = None
    dry_penalty_last_n: Any = None
    dry_sequence_breakers: Any = None
    xtc_threshold: Any = None

    typical_p: Any = only((None, 1, 1.0), "1")
    top_n_sigma: Any = only((None, 0, 0.0, -1, -1.0), "-1")
    dynatemp_range: Any = only(_OFF, "0")
    dry_multiplier: Any = only(_OFF, "0")
    xtc_probability: Any = only(_OFF, "0")
    mirostat: Any = only(_OFF, "0")
    n_indent: Any = only(_OFF, "0")
    min_keep: Any = only(_OFF, "0")
    t_max_predict_ms: Any = only(_OFF, "0; see deadline_s")
    post_sampling_probs: Any = only((None, False), "false")
    samplers: Any = only((None, []), "left out: the order is the same for all")
    grammar_lazy: Any = only((None, False), "false")
    lora: Any = only((None, []), "left out: model or lora_path name an adapter")
    response_fields: Any = only((None, []), "left out")

    @property
    def num_asked(self) -> int | None:
        """Tokens to generate; None: what fits."""
        asked = self.max_tokens if self.n_predict is None else self.n_predict
        return None if asked is None or asked < 0 else asked

    @property
    def only_computes(self) -> bool:
        """Whether nothing but the prompt's KV is asked for."""
        return self.num_asked == 0

    def request(self, stop_token_ids: Sequence[int] = ()) -> CompletionRequest:
        """The sampling as OpenAI's completions have it, of no prompt. Raises InvalidRequest."""
        refuse_others(self)
        fields = {
            **{name: getattr(self, name) for name in _SAME},
            "prompt": "",
            "n": self.n_cmpl,
            "max_tokens": UNBOUNDED if self.num_asked is None else max(1, self.num_asked),
            "temperature": None if self.temperature is None else max(0.0, self.temperature),
            "seed": seed_of(self.seed),
            "stop": self.stop or None,
            "repetition_penalty": repetition_penalty(
                self.repeat_penalty, self.repeat_last_n, "repeat_last_n"
            ),
            "logit_bias": self._logit_bias(),
            "logprobs": self.n_probs or None,
            "ebnf": self.grammar or None,
            "stop_token_ids": list(stop_token_ids) or None,
            "return_token_ids": self.return_tokens or self.stream,
        }
        given = {name: value for name, value in fields.items() if value is not None}
        return completion_request(given, {"ebnf": "grammar", "lenient": ""})

    def shown(self) -> dict[str, Any]:
        """What was given, for `generation_settings`."""
        return {name: value for name in _SHOWN if (value := getattr(self, name)) is not None}

    def _logit_bias(self) -> dict[str, float] | None:
        if self.logit_bias is None:
            return None
        given = self.logit_bias
        pairs = list(given.items()) if isinstance(given, dict) else given
        biases: dict[str, float] = {}
        for pair in pairs:
            if len(pair) != 2 or not _is_id(pair[0]) or not isinstance(pair[1], bool | int | float):
                allowed = "pairs of a token id and a number, or false"
                raise InvalidRequest.of("logit_bias", list(pair), allowed)
            biases[str(pair[0])] = NEVER_BIAS if pair[1] is False else float(pair[1])
        return biases


class CompletionBody(SamplerBody):
    """Body of /completion."""

    prompt: str | PromptObject | Items[int | str | PromptObject | Parts]

    @property
    def is_batch(self) -> bool:
        """Whether the answer is a list."""
        is_one = not isinstance(self.prompt, list) or _is_parts(self.prompt)
        return not is_one or self.n_cmpl > 1

    @property
    def texts(self) -> list[str]:
        """Each prompt as its answers repeat it: "" for one of token ids."""
        return [each if isinstance(each, str) else "" for each in self._each()]

    def task(self, served: Served, texts: ModelText) -> Task:
        """Tokenizes prompts of several parts: call it `in_thread`. Raises InvalidRequest."""
        request = self.request()
        prompts = [_prompt_of(each, texts) for each in self._each()]
        return request.to_task(prompts, request.params(), served)

    def _each(self) -> list[str | list[int | str]]:
        """Prompts as texts, or as their parts. Raises InvalidRequest."""
        given = self.prompt
        prompts: list[Any] = (
            [given] if not isinstance(given, list) or _is_parts(given) else list(given)
        )
        if not 1 <= len(prompts) <= MAX_PROMPTS:
            raise InvalidRequest.of("prompt", f"{len(prompts)} of them", f"1 to {MAX_PROMPTS}")
        for each in prompts:
            if isinstance(each, PromptObject):
                refuse_others(each, "prompt.")
            elif isinstance(each, list) and not all(isinstance(p, int | str) for p in each):
                allowed = "ids and texts in one prompt, or a list of prompts"
                raise InvalidRequest.of("prompt", "a prompt within another one", allowed)
        return [each.prompt_string if isinstance(each, PromptObject) else each for each in prompts]


class ExtraFile(NullableFields):
    """Of `input_extra`."""

    filename: str = ""
    text: str


class InfillBody(SamplerBody):
    """Body of /infill."""

    input_prefix: str
    input_suffix: str
    input_extra: FewItems[ExtraFile] = Field(default_factory=list)
    prompt: str = ""

    def task(self, served: Served, texts: ModelText) -> Task:
        """Tokenizes its texts: call it `in_thread`. Raises InvalidRequest."""
        files = [(extra.filename, extra.text) for extra in self.input_extra]
        text = InfillText(self.input_prefix, self.input_suffix, files, self.prompt)
        ids, ends = texts.infill(text, "input_suffix")
        request = self.request(ends)
        return request.to_task([ids], request.params(), served)


def _is_id(value: object) -> bool:
    if isinstance(value, str):
        return value.isdecimal()
    return isinstance(value, int) and not isinstance(value, bool)


def _is_parts(prompt: Sequence[Any]) -> bool:
    """Whether a list is the parts of one prompt: texts alone are prompts."""
    return any(isinstance(part, int) for part in prompt)


def _prompt_of(given: str | Sequence[int | str], texts: ModelText) -> Prompt:
    """BOS comes before a text only. Raises InvalidRequest."""
    if isinstance(given, str):
        return given
    num_texts = sum(isinstance(part, str) for part in given)
    if num_texts > MAX_ENTRIES:
        raise InvalidRequest.of("prompt", f"{num_texts} texts", f"at most {MAX_ENTRIES} in one")
    ids: list[int] = []
    for index, part in enumerate(given):
        ids += [part] if isinstance(part, int) else texts.encode(part, has_bos=index == 0)
    return ids
