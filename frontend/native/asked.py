"""What a call of `generate` asks for, prompt by prompt."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ...errors import InvalidRequest
from ..protocol.ir import GenParams
from ..protocol.native_answer import LogprobForm
from ..protocol.numbers import plain, token_ids_of
from .sampling import sampling_of

Prompts: TypeAlias = str | Sequence[str] | None
PromptIds: TypeAlias = Sequence[int] | Sequence[Sequence[int]] | None
Sampling: TypeAlias = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """One prompt, and what is to be generated behind it."""

    prompt: str | Sequence[int]
    params: GenParams
    num_samples: int
    lora_path: str | None
    id: str
    form: LogprobForm


@dataclass(frozen=True, slots=True)
class AskedPrompts:
    """All of one call."""

    prompts: Sequence[AskedPrompt]
    is_batch: bool  # whether the result is a list


def asked_prompts(
    prompt: Prompts,
    input_ids: PromptIds,
    sampling_params: Sampling,
    each: Mapping[str, Any],
    priority: int | None,
) -> AskedPrompts:
    """`each`: what may be one value or a list of one for each prompt. Raises InvalidRequest."""
    prompts, is_batch = prompts_of(prompt, input_ids)
    num = len(prompts)
    given = {name: _of_each(name, value, num, is_batch) for name, value in each.items()}
    samplings = _of_each("sampling_params", sampling_params, num, is_batch)
    is_listed = isinstance(sampling_params, list | tuple)
    asked = []
    for index, text in enumerate(prompts):
        own = {name: values[index] for name, values in given.items()}
        field = f"sampling_params.{index}" if is_listed else "sampling_params"
        logprobs, start = _logprobs(own)
        params, num_samples = sampling_of(
            samplings[index] or {},
            field,
            logprobs=logprobs,
            logprob_start=start,
            priority=priority,
        )
        id = own["rid"] or f"gen-{secrets.token_hex(12)}"
        form = LogprobForm(logprobs is not None, bool(own["return_text_in_logprobs"]))
        asked.append(AskedPrompt(text, params, num_samples, own["lora_path"], id, form))
    return AskedPrompts(asked, is_batch or any(each.num_samples > 1 for each in asked))


def prompts_of(prompt: Prompts, input_ids: PromptIds) -> tuple[list[str | Sequence[int]], bool]:
    """The prompts, and whether they were a list. Raises InvalidRequest."""
    if (prompt is None) == (input_ids is None):
        raise InvalidRequest("one of prompt and input_ids is needed", "prompt")
    if prompt is not None:
        is_batch = not isinstance(prompt, str)
        texts = list(prompt) if is_batch else [str(prompt)]
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise InvalidRequest.of("prompt", prompt, "a text or texts, none of them empty")
        return [*texts], is_batch
    assert input_ids is not None
    rows: list[Any] = list(input_ids)
    is_batch = bool(rows) and not isinstance(plain(rows[0]), int)
    ids = [token_ids_of("input_ids", row) for row in (rows if is_batch else [rows])]
    if not all(ids):
        raise InvalidRequest.of("input_ids", input_ids, "token ids, or lists of them, none empty")
    return [*ids], is_batch


def _of_each(name: str, given: Any, num: int, is_batch: bool) -> Sequence[Any]:
    if not isinstance(given, list | tuple):
        return [given] * num
    if not is_batch or len(given) != num:
        allowed = f"one value, or a list of one for each of {num} prompts"
        raise InvalidRequest.of(name, f"{len(given)} values", allowed)
    return given


def _logprobs(given: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """GenParams' (logprobs, logprob_start)."""
    if not given["return_logprob"]:
        return None, None
    start = given["logprob_start_len"]
    return given["top_logprobs_num"] or 0, None if start in (None, -1) else start
