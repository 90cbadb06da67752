"""`/generate`, in SGLang's format: text or token ids in, one or several, streamed or whole."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from ....errors import InvalidRequest
from ....frontend.protocol.native_answer import LogprobForm
from ...generation.answer import answer
from ...generation.service import Service
from ...protocol.hint_envelope import HintEnvelope
from ...protocol.json_route import beside_loop, json_routes
from ...protocol.known_fields import Items
from ...protocol.task import Task
from .generate_reply import GenerateReply
from .prompts import PromptFields
from .sampling import SamplingObject

_T = TypeVar("_T")
_UNSUPPORTED = (
    "image_data", "audio_data", "video_data", "input_embeds", "session_params",
    "custom_logit_processor", "return_hidden_states", "token_ids_logprob",
)  # fmt: skip


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = json_routes()

    @routes.post("/generate")
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """SGLang's native generation."""
        task = await beside_loop(request, lambda: body.task(service))
        form = LogprobForm(body.return_logprob is not False, body.return_text_in_logprobs)
        reply = GenerateReply(
            body.rid or f"gen-{secrets.token_hex(12)}",
            task,
            form,
            is_batch=body.is_batch or task.n > 1,
            is_incremental=body.incremental,
        )
        return await answer(service, request, task, reply)

    return routes


class GenerateRequest(PromptFields):
    """Body of /generate. What goes with a prompt may be a list, one item for each. A stream's
    events have all the text so far, as SGLang's, or with `incremental` what is new."""

    sampling_params: dict[str, Any] | Items[dict[str, Any]] = Field(default_factory=dict)
    stream: bool = False
    incremental: bool = False
    rid: str | None = Field(default=None, min_length=1, max_length=256)
    priority: int | None = None
    kv_hints: HintEnvelope | None = None
    return_logprob: bool | Items[bool] = False
    logprob_start_len: int | Items[int] = -1
    top_logprobs_num: int | Items[int] = 0
    return_text_in_logprobs: bool = False
    image_data: Any = None
    audio_data: Any = None
    video_data: Any = None
    input_embeds: Any = None
    lora_path: str | Items[str | None] | None = None
    session_params: Any = None
    custom_logit_processor: Any = None
    return_hidden_states: Any = None
    token_ids_logprob: Any = None

    def task(self, service: Service) -> Task:
        """Raises InvalidRequest."""
        for field in _UNSUPPORTED:
            if getattr(self, field):
                raise InvalidRequest.of(field, getattr(self, field), "left out")
        prompts = self.prompts()
        num = len(prompts)
        samplings = self._samplings(num)
        wants = self._each("return_logprob", self.return_logprob, num)
        starts = self._each("logprob_start_len", self.logprob_start_len, num)
        tops = self._each("top_logprobs_num", self.top_logprobs_num, num)
        params = [
            sampling.gen_params(
                logprobs=top if is_wanted else None,
                logprob_start=start if is_wanted and start >= 0 else None,
                priority=self.priority,
            )
            for sampling, is_wanted, start, top in zip(samplings, wants, starts, tops, strict=True)
        ]
        adapters = [
            service.served(self.model, name).lora_path
            for name in self._each("lora_path", self.lora_path, num)
        ]
        return Task(
            prompts,
            params[0],
            n=samplings[0].n,
            stream=self.stream,
            has_token_ids=True,
            hints=self.kv_hints,
            cache_salt=self.cache_salt,
            constraint_field=next((s.constraint_field for s in samplings), None),
            each_lora_path=adapters,
            each_params=params if isinstance(self.sampling_params, list) or num > 1 else (),
            fails_apart=True,
        )

    def _samplings(self, num: int) -> list[SamplingObject]:
        name = "sampling_params"
        if isinstance(self.sampling_params, dict):
            return [SamplingObject.read(self.sampling_params, name)] * num
        given: Sequence[dict[str, Any]] = self._each(name, self.sampling_params, num)
        read = [SamplingObject.read(item, f"{name}.{i}") for i, item in enumerate(given)]
        counts = {sampling.n for sampling in read}
        if len(counts) > 1:
            raise InvalidRequest.of(f"{name}.n", sorted(counts), "the same for all prompts")
        return read

    def _each(self, field: str, given: _T | Sequence[_T], num: int) -> Sequence[_T]:
        """The field's value for each prompt."""
        if not isinstance(given, list):
            return [given] * num  # type: ignore[list-item]
        if not self.is_batch or len(given) != num:
            allowed = f"one value, or a list of one for each of {num} prompts"
            raise InvalidRequest.of(field, f"{len(given)} values", allowed)
        return given
