"""`stemma keygen`: keys for tcp, of a runtime and of its clients, and keys of the HTTP API."""

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
        "keygen", help="make the keys for tcp:// (CURVE), or a key of the HTTP API"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("keys"), metavar="DIR",
        help="where to write them (default: %(default)s); the runtime's pair is made once",
    )  # fmt: skip
    parser.add_argument(
        "--client", default="client", metavar="NAME",
        help="whose pair to make (default: %(default)s); one for each client can be revoked alone",
    )  # fmt: skip
    parser.add_argument(
        "--api", action="store_true",
        help="make a key of the HTTP API for --client instead, and print it: it is kept nowhere",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write what is not there yet, and say how to use it."""
    if args.api:
        return _print_api_key(args.client)
    from ..frontend.protocol.keys import write_pair

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


def _print_api_key(name: str) -> int:
    from ..server.access.api_keys import file_entry, new_key

    key = new_key()
    print(f"the key of {name}, shown this once:\n\n  {key}\n")
    print(f"for the file of `stemma serve --api-keys FILE`:\n\n{file_entry(name, key)}")
    print("for one key alone, without a file: STEMMA_API_KEY=... stemma serve")
    return 0
