"""`stemma serve`: a runtime for others, over ZeroMQ and HTTP."""

from __future__ import annotations

import argparse
import sys

from ..runtime.config import add_engine_flags
from ..runtime.gateway.listener import add_client_flags, server_keys
from ..runtime.server.settings import add_server_flags, server_settings
from .connect import Commands, default_endpoint, start_engine


def add_parser(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser("serve", help="serve programs (ZeroMQ) and OpenAI's API (HTTP)")
    add_server_flags(parser)
    programs = parser.add_argument_group("programs (ZeroMQ)")
    programs.add_argument(
        "--endpoint", metavar="ADDRESS",
        help="ZeroMQ address, ipc://PATH or tcp://HOST:PORT (default: an ipc file by the port)",
    )  # fmt: skip
    add_client_flags(programs)
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted."""
    settings = server_settings(args)
    import uvicorn

    from ..runtime.server.app import create_app
    from ..runtime.server.connections import HttpProtocol

    endpoint = args.endpoint or default_endpoint(args.port)
    server_keys(args, (endpoint,))  # refuse here what the engine's process would refuse
    flags = {name: getattr(args, name) for name in ("server_key", "client_keys", "grace_s")}
    with start_engine(args, listen=(endpoint,), **flags) as engine:
        info = engine.connection.info
        address = f"http://{args.host}:{args.port}"
        print(f"{info['model']} ({info['dtype']}, context {info['max_model_len']})")
        print(f"  HTTP      {address}/v1   (OpenAI's completions and chat; {address}/health)")
        keys = ", server_key=..., client_key=..." if args.server_key else ""
        print(f'  programs  stemma.Runtime("{endpoint}"{keys})')
        print("  stop      Ctrl-C", flush=True)
        config = uvicorn.Config(
            create_app(engine, settings),
            host=args.host,
            port=args.port,
            http=HttpProtocol,
            log_level="warning",
        )
        server = uvicorn.Server(config)
        server.run()
        if not server.started:
            print(f"stemma serve: cannot listen at {address}", file=sys.stderr)
            return 1
    return 0
