"""Backends that are called without a program, as SGLang's `Engine` is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

from ...errors import InvalidRequest
from ..client.backend import Backend
from ..client.channel import OwnedChannel
from .asked import AskedPrompts, PromptIds, Prompts, Sampling, asked_prompts, prompts_of
from .embedding import EmbeddingRun
from .run import Answer, Answers, NativeRun, streamed
from .tokenizer import RuntimeTokenizer


class NativeBackend(Backend):
    """A backend with `generate`, `encode` and `get_tokenizer`."""

    def generate(
        self,
        prompt: Prompts = None,
        sampling_params: Sampling = None,
        input_ids: PromptIds = None,
        *,
        stream: bool = False,
        **options: Any,
    ) -> Answers | Iterator[Answer]:
        """Generate behind a text, or behind each of several.

        Args:
            prompt: a text or a list of texts; or `input_ids`: token ids, or lists of them.
            sampling_params: a dict of SGLang's parameters (`max_new_tokens`, `temperature`, `stop`,
                `json_schema`, `n`, ...), or one for each prompt.
            stream: give an iterator of the output so far, whenever it has grown; the last one is
                whole. One that is dropped cancels what still runs.
            options: `return_logprob`, `logprob_start_len` (-1: none of the prompt's),
                `top_logprobs_num`, `return_text_in_logprobs`, `lora_path` (an adapter's name) and
                `rid`, one value or one for each prompt; `priority`.

        Returns `{"text", "output_ids", "meta_info"}`, as `/generate` of `stemma serve` does, a list
        for a list of prompts or `n` > 1; of a stream an iterator, whose items have an `index` then.
        Over HTTP `output_ids` is None. Raises InvalidRequest, ProgramError and EngineError.
        """
        asked = _asked(prompt, sampling_params, input_ids, options)
        if stream:
            return streamed(lambda: NativeRun(self.channel, asked, stream=True))
        return NativeRun(self.channel, asked, stream=False).whole()

    async def async_generate(
        self,
        prompt: Prompts = None,
        sampling_params: Sampling = None,
        input_ids: PromptIds = None,
        *,
        stream: bool = False,
        **options: Any,
    ) -> Answers | AsyncIterator[Answer]:
        """`generate` for async functions; with `stream` it gives an async iterator."""
        asked = _asked(prompt, sampling_params, input_ids, options)
        channel = await self._open_channel()
        if stream:
            return _streamed_async(channel, asked)
        return await NativeRun(channel, asked, stream=False).whole_async()

    def encode(
        self, prompt: Prompts = None, *, input_ids: PromptIds = None, lora_path: str | None = None
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """The embedding of a text, or of each of several: `{"embedding", "meta_info"}`, a vector of
        length 1, pooled as the model does. Raises InvalidRequest for a model that gives none, and
        over HTTP."""
        prompts, is_batch = prompts_of(prompt, input_ids)
        connection = self.connection
        return EmbeddingRun(connection, prompts, is_batch=is_batch, lora_path=lora_path).whole()

    async def async_encode(
        self, prompt: Prompts = None, *, input_ids: PromptIds = None, lora_path: str | None = None
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """`encode` for async functions."""
        prompts, is_batch = prompts_of(prompt, input_ids)
        await self._open_channel()
        run = EmbeddingRun(self.connection, prompts, is_batch=is_batch, lora_path=lora_path)
        return await run.whole_async()

    def get_tokenizer(self) -> RuntimeTokenizer:
        """The model's tokenizer, asked over the connection. Raises InvalidRequest over HTTP."""
        return RuntimeTokenizer(self.connection)

    async def _open_channel(self) -> OwnedChannel:
        """Without keeping an event loop waiting."""
        return self.channel if self.is_open else await asyncio.to_thread(self.reopen)


async def _streamed_async(channel: OwnedChannel, asked: AskedPrompts) -> AsyncIterator[Answer]:
    """One that is never read never runs."""
    async for answer in NativeRun(channel, asked, stream=True).stream_async():
        yield answer


_OPTIONS: dict[str, Any] = {
    "return_logprob": False,
    "logprob_start_len": -1,
    "top_logprobs_num": 0,
    "return_text_in_logprobs": False,
    "lora_path": None,
    "rid": None,
}


def _asked(
    prompt: Prompts, sampling_params: Sampling, input_ids: PromptIds, options: dict[str, Any]
) -> AskedPrompts:
    priority = options.pop("priority", None)
    for name, value in options.items():
        if name not in _OPTIONS and value:
            allowed = f"left out; there are {sorted([*_OPTIONS, 'priority'])}"
            raise InvalidRequest.of(name, value, allowed)
    each = {name: options.get(name, default) for name, default in _OPTIONS.items()}
    return asked_prompts(prompt, input_ids, sampling_params, each, priority)
