"""Usage limits of a key: requests and tokens a minute, concurrent requests.

Rates are token buckets (as in RFC 2697's meters): a bucket holds a minute's worth and refills
evenly. Tokens are known only when an output has ended, so they are taken then and the bucket may go
below zero: the key must wait until the debt has refilled.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..protocol.failures import Refusal
from .api_keys import ApiKey

WINDOW_S = 60.0


@dataclass(slots=True)
class Bucket:
    """Holds at most `limit`, and refills by as much in WINDOW_S."""

    limit: int
    level: float
    filled_s: float

    def fill(self, now_s: float) -> None:
        """Add what has refilled since the last call."""
        level = self.level + (now_s - self.filled_s) * self.limit / WINDOW_S
        self.level, self.filled_s = min(float(self.limit), level), now_s

    def wait_s(self, amount: float) -> float:
        """Seconds until it holds `amount`, counted from the last fill."""
        return max(0.0, amount - self.level) * WINDOW_S / self.limit

    def headers(self, of: str) -> dict[str, str]:
        """OpenAI's rate limit headers: limit, remaining, reset."""
        return {
            f"x-ratelimit-limit-{of}": str(self.limit),
            f"x-ratelimit-remaining-{of}": str(max(0, int(self.level))),
            f"x-ratelimit-reset-{of}": f"{self.wait_s(self.limit):.3f}s",
        }


class KeyUsage:
    """What one key uses. Invariant: `num_running` requests have begun and not ended."""

    def __init__(self, key: ApiKey, now_s: float) -> None:
        self.key = key
        self.num_running = 0
        self._requests = _bucket(key.requests_per_minute, now_s)
        self._tokens = _bucket(key.tokens_per_minute, now_s)

    def take_limits(self, key: ApiKey, now_s: float) -> None:
        """Apply the key's limits, which may have changed; its usage stays."""
        if key is self.key:
            return
        self._requests = _with_limit(self._requests, key.requests_per_minute, now_s)
        self._tokens = _with_limit(self._tokens, key.tokens_per_minute, now_s)
        self.key = key

    def begin(self, now_s: float) -> None:
        """A request has come. Raises Refusal where it exceeds a limit."""
        requests, tokens = self._requests, self._tokens
        for bucket in (requests, tokens):
            if bucket is not None:
                bucket.fill(now_s)
        if requests is not None and (wait_s := requests.wait_s(1)) > 0:
            raise self._refusal(f"{requests.limit} requests a minute", "requests", wait_s)
        if tokens is not None and (wait_s := tokens.wait_s(1)) > 0:
            raise self._refusal(f"{tokens.limit} tokens a minute", "tokens", wait_s)
        most = self.key.max_concurrent
        if most is not None and self.num_running >= most:
            raise self._refusal(f"{most} requests at a time", "requests", 1.0)
        if requests is not None:
            requests.level -= 1
        self.num_running += 1

    def end(self) -> None:
        """A request has ended."""
        self.num_running -= 1

    def charge(self, num_tokens: int, now_s: float) -> None:
        """Take this many computed tokens from the token bucket."""
        if self._tokens is not None:
            self._tokens.fill(now_s)
            self._tokens.level -= num_tokens

    def headers(self) -> dict[str, str]:
        """Headers of every response to this key."""
        found: dict[str, str] = {}
        if self._requests is not None:
            found |= self._requests.headers("requests")
        if self._tokens is not None:
            found |= self._tokens.headers("tokens")
        return found

    def _refusal(self, limit: str, kind: str, wait_s: float) -> Refusal:
        return Refusal(
            429,
            f"this key ({self.key.name}) may ask for {limit}; try again in {wait_s:.3g} s",
            kind=kind,
            headers={**self.headers(), **retry_after(wait_s)},
        )


def retry_after(wait_s: float) -> dict[str, str]:
    """When to retry: in whole seconds, as HTTP has it, and in OpenAI's milliseconds."""
    return {
        "retry-after": str(max(1, -int(-wait_s // 1))),
        "retry-after-ms": str(int(wait_s * 1e3)),
    }


def _bucket(limit: int | None, now_s: float) -> Bucket | None:
    return None if limit is None else Bucket(limit, float(limit), now_s)


def _with_limit(old: Bucket | None, limit: int | None, now_s: float) -> Bucket | None:
    if old is None or limit is None:
        return _bucket(limit, now_s)
    return Bucket(limit, min(float(limit), old.level), old.filled_s)
