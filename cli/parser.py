"""Assembles the commands and runs the one that was asked for.

A command's module has `add_parser(commands)` and `run(args) -> exit status`; it is imported with
its siblings, so modules keep heavy imports inside `run`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .. import __version__
from ..errors import StemmaError
from . import bench, chat, demo, doctor, generate, keys, run, serve, trace, tree

COMMANDS = (demo, run, chat, generate, serve, keys, bench, trace, tree, doctor)


def run_command(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 failed with one line on stderr, 2 wrong usage, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="stemma", description="A runtime for structured LLM programs."
    )
    parser.add_argument("--version", action="version", version=f"stemma {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.add_parser(commands)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except StemmaError as error:
        print(f"stemma {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `stemma tree | head`
        sys.stderr.close()
        return 0
