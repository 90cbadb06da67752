"""A `Channel` to one model of an endpoint with OpenAI's API: programs run in this process, and each
of their calls is a request.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ...errors import EngineError, InvalidProgram
from ..protocol.interpreter import Emit
from .calls import Caller, TokenUsage
from .client_session import ClientSession
from .client_transcript import ClientTranscript
from .flavors import Flavor
from .http_client import Endpoint, HttpClient
from .local_channel import LocalChannel

MODELS_TIMEOUT_S = 10.0
MAX_SPEC_TOKENS = 65_536


class OpenAIChannel(LocalChannel):
    """Programs on one model of one endpoint; thread-safe; lives until `close`."""

    def __init__(
        self,
        endpoint: Endpoint,
        model: str,
        flavor: Flavor,
        *,
        has_text: bool,
        has_chat: bool,
        info: dict[str, Any] | None = None,
    ) -> None:
        """`has_text`, `has_chat`: whether completions, chat completions serve the model."""
        facts = {"model": model, "reads_images": has_chat, **(info or {})}
        super().__init__(facts, "stemma-openai")
        self.base_url = endpoint.base_url
        self.usage = TokenUsage()
        self._root = ClientTranscript(has_text=has_text, has_chat=has_chat)
        self._client = self._on_loop(_make_client(endpoint))
        self._caller = Caller(self._client, flavor, model, self.usage)

    def _session(self, emit: Emit, create: dict[str, object]) -> ClientSession:
        num_spec_tokens = _checked_spec_tokens(create.get("num_api_spec_tokens"))
        if create.get("tools") is not None:
            raise InvalidProgram("tools: a program on an endpoint over HTTP has none", "tools")
        if create.get("lora_path") is not None:
            allowed = "left out for an endpoint over HTTP; name the adapter as its model"
            raise InvalidProgram.of("lora_path", create["lora_path"], allowed)
        return ClientSession(
            self._caller,
            self._root.copy(),
            emit,
            seed=int(create["seed"]),  # type: ignore[call-overload]
            instance=int(create["instance"]),  # type: ignore[call-overload]
            is_streaming=bool(create.get("stream")),
            num_spec_tokens=num_spec_tokens,
        )

    async def _close(self) -> None:
        await self._client.aclose()


async def _make_client(endpoint: Endpoint) -> HttpClient:
    return HttpClient(endpoint)


def models_of(endpoint: Endpoint, timeout_s: float = MODELS_TIMEOUT_S) -> list[dict[str, Any]]:
    """The endpoint's list of models, each with at least `id`. Raises EngineError."""

    async def ask() -> dict[str, Any]:
        client = HttpClient(endpoint)
        try:
            return await client.get("models", timeout_s)
        finally:
            await client.aclose()

    # Its own loop in its own thread: the caller's thread may be running another.
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: asyncio.run(ask())).result()
    models = answer.get("data")
    if not isinstance(models, list) or not all(isinstance(m, dict) and "id" in m for m in models):
        raise EngineError(f"{endpoint.base_url}/models: no list of models: {str(answer)[:300]}")
    return models


def _checked_spec_tokens(value: object) -> int | None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if value is not None and not (is_int and 1 <= value <= MAX_SPEC_TOKENS):  # type: ignore[operator]
        allowed = f"an integer in [1, {MAX_SPEC_TOKENS}], or None"
        raise InvalidProgram.of("num_api_spec_tokens", value, allowed)
    return value  # type: ignore[return-value]
