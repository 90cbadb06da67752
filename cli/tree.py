"""`stemma tree`: the radix tree of a running server."""

from __future__ import annotations

import argparse
import json
import shutil
from typing import Any

from ..frontend.backend import Runtime
from ..frontend.client.backend import Backend
from ..radix.render import render
from .connect import DEFAULT_PORT, Commands, add_key_flags, default_endpoint


def add_parser(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser("tree", help="show the radix tree of a running server")
    parser.add_argument("--endpoint", metavar="ADDRESS", help="the server's ZeroMQ address")
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help="or its HTTP port (default: %(default)s)"
    )
    add_key_flags(parser)
    parser.add_argument("--max-depth", type=int, default=12, metavar="N", help="levels to show")
    parser.add_argument("--max-children", type=int, default=12, metavar="N", help="a node's")
    parser.add_argument("--json", action="store_true", help="print the tree as data")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the picture, or the data."""
    endpoint = args.endpoint or default_endpoint(args.port)
    keys = {"server_key": args.server_key, "client_key": args.client_key}
    with Runtime(endpoint, **keys) as backend:
        if args.json:
            print(json.dumps(backend.tree()))
        else:
            print(draw(backend, max_depth=args.max_depth, max_children=args.max_children))
    return 0


def draw(backend: Backend, *, max_depth: int = 8, max_children: int = 8) -> str:
    """The backend's tree for this terminal, and how full the pool is."""
    tree = backend.tree()
    nodes = tree["nodes"]
    texts = {tuple(node["token_ids"]): node["text"] for node in nodes}
    picture = render(
        nodes,
        lambda ids: texts.get(tuple(ids), ""),
        width=min(shutil.get_terminal_size((100, 24)).columns, 140),
        max_depth=max_depth,
        max_children=max_children,
    )
    return f"{picture}\n{_summary(tree)}"


def _summary(tree: dict[str, Any]) -> str:
    """How full each tier is."""
    lines = [
        f"{tree['cached_tokens']:,} of {tree['total_tokens']:,} tokens cached, "
        f"{tree['evictable_tokens']:,} evictable"
    ]
    leases, host = tree["leases"], tree["host"]
    if leases["num_leases"]:
        lines.append(
            f"{leases['num_leases']:,} leases: {leases['leased_tokens']:,} tokens kept, "
            f"{leases['pinned_tokens']:,} of {leases['max_pinned_tokens']:,} pinned"
        )
    if host is not None:
        lines.append(f"host: {host['cached_tokens']:,} of {host['total_tokens']:,} tokens cached")
    return "\n".join(lines)
