"""`stemma keygen`: the keys that a runtime and its clients need to talk over tcp."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from ..errors import InvalidRequest
from .connect import Commands

SERVER = "server"
CLIENTS = "clients"  # the folder of public keys that `stemma serve --client-keys` takes
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def add_parser(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "keygen", help="make the keys for tcp:// (CURVE) of a runtime and of its clients"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("keys"), metavar="DIR",
        help="where to write them (default: %(default)s); the runtime's pair is made once",
    )  # fmt: skip
    parser.add_argument(
        "--client", default="client", metavar="NAME",
        help="whose pair to make (default: %(default)s); one for each client can be revoked alone",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write what is not there yet, and say how to use it."""
    from ..frontend.keys import write_pair

    if not _NAME.fullmatch(args.client) or args.client == SERVER:
        raise InvalidRequest.of("client", args.client, f"letters, digits, ._-, not {SERVER!r}")
    folder: Path = args.out
    if not (folder / f"{SERVER}.key_secret").exists():
        write_pair(folder, folder, SERVER)
    _, secret = write_pair(folder, folder / CLIENTS, args.client)
    print(f"written to {folder} (secret keys are readable by you alone)")
    server, clients = folder / f"{SERVER}.key", folder / CLIENTS
    flags = f"--server-key {server}_secret --client-keys {clients}"
    print(f"  runtime   stemma serve --endpoint tcp://0.0.0.0:5555 {flags}")
    keys = f'server_key="{server}", client_key="{secret}"'
    print(f'  client    stemma.Runtime("tcp://HOST:5555", {keys})')
    return 0
