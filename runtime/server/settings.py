"""How the HTTP side behaves: plain data with its flags, none of it the engine's business.

A setting is a field of `ServerSettings`, a check in `__post_init__`, and a flag of the same name in
one of the groups of `add_server_flags`; nothing else needs to know of it.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, fields

from ...errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Of one `stemma serve`. Raises InvalidRequest for values out of range."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any that is free
    keep_alive_s: float = 75.0  # an idle connection is kept so long; proxies reuse theirs for 60 s
    drain_s: float = 30.0  # how long what runs may take to end once the server is asked to stop
    engine_timeout_s: float = 60.0  # an engine whose loop stands still for longer is restarted
    stream_ping_s: float = 15.0  # a stream that is silent so long says that it lives
    stream_stall_s: float = 60.0  # a stream whose reader takes nothing for so long is cut off
    max_stream_buffer_kb: int = 1024  # or for whom more than so much waits

    def __post_init__(self) -> None:
        _require_range("port", self.port, 0, 65_535)
        _require_range("keep_alive_s", self.keep_alive_s, 1, 86_400)
        _require_range("drain_s", self.drain_s, 0, 86_400)
        _require_range("engine_timeout_s", self.engine_timeout_s, 1, 86_400)
        _require_range("stream_ping_s", self.stream_ping_s, 0.1, 86_400)
        _require_range("stream_stall_s", self.stream_stall_s, 0.1, 86_400)
        _require_range("max_stream_buffer_kb", self.max_stream_buffer_kb, 1, 1 << 20)


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `stemma serve` that no other command has; defaults are the fields'."""
    http = parser.add_argument_group("HTTP")
    http.add_argument("--host", help="address to listen at (default: %(default)s)")
    http.add_argument("--port", type=int, help="0: any that is free (default: %(default)s)")
    http.add_argument(
        "--keep-alive-s", type=float, metavar="S",
        help="seconds that an idle connection is kept (default: %(default)g)",
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
    parser.set_defaults(**asdict(ServerSettings()))


def server_settings(args: argparse.Namespace) -> ServerSettings:
    """The record from parsed flags."""
    names = [field.name for field in fields(ServerSettings)]
    return ServerSettings(**{name: getattr(args, name) for name in names})


def _require_range(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise InvalidRequest.of(field, value, f"a number in [{low:g}, {high:g}]")
