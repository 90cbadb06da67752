"""How a command gets its backend: a running server by address, or an engine of its own."""

from __future__ import annotations

import argparse
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import InvalidRequest
from ..frontend.backend import Engine, Runtime
from ..frontend.client.backend import Backend
from ..frontend.client.progress import byte_progress
from ..frontend.client.temporary_folder import parent_of_sockets
from ..runtime.checkpoint.location import EMBEDDED_MODEL, locate_model
from ..runtime.config import add_engine_flags, engine_config, located, options_of

DEFAULT_PORT = 8000

# argparse's own type is private.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_backend_flags(parser: argparse.ArgumentParser) -> None:
    """`--endpoint`, or the flags of an engine."""
    parser.add_argument(
        "--endpoint",
        metavar="ADDRESS",
        help="use the runtime at this address, ZeroMQ or http:// (as `stemma serve` prints them), "
        "instead of starting an engine",
    )
    add_key_flags(parser)
    add_engine_flags(parser)


def add_key_flags(parser: argparse.ArgumentParser) -> None:
    """The keys for an endpoint that needs them."""
    parser.add_argument(
        "--server-key", metavar="FILE", help="with --endpoint tcp://...: the runtime's public key"
    )
    parser.add_argument(
        "--client-key", metavar="FILE", help="with --endpoint tcp://...: this client's secret key"
    )


def open_backend(args: argparse.Namespace) -> Backend:
    """Connect or start, as the flags say."""
    if args.endpoint:
        return Runtime(args.endpoint, server_key=args.server_key, client_key=args.client_key)
    return start_engine(args)


def start_engine(args: argparse.Namespace) -> Engine:
    """An engine with the flags' values. Raises InvalidRequest before anything is started."""
    options = engine_options(args)
    return Engine(options.pop("model", None), **options)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The flags' values that are not the defaults, with the model's folder in place of its hub id,
    for which it is fetched here. Raises InvalidRequest or ModelLoadError."""
    config = engine_config(args)
    with byte_progress(sys.stderr, f"fetching {config.model_name}") as on_progress:
        return options_of(located(config, on_progress))


@contextmanager
def described_model(args: argparse.Namespace) -> Iterator[Path]:
    """The folder of `args.model` (None: of the embedded model) for commands that only ask about
    it, as long as the block lasts: the weights of a hub id are not fetched. Raises InvalidRequest
    or ModelLoadError."""
    if args.model is None:
        yield EMBEDDED_MODEL
        return
    with tempfile.TemporaryDirectory(prefix="stemma-") as scratch:
        with byte_progress(sys.stderr, f"fetching {args.model}") as on_progress:
            folder = locate_model(
                args.model,
                revision=args.revision,
                on_progress=on_progress,
                describe_in=Path(scratch),
            )
        yield folder


def add_model_argument(parser: argparse.ArgumentParser, text: str) -> None:
    """MODEL and --revision, for `described_model`."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=text)
    parser.add_argument("--revision", metavar="NAME", help="of a hub id: branch, tag or commit")


def default_endpoint(port: int = DEFAULT_PORT) -> str:
    """Where this user's `stemma serve --port PORT` listens. Raises InvalidRequest."""
    return f"ipc://{own_folder()}/{port}.ipc"


def own_folder() -> Path:
    """The folder of this user's default endpoints, which nobody else may enter. Raises
    InvalidRequest where another user might have prepared it, or its path is too long."""
    folder = parent_of_sockets() / f"stemma-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not is_own or stat.S_IMODE(found.st_mode) & 0o077:
        allowed = "a folder (no link) that this user owns and no other may enter; remove it, or set"
        raise InvalidRequest.of("endpoint", str(folder), f"{allowed} --endpoint or TMPDIR")
    return folder
