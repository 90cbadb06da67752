"""HTTP calls on one asyncio loop: bounded in number, retried, streamed. Knows no programs.

The only file of the library that imports httpx.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from ...errors import EngineError, InvalidRequest
from .rate_limit import RateLimit

RETRIED = frozenset({408, 409, 429, 500, 502, 503, 504})  # as OpenAI's own client does
FIRST_DELAY_S = 0.5
MAX_DELAY_S = 8.0
MAX_RETRY_AFTER_S = 60.0
CONNECT_TIMEOUT_S = 10.0
MAX_ERROR_CHARS = 1000
_CHARS_PER_TOKEN = 4.0  # of English, about

OnPayload = Callable[[dict[str, Any]], bool]
"""Takes a body, or an event of a stream; False: it has seen enough."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where calls go, and their time limits and retries."""

    base_url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 600.0  # of silence
    max_retries: int = 4  # after the first attempt
    max_concurrency: int = 256
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None  # estimated: of prompts, and what may be generated


@dataclass(slots=True)
class Timing:
    """Of one call, in seconds: the wait until it was sent, and the number of attempts."""

    queue_s: float = 0.0
    num_attempts: int = 0


class HttpClient:
    """Posts JSON. Owned by its loop; lives until `aclose`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._slots = asyncio.Semaphore(endpoint.max_concurrency)
        self._requests = RateLimit(endpoint.requests_per_minute)
        self._tokens = RateLimit(endpoint.tokens_per_minute)
        self._client = httpx.AsyncClient(
            headers=dict(endpoint.headers),
            params=dict(endpoint.query),
            timeout=httpx.Timeout(endpoint.timeout_s, connect=CONNECT_TIMEOUT_S, pool=None),
            limits=httpx.Limits(max_connections=endpoint.max_concurrency),
        )

    async def aclose(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def get(self, path: str, timeout_s: float) -> dict[str, Any]:
        """One attempt. Raises EngineError."""
        try:
            response = await self._client.get(self._url(path), timeout=timeout_s)
            response.raise_for_status()
            return _decoded(response.content)
        except (httpx.HTTPError, _Retryable) as error:
            said = f"{type(error).__name__}: {error}"
            raise EngineError(f"{self._url(path)} did not answer: {said}") from error

    async def post(self, path: str, body: Mapping[str, Any], on_payload: OnPayload) -> Timing:
        """Post `body`; pass on the response, of a stream (`body["stream"]`) each event.

        429, 5xx, timeouts and broken connections are retried with growing delays (or as Retry-After
        says), unless part of a stream has been passed on; the call keeps its place among the
        concurrent calls meanwhile. Raises InvalidRequest for other refusals, else EngineError.
        Cancelling closes the request.
        """
        queued = time.monotonic()
        async with self._slots:
            timing = Timing(queue_s=time.monotonic() - queued)
            while True:
                timing.num_attempts += 1
                await self._requests.take(1)
                await self._tokens.take(_num_tokens(body))
                attempt = _Attempt(on_payload)
                try:
                    await self._attempt(path, body, attempt)
                    return timing
                except _Retryable as error:
                    if attempt.has_begun or timing.num_attempts > self._endpoint.max_retries:
                        raise EngineError(f"{self._url(path)}: {error}") from error
                    await asyncio.sleep(error.delay_s or _backoff_s(timing.num_attempts))

    async def _attempt(self, path: str, body: Mapping[str, Any], attempt: _Attempt) -> None:
        try:
            async with self._client.stream("POST", self._url(path), json=body) as response:
                if response.status_code >= 400:
                    await response.aread()
                    raise _refusal(response)
                if body.get("stream"):
                    await _read_events(response, attempt)
                else:
                    attempt.hand_over(_decoded(await response.aread()))
        except httpx.HTTPError as error:
            raise _Retryable(f"{type(error).__name__}: {error}") from error

    def _url(self, path: str) -> str:
        if path.startswith("/"):  # outside of OpenAI's API
            return self._endpoint.base_url.removesuffix("/v1") + path
        return f"{self._endpoint.base_url}/{path}"


class _Attempt:
    """Whether any part of an attempt was passed on."""

    def __init__(self, on_payload: OnPayload) -> None:
        self._on_payload = on_payload
        self.has_begun = False

    def hand_over(self, payload: dict[str, Any]) -> bool:
        self.has_begun = True
        return self._on_payload(payload)


class _Retryable(Exception):
    """A failed attempt worth retrying; `delay_s`: as the server asked."""

    def __init__(self, message: str, delay_s: float | None = None) -> None:
        super().__init__(message)
        self.delay_s = delay_s


async def _read_events(response: httpx.Response, attempt: _Attempt) -> None:
    """Server-sent events up to [DONE], or until the consumer has enough."""
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        payload = _decoded(data)
        if "error" in payload:
            raise EngineError(f"{response.url}: {_message_of(payload)}")
        if not attempt.hand_over(payload):
            return
    raise _Retryable("the stream broke off")


def _num_tokens(body: Mapping[str, Any]) -> float:
    """About how many a call counts with, its prompt's and those that it may generate."""
    prompt = body.get("prompt", body.get("messages", ""))
    most = body.get("max_tokens", body.get("max_completion_tokens", 0))
    return float(len(json.dumps(prompt)) / _CHARS_PER_TOKEN + most * body.get("n", 1))


def _decoded(data: str | bytes) -> dict[str, Any]:
    try:
        payload = json.loads(data)
    except ValueError as error:
        raise _Retryable(f"the answer is not JSON: {data[:200]!r}") from error
    if not isinstance(payload, dict):
        raise _Retryable(f"the answer is no object: {data[:200]!r}")
    return payload


def _refusal(response: httpx.Response) -> Exception:
    try:
        message = _message_of(response.json())
    except ValueError:
        message = response.text
    status = response.status_code
    said = f"HTTP {status}: {message[:MAX_ERROR_CHARS]}"
    if status in RETRIED:
        return _Retryable(said, _retry_after_s(response.headers.get("retry-after")))
    if status >= 500:
        return EngineError(f"{response.url}: {said}")
    return InvalidRequest(f"{response.url}: {said}")


def _message_of(payload: Any) -> str:
    """OpenAI's {"error": {"message"}}, FastAPI's {"detail"}, or the whole payload."""
    if not isinstance(payload, dict):
        return str(payload)
    error = payload.get("error", payload.get("detail", payload))
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _retry_after_s(header: str | None) -> float | None:
    """A Retry-After in seconds; None (the usual delays) for its date form."""
    try:
        return min(max(0.0, float(header)), MAX_RETRY_AFTER_S) if header else None
    except ValueError:
        return None


def _backoff_s(num_attempts: int) -> float:
    delay: float = min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** (num_attempts - 1))
    return delay * random.uniform(0.75, 1.0)
