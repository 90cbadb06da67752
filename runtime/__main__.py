"""`python -m stemma.runtime`: the engine's process. Started by `st.Engine()` and `stemma serve`."""

from __future__ import annotations

import argparse
import gc
import logging
import signal
import sys
from collections.abc import Sequence

from ..errors import InvalidRequest, StemmaError
from .config import add_engine_flags, engine_config
from .threads import configure_threads, default_num_threads


def main(argv: Sequence[str] | None = None) -> int:
    """Load the model, then serve until stopped; 1 with one line on stderr if that cannot be."""
    parser = argparse.ArgumentParser(prog="python -m stemma.runtime", description=__doc__)
    parser.add_argument(
        "--endpoint",
        action="append",
        required=True,
        metavar="ADDRESS",
        help="where to listen: ipc://PATH or tcp://127.0.0.1:PORT (may be repeated)",
    )
    parser.add_argument(
        "--watch-stdin",
        action="store_true",
        help="end when standard input closes (so never to outlive a parent)",
    )
    parser.add_argument("--log-level", default="WARNING", help="default: %(default)s")
    add_engine_flags(parser)
    args = parser.parse_args(argv)
    logging.basicConfig(level=args.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    try:
        _serve(args)
    except StemmaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _serve(args: argparse.Namespace) -> None:
    for endpoint in args.endpoint:
        _require_local(endpoint)
    config = engine_config(args)
    configure_threads(config.num_threads or default_num_threads(config.model), config.spin_us)
    from .engine import LoadedModel
    from .server.gateway import Gateway

    stop_fd = sys.stdin.fileno() if args.watch_stdin else None
    gateway = Gateway(LoadedModel(config), args.endpoint, stop_fd=stop_fd)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: gateway.stop())
    gc.collect()
    gc.freeze()  # the model and the modules never become garbage; keep collections short
    gateway.run()


def _require_local(endpoint: str) -> None:
    """Off this host a connection needs keys (CURVE), which come later."""
    local = ("ipc://", "tcp://127.0.0.1:", "tcp://localhost:", "tcp://[::1]:")
    if not endpoint.startswith(local):
        raise InvalidRequest.of("endpoint", endpoint, f"an address that starts with {local}")


if __name__ == "__main__":
    sys.exit(main())
