"""How late the server's event loop is while it gets bodies that are costly to read.

Some are beyond what a body may be, some just within it; "nothing" shows what else the machine does.
The lag is the server's own, from its histogram: a quantile is the smallest bound of a bucket that
holds it, over the time that the requests of a kind took.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from .server import MeasuredServer

TIMEOUT_S = 120.0
JSON = {"content-type": "application/json"}
TARGET_P99_MS = 50.0
_LAG = 'stemma_http_loop_lag_seconds_bucket{le="'


def measure(server: MeasuredServer, repeats: int) -> list[dict[str, Any]]:
    """A row per kind of body."""
    _ask(server, "POST", "/tokenize", b'{"text": "a"}')  # loads the tokenizer
    return [_row(server, kind, *request, repeats) for kind, request in _bodies().items()]


def _row(server: MeasuredServer, kind: str, path: str, body: bytes, repeats: int) -> dict[str, Any]:
    before, started = _lags(server), time.perf_counter()
    statuses = {_ask(server, "POST", path, body)[0] for _ in range(repeats)}
    seconds = time.perf_counter() - started
    lags = {bound: num - before[bound] for bound, num in _lags(server).items()}
    return {
        "body": kind,
        "MB": len(body) / 1e6,
        "status": "/".join(sorted(statuses)),
        "ms each": seconds / repeats * 1e3,
        "lag p50, ms": _quantile(lags, 0.5),
        "p99, ms": _quantile(lags, 0.99),
        "most, ms": _quantile(lags, 1.0),
        "target p99": TARGET_P99_MS,
    }


def _bodies() -> dict[str, tuple[str, bytes]]:
    """By what they are: a path and a body."""
    texts, chats = "/v1/completions", "/v1/chat/completions"
    said = b'{"messages":[{"role":"user","content":%s}]}'
    prompts = {
        "nothing": b'""',
        "31 MB of ids": _list(b"1", 15_500_000),
        "31 MB of lists": _list(b"[1]", 7_750_000),
        "ids": _list(b"1", 1_000_000),
        "lists of ids": _list(_list(b"1", 1000), 1000),
        "lists": _list(b"[1]", 32_000),
        "texts": _list(b'"ab"', 260_000),
        "numbers": _list(b"1.5", 900_000),
        "a text": _text(b"word "),
        "a text of quotes": _text(b'\\"'),
        "a text of emoji": _text(b"\\ud83d\\ude00"),
    }
    return {
        **{kind: (texts, b'{"prompt":%s}' % prompt) for kind, prompt in prompts.items()},
        "messages": (chats, b'{"messages":%s}' % _list(b'{"role":"user","content":"a"}', 32_000)),
        "parts": (chats, said % _list(b'{"type":"text","text":"a"}', 32_000)),
        "a chat's text": (chats, said % _text(b"word ")),
        "a schema": (texts, b'{"prompt":"a","json_schema":{"enum":%s}}' % _list(b"1", 1_000_000)),
        "ids to detokenize": ("/detokenize", b'{"tokens":%s}' % _list(b"300", 65_536)),
        "a text to tokenize": ("/tokenize", b'{"text":%s}' % _text(b"word ")),
        "a text for Anthropic": ("/v1/messages", said[:-1] % _text(b"word ") + b',"max_tokens":1}'),
    }


def _list(item: bytes, num: int) -> bytes:
    return b"[" + b",".join([item] * num) + b"]"


def _text(part: bytes) -> bytes:
    return b'"' + part * (3_900_000 // len(part)) + b'"'


def _lags(server: MeasuredServer) -> dict[float, float]:
    """Timers that were at most so late, in seconds, since the server's start."""
    lines = _ask(server, "GET", "/metrics")[1].decode().splitlines()
    buckets = (line.removeprefix(_LAG).split('"} ') for line in lines if line.startswith(_LAG))
    return {float(bound): float(num) for bound, num in buckets}


def _quantile(counts: Mapping[float, float], share: float) -> float:
    """In ms."""
    return (
        next(bound for bound in sorted(counts) if counts[bound] >= share * max(counts.values()))
        * 1e3
    )


def _ask(server: MeasuredServer, method: str, path: str, body: bytes = b"") -> tuple[str, bytes]:
    """The status, or that the connection was closed while the body was being sent; the answer."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=TIMEOUT_S)
    try:
        connection.request(method, path, body or None, JSON)
        answer = connection.getresponse()
        return str(answer.status), answer.read()
    except ConnectionError:
        return "closed", b""
    finally:
        connection.close()
