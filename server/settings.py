"""How the HTTP side behaves: plain data with its flags, none of it the engine's business.

A setting is a field of `ServerSettings`, from which its flag and its check come; nothing else needs
to know of it.
"""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import InvalidRequest
from ..flags import add_flags, flag, from_flags, integer, misfits, number
from ..frontend.chat_format.reasoning import REASONING_PARSERS
from ..frontend.chat_format.registry import TOOL_CALL_PARSERS

LogFormat = Literal["text", "json"]
LOG_FORMATS: tuple[str, ...] = get_args(LogFormat)
LOG_LEVELS = ("debug", "info", "warning", "error")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
KEY_VARIABLE = "STEMMA_API_KEY"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@]+")  # as browsers write it


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Of one `stemma serve`. Raises InvalidRequest for values out of range."""

    # fmt: off
    host: str = flag("127.0.0.1", "address to listen at", heading="HTTP", metavar="HOST")
    port: int = flag(8000, "0: any that is free", number(0, 65_535), metavar="PORT")
    # Proxies reuse theirs for 60 s.
    keep_alive_s: float = flag(
        75.0, "seconds that an idle connection is kept", number(1, 86_400), metavar="S"
    )
    max_connections: int | None = flag(
        None, "open at a time, of those that the limit of open files allows (default: all of them)",
        number(1, 1 << 20),
    )
    responses_ttl_s: float = flag(
        3600.0, "seconds that /v1/responses remembers a response", number(0, 30 * 86_400),
        metavar="S",
    )

    drain_s: float = flag(
        30.0, "seconds that running requests may take to end when the server is asked to stop",
        number(0, 86_400), heading="starting and stopping", metavar="S",
    )
    engine_timeout_s: float = flag(
        60.0, "restart an engine that runs but has not answered for so many seconds, more than any "
        "one of its steps takes",
        number(1, 86_400), metavar="S",
    )

    stream_ping_s: float = flag(
        15.0, "send a comment after so many silent seconds, so that no proxy takes the stream for "
        "dead",
        number(0.1, 86_400), heading="streams", metavar="S",
    )
    stream_stall_s: float = flag(
        60.0, "cut a stream off whose reader takes nothing for so many seconds",
        number(0.1, 86_400), metavar="S",
    )
    max_stream_buffer_kb: int = flag(
        1024, "cut a stream off once so much text waits for its reader, beyond what the sockets "
        "hold",
        number(1, 1 << 20), metavar="KB",
    )

    log_level: str = flag(
        "info", "default: %(default)s", heading="logs, metrics and traces", choices=LOG_LEVELS
    )
    log_format: LogFormat = flag("text", "a line a request", choices=LOG_FORMATS)
    metrics_compat: bool = flag(
        False, "/metrics also under the names that dashboards for SGLang and vLLM read"
    )
    otlp_traces: bool = flag(
        False,
        "export a trace of each request, as OTEL_EXPORTER_OTLP_ENDPOINT says (extra: otel)",
    )

    # docs/security.md says more of each.
    api_key: tuple[str, ...] = flag(
        (), f"a key that requests must bring; repeatable, also {KEY_VARIABLE}, which `ps` does not "
        "show",
        heading="who may come in, and ask for how much", is_secret=True, metavar="KEY",
    )
    api_keys: str | None = flag(
        None, metavar="FILE",
        help="a file of keys' digests with a name and limits for each, read again when it changes",
    )
    isolate_cache: bool = flag(False, "share KV between requests of one key (or tenant) only")
    insecure: bool = flag(False, "listen beyond this host without keys")
    metrics_open: bool = flag(False, "/metrics needs no key")
    cors_origins: tuple[str, ...] = flag(
        (), "web pages of this origin may use the server; repeatable (default: none)",
        name="--cors-origin", metavar="ORIGIN",
    )
    allowed_hosts: tuple[str, ...] = flag(
        (), "a name that requests may call this server by; repeatable (default: addresses and "
        "localhost; with keys any)",
        name="--allowed-host", metavar="NAME",
    )
    max_body_mb: float | None = flag(
        None, "of a request (default: 64 bytes a token of the context, in [4, 32])",
        number(0.001, 1024), metavar="MB",
    )
    max_tokens_limit: int | None = flag(
        None, "the most that a request's max_tokens may be (default: what fits the context)",
        number(1, 2**31 - 1),
    )
    max_queued_requests: int = flag(
        8192, "samples that may wait for the engine, beside those that it runs at once; further "
        "ones get 429, and so does a key (without keys an address) that has more than are left",
        number(0, 10**6),
    )
    image_root: str | None = flag(
        None, "chats may name images within this folder by file:// (default: no files are read)",
        heading="images of chats", metavar="FOLDER",
    )
    image_hosts: tuple[str, ...] = flag(
        (), "chats may name images of this host by http(s)://, where its addresses are public; "
        "repeatable (default: nothing is fetched)",
        name="--image-host", metavar="NAME",
    )
    image_timeout_s: float = flag(
        5.0, "seconds that fetching an image may take (default: %(default)s)", number(0.1, 600),
        metavar="S",
    )
    max_image_mb: float = flag(
        10.0, "of an image as it is sent, read or fetched (default: %(default)s)",
        number(0.001, 1024), metavar="MB",
    )
    strict_fields: bool = flag(
        False,
        "refuse requests with fields that are not known, which else get a warning header",
    )

    # docs/serve/several-models.md says more of each.
    models_max: int | None = flag(
        None, "how many may be loaded at a time (default: as many as the memory holds)",
        integer(1, 256), heading="several models",
    )
    models_memory_gb: float | None = flag(
        None, "memory for all that are loaded, their KV included (default: nine tenths of what is "
        "available at the start)",
        number(0.001, 1e6), metavar="GB",
    )
    model_load_timeout_s: float = flag(
        600.0, "seconds that a request waits until its model is loaded, then it gets 503",
        number(0.1, 86_400), metavar="S",
    )

    # docs/use/cascades.md says more of both.
    cascade: tuple[str, ...] = flag(
        (), "models with commas between them, the smallest first: a larger one is asked where the "
        "answer of the one before does not do; requests name it cascade:SMALL,LARGE; repeatable",
        metavar="NAMES",
    )
    cascade_accept: str = flag(
        "mean_logprob(-0.01) | agree(0.5)", "which answers do (default: %(default)s)",
        metavar="RULE",
    )

    # docs/use/tools.md says more of both.
    tool_call_parser: str = flag(
        "auto", "the format in which the model writes tool calls; auto: as its chat template's own "
        "marks tell; none: calls are not read, forced ones are plain JSON",
        heading="what is read out of chats' answers", choices=TOOL_CALL_PARSERS,
    )
    reasoning_parser: str = flag(
        "auto", "the tags around the model's reasoning, as think: <think>; auto: those of its "
        "template or else its tokenizer; with the format harmony any but none is its own",
        choices=REASONING_PARSERS,
    )
    # fmt: on

    def __post_init__(self) -> None:
        for misfit in misfits(self):
            raise InvalidRequest.of(*misfit)
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

    @property
    def has_keys(self) -> bool:
        """Whether requests need a key."""
        return bool(self.api_key) or self.api_keys is not None


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `stemma serve` that no other command has."""
    add_flags(parser, ServerSettings)


def server_settings(args: argparse.Namespace) -> ServerSettings:
    """The record from parsed flags, and from the environment its key."""
    key = os.environ.get(KEY_VARIABLE)
    return from_flags(ServerSettings, args, api_key=(*args.api_key, *([key] if key else ())))


def _require_origin(origin: str, *, has_keys: bool) -> None:
    is_fine = has_keys if origin == "*" else _ORIGIN.fullmatch(origin) is not None
    if not is_fine:
        allowed = "scheme://host[:port] as browsers write it, or with keys *"
        raise InvalidRequest.of("cors_origin", origin, allowed)
