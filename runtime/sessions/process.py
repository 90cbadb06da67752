"""The flags of a process that listens: an engine's, or a router's of several."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ...errors import InvalidRequest
from ...flags import Parser
from .listener import add_client_flags

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def process_parser(program: str, description: str | None) -> Parser:
    """With where to listen, for whom, and until when."""
    parser = Parser(prog=program, description=description, exit_on_error=False)
    parser.add_argument(
        "--endpoint",
        action="append",
        required=True,
        metavar="ADDRESS",
        help="where to listen: ipc://PATH or tcp://HOST:PORT (may be repeated)",
    )
    add_client_flags(parser)
    parser.add_argument(
        "--watch-stdin",
        action="store_true",
        help="end when standard input closes (so never to outlive a parent)",
    )
    parser.add_argument(
        "--log-level",
        type=str.upper,
        choices=LOG_LEVELS,
        default="WARNING",
        help="default: %(default)s",
    )
    return parser


def parse(parser: Parser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags. Raises InvalidRequest for a value that cannot be one, under the name that it has
    as an option of `st.Engine`."""
    try:
        return parser.parse_args(argv)
    except argparse.ArgumentError as error:
        field = str(error.argument_name).lstrip("-").replace("-", "_")
        raise InvalidRequest(f"{field}: {error.message}", field) from None
