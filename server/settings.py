"""How the HTTP side behaves: plain data with its flags, none of it the engine's business.

A setting is a field of `ServerSettings`, a check in `__post_init__`, and a flag of the same name in
one of the groups of `add_server_flags`; nothing else needs to know of it.
"""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from ..errors import InvalidRequest
from .parsers.reasoning import REASONING_PARSERS, ReasoningParser
from .parsers.registry import TOOL_CALL_PARSERS, ToolCallParser

LogFormat = Literal["text", "json"]
LOG_FORMATS: tuple[str, ...] = get_args(LogFormat)
LOG_LEVELS = ("debug", "info", "warning", "error")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
KEY_VARIABLE = "STEMMA_API_KEY"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@]+")  # as browsers write it


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Of one `stemma serve`. Raises InvalidRequest for values out of range."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any that is free
    keep_alive_s: float = 75.0  # an idle connection is kept so long; proxies reuse theirs for 60 s
    drain_s: float = 30.0  # how long what runs may take to end once the server is asked to stop
    engine_timeout_s: float = 60.0  # an engine whose loop stands still for longer is restarted
    responses_ttl_s: float = 3600.0  # how long /v1/responses remembers one
    metrics_compat: bool = False  # /metrics also under the names of SGLang and vLLM
    otlp_traces: bool = False
    log_level: str = "info"
    log_format: LogFormat = "text"
    api_key: tuple[str, ...] = field(default=(), repr=False)
    api_keys: str | None = None  # a file of them, access/api_keys.py
    isolate_cache: bool = False  # a key's KV is shared with its tenant's keys only
    insecure: bool = False  # listen beyond this host without keys
    metrics_open: bool = False  # /metrics without a key
    cors_origins: tuple[str, ...] = ()  # web pages that may use this server
    allowed_hosts: tuple[str, ...] = ()  # names of it, beside addresses and localhost
    max_body_mb: float = 32.0
    max_tokens_limit: int | None = None  # that a request may ask for
    max_queued_requests: int = 4096  # samples that wait, beside those that the engine runs at once
    strict_fields: bool = False  # refuse fields that are not known
    stream_ping_s: float = 15.0  # a stream that is silent so long says that it lives
    stream_stall_s: float = 60.0  # a stream whose reader takes nothing for so long is cut off
    max_stream_buffer_kb: int = 1024  # or for whom more than so much waits
    tool_call_parser: ToolCallParser = "auto"  # the format in which the model writes calls
    reasoning_parser: ReasoningParser = "auto"  # the tags around its reasoning

    def __post_init__(self) -> None:
        _require_range("port", self.port, 0, 65_535)
        _require_range("responses_ttl_s", self.responses_ttl_s, 0, 30 * 86_400)
        _require_range("keep_alive_s", self.keep_alive_s, 1, 86_400)
        _require_range("drain_s", self.drain_s, 0, 86_400)
        _require_range("engine_timeout_s", self.engine_timeout_s, 1, 86_400)
        _require_range("max_body_mb", self.max_body_mb, 0.001, 1024)
        _require_range("max_queued_requests", self.max_queued_requests, 0, 10**6)
        if self.max_tokens_limit is not None:
            _require_range("max_tokens_limit", self.max_tokens_limit, 1, 2**31 - 1)
        for origin in self.cors_origins:
            _require_origin(origin, has_keys=self.has_keys)
        if self.isolate_cache and not self.has_keys:
            raise InvalidRequest("isolate_cache: needs api_key or api_keys", "isolate_cache")
        if self.host not in LOOPBACK and not self.has_keys and not self.insecure:
            raise InvalidRequest(
                f"host={self.host!r} can be reached from outside this host: it needs api_keys or "
                "api_key (`stemma keygen --api` makes one), or insecure",
                "host",
            )
        _require_range("stream_ping_s", self.stream_ping_s, 0.1, 86_400)
        _require_range("stream_stall_s", self.stream_stall_s, 0.1, 86_400)
        _require_range("max_stream_buffer_kb", self.max_stream_buffer_kb, 1, 1 << 20)

    @property
    def has_keys(self) -> bool:
        """Whether requests need a key."""
        return bool(self.api_key) or self.api_keys is not None


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `stemma serve` that no other command has; defaults are the fields'."""
    http = parser.add_argument_group("HTTP")
    http.add_argument("--host", help="address to listen at (default: %(default)s)")
    http.add_argument("--port", type=int, help="0: any that is free (default: %(default)s)")
    http.add_argument(
        "--keep-alive-s", type=float, metavar="S",
        help="seconds that an idle connection is kept (default: %(default)g)",
    )  # fmt: skip
    http.add_argument(
        "--responses-ttl-s", type=float, metavar="S",
        help="seconds that /v1/responses remembers a response (default: %(default)g)",
    )  # fmt: skip
    life = parser.add_argument_group("starting and stopping")
    life.add_argument(
        "--drain-s", type=float, metavar="S",
        help="seconds that running requests may take to end when the server is asked to stop "
        "(default: %(default)g)",
    )  # fmt: skip
    life.add_argument(
        "--engine-timeout-s", type=float, metavar="S",
        help="restart an engine that has not answered for so many seconds, more than any one of "
        "its steps takes (default: %(default)g)",
    )  # fmt: skip
    streams = parser.add_argument_group("streams")
    streams.add_argument(
        "--stream-ping-s", type=float, metavar="S",
        help="send a comment after so many silent seconds, so that no proxy takes the stream for "
        "dead (default: %(default)g)",
    )  # fmt: skip
    streams.add_argument(
        "--stream-stall-s", type=float, metavar="S",
        help="cut a stream off whose reader takes nothing for so many seconds (default: "
        "%(default)g)",
    )  # fmt: skip
    streams.add_argument(
        "--max-stream-buffer-kb", type=int, metavar="KB",
        help="cut a stream off once so much text waits for its reader, beyond what the sockets "
        "hold (default: %(default)s)",
    )  # fmt: skip
    seeing = parser.add_argument_group("logs, metrics and traces")
    seeing.add_argument("--log-level", choices=LOG_LEVELS, help="default: %(default)s")
    seeing.add_argument(
        "--log-format", choices=LOG_FORMATS, help="a line a request (default: %(default)s)"
    )
    seeing.add_argument(
        "--metrics-compat", action="store_true",
        help="/metrics also under the names that dashboards for SGLang and vLLM read",
    )  # fmt: skip
    seeing.add_argument(
        "--otlp-traces", action="store_true",
        help="export a trace of each request, as OTEL_EXPORTER_OTLP_ENDPOINT says (extra: otel)",
    )  # fmt: skip
    _add_access_flags(parser.add_argument_group("who may come in, and ask for how much"))
    _add_chat_flags(parser.add_argument_group("what is read out of chats' answers"))
    defaults = asdict(ServerSettings())
    parser.set_defaults(**{n: list(v) if isinstance(v, tuple) else v for n, v in defaults.items()})


