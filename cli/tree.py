"""`stemma tree`: the radix tree of a running server, of all its engines or of one."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from typing import Any

from ..frontend.backend import Runtime
from ..frontend.client.backend import Backend
from ..radix.render import render, render_fleet
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
    parser.add_argument(
        "--replica", type=int, metavar="K", help="of several engines only this one's tree"
    )
    parser.add_argument("--json", action="store_true", help="print the tree as data")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the picture, or the data."""
    endpoint = args.endpoint or default_endpoint(args.port)
    keys = {"server_key": args.server_key, "client_key": args.client_key}
    with Runtime(endpoint, **keys) as backend:
        tree = backend.tree(args.replica)
    if args.json:
        print(json.dumps(tree))
    else:
        print(picture_of(tree, max_depth=args.max_depth, max_children=args.max_children))
    return 0


def draw(backend: Backend, *, max_depth: int = 8, max_children: int = 8) -> str:
    """The backend's tree for standard output, and how full the pool is."""
    return picture_of(backend.tree(), max_depth=max_depth, max_children=max_children)


def picture_of(tree: dict[str, Any], *, max_depth: int, max_children: int) -> str:
    """One engine's tree, or that of all with who has what, and how full the pools are."""
    bounds: dict[str, Any] = {"max_depth": max_depth, "max_children": max_children}
    bounds["width"] = _width()
    nodes = tree["nodes"]
    if "replicas" in tree:
        names = [str(each["replica"]) for each in tree["replicas"]]
        lines = [render_fleet(nodes, names, **bounds)]
        lines += [] if tree["is_whole"] else [f"these {len(nodes):,} were used last"]
        return "\n".join([*lines, _summary(tree), *map(_report, tree["replicas"])])
    texts = {tuple(node["token_ids"]): node["text"] for node in nodes}
    picture = render(nodes, lambda ids: texts.get(tuple(ids), ""), **bounds)
    return f"{picture}\n{_summary(tree)}"


def _width() -> int | None:
    """The terminal's; a file or another program gets texts as long as they are."""
    return min(shutil.get_terminal_size().columns, 140) if sys.stdout.isatty() else None


def _report(replica: dict[str, Any]) -> str:
    """How a replica is, and what it has."""
    said = f"replica {replica['replica']}: {replica['state']}"
    if replica.get("total_tokens") is not None:
        said += f", {replica['cached_tokens']:,} of {replica['total_tokens']:,} tokens cached"
        said += "" if replica["is_cache_known"] else ", which of them it does not say"
    return said


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
