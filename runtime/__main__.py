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

from ..errors import ModelLoadError, StemmaError
from ..frontend.client.engine_process import NOT_LOADED, REFUSED
from ..frontend.client.progress import byte_progress
from .config import add_engine_flags, engine_config, located
from .execute.threads import configure_threads, default_num_threads
from .execute.torch_import import import_torch, preload_torch
from .sessions.listener import LINGER_MS, server_keys
from .sessions.process import parse, process_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Load the model, then serve until stopped; if that cannot be, `REFUSED` or `NOT_LOADED` with
    one line on stderr."""
    parser = process_parser("python -m stemma.runtime", __doc__)
    add_engine_flags(parser)
    try:
        args = parse(parser, argv)
        logging.basicConfig(level=args.log_level, format="%(levelname)s %(name)s: %(message)s")
        _serve(args)
    except StemmaError as error:
        print(f"error: {error}", file=sys.stderr)
        return NOT_LOADED if isinstance(error, ModelLoadError) else REFUSED
    return 0


def _serve(args: argparse.Namespace) -> None:
    keys = server_keys(args, args.endpoint)
    config = engine_config(args)
    with byte_progress(sys.stderr, f"fetching {config.model_name}") as on_progress:
        config = located(config, on_progress)
    num_threads = config.num_threads or default_num_threads(
        Path(config.model), config.num_processes
    )
    configure_threads(num_threads, config.spin_us)
    gc.disable()  # modules are no garbage: a fifth of importing torch would go to looking for some
    if config.device == "cpu":  # for GPUs torch loads CUDA's libraries first
        preload_torch()
    from .encoder_engine import load
    from .gateway.gateway import Gateway

    import_torch()
    from .execute import model_runner  # noqa: F401

    gc.freeze()
    gc.enable()
    stop_fd = sys.stdin.fileno() if args.watch_stdin else None
    gateway = Gateway(load(config), args.endpoint, stop_fd=stop_fd, grace_s=args.grace_s, keys=keys)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: gateway.stop())
    if args.watch_stdin:  # whoever stops its owner (systemd: all at once) lets that drain first
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    gc.collect()
    gc.freeze()  # the model never becomes garbage either; keep collections short
    gateway.run()
    zmq.Context.instance().destroy(LINGER_MS)  # waits for what is on its way, the farewell at last


if __name__ == "__main__":
    sys.exit(main())