def _add_chat_flags(group: argparse._ArgumentGroup) -> None:
    """docs/use/tools.md says more of both."""
    group.add_argument(
        "--tool-call-parser", choices=TOOL_CALL_PARSERS,
        help="the format in which the model writes tool calls; auto: as its chat template has it "
        "(default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--reasoning-parser", choices=REASONING_PARSERS,
        help="the tags around the model's reasoning: think <think>, mistral [THINK]; auto: those "
        "of its template or tokenizer (default: %(default)s)",
    )  # fmt: skip


def _add_access_flags(group: argparse._ArgumentGroup) -> None:
    """docs/serve/security.md says more of each."""
    group.add_argument(
        "--api-key", action="append", metavar="KEY",
        help=f"a key that requests must bring; repeatable, also {KEY_VARIABLE}, which `ps` does "
        "not show",
    )  # fmt: skip
    group.add_argument(
        "--api-keys", metavar="FILE",
        help="a file of keys' digests with a name and limits for each, read again when it changes",
    )  # fmt: skip
    group.add_argument(
        "--isolate-cache", action="store_true",
        help="share KV between requests of one key (or tenant) only",
    )  # fmt: skip
    group.add_argument(
        "--insecure", action="store_true", help="listen beyond this host without keys"
    )
    group.add_argument("--metrics-open", action="store_true", help="/metrics needs no key")
    group.add_argument(
        "--cors-origin", action="append", dest="cors_origins", metavar="ORIGIN",
        help="web pages of this origin may use the server; repeatable (default: none)",
    )  # fmt: skip
    group.add_argument(
        "--allowed-host", action="append", dest="allowed_hosts", metavar="NAME",
        help="a name that requests may call this server by; repeatable (default: addresses and "
        "localhost; with keys any)",
    )  # fmt: skip
    group.add_argument(
        "--max-body-mb", type=float, metavar="MB", help="of a request (default: %(default)g)"
    )
    group.add_argument(
        "--max-tokens-limit", type=int, metavar="N",
        help="the most that a request's max_tokens may be (default: what fits the context)",
    )  # fmt: skip
    group.add_argument(
        "--max-queued-requests", type=int, metavar="N",
        help="samples that may wait for the engine, beside those that it runs at once; further "
        "ones get 429 (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--strict-fields", action="store_true",
        help="refuse requests with fields that are not known, which else get a warning header",
    )  # fmt: skip


def server_settings(args: argparse.Namespace) -> ServerSettings:
    """The record from parsed flags."""
    given = {item.name: getattr(args, item.name) for item in fields(ServerSettings)}
    values: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in given.items()}
    if key := os.environ.get(KEY_VARIABLE):
        values["api_key"] = (*values["api_key"], key)
    return ServerSettings(**values)


def _require_range(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise InvalidRequest.of(field, value, f"a number in [{low:g}, {high:g}]")


def _require_origin(origin: str, *, has_keys: bool) -> None:
    is_fine = has_keys if origin == "*" else _ORIGIN.fullmatch(origin) is not None
    if not is_fine:
        allowed = "scheme://host[:port] as browsers write it, or with keys *"
        raise InvalidRequest.of("cors_origin", origin, allowed)
