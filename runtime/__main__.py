"""`python -m stemma.runtime`: the engine's process. Started by `st.Engine()` and `stemma serve`."""

from __future__ import annotations

import argparse
import gc
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import zmq

from ..errors import InvalidRequest, StemmaError
from ..flags import Parser
from ..frontend.client.progress import byte_progress
from .config import add_engine_flags, engine_config, located
from .execute.threads import configure_threads, default_num_threads
from .sessions.listener import LINGER_MS, add_client_flags, server_keys

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def main(argv: Sequence[str] | None = None) -> int:
    """Load the model, then serve until stopped; 1 with one line on stderr if that cannot be."""
    parser = Parser(prog="python -m stemma.runtime", description=__doc__, exit_on_error=False)
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
    add_engine_flags(parser)
    try:
        args = _parsed(parser, argv)
        logging.basicConfig(level=args.log_level, format="%(levelname)s %(name)s: %(message)s")
        _serve(args)
    except StemmaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parsed(parser: Parser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags. Raises InvalidRequest for a value that cannot be one, under the name that it has
    as an option of `st.Engine`."""
    try:
        return parser.parse_args(argv)
    except argparse.ArgumentError as error:
        field = str(error.argument_name).lstrip("-").replace("-", "_")
        raise InvalidRequest(f"{field}: {error.message}", field) from None


def _serve(args: argparse.Namespace) -> None:
    keys = server_keys(args, args.endpoint)
    config = engine_config(args)
    with byte_progress(sys.stderr, f"fetching {config.model_name}") as on_progress:
        config = located(config, on_progress)
    num_threads = config.num_threads or default_num_threads(Path(config.model))
    configure_threads(num_threads, config.spin_us)
    from .engine import LoadedModel
    from .gateway.gateway import Gateway

    stop_fd = sys.stdin.fileno() if args.watch_stdin else None
    gateway = Gateway(
        LoadedModel(config), args.endpoint, stop_fd=stop_fd, grace_s=args.grace_s, keys=keys
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: gateway.stop())
    if args.watch_stdin:  # whoever stops its owner (systemd: all at once) lets that drain first
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    gc.collect()
    gc.freeze()  # the model and the modules never become garbage; keep collections short
    gateway.run()
    zmq.Context.instance().destroy(LINGER_MS)  # waits for what is on its way, the farewell at last


if __name__ == "__main__":
    sys.exit(main())
