"""Assembles the commands and runs the one that was asked for.

A command's module has `add_parser(commands)` and `run(args) -> exit status`. Only the module of
the command that is asked for is imported, for help all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from .. import __version__
from ..errors import StemmaError
from ..flags import Parser

MODULES = {
    "demo": "demo", "run": "run", "chat": "chat", "generate": "generate", "serve": "serve",
    "deploy": "serve",
    "keygen": "keys", "bench": "bench", "trace": "trace", "tree": "tree", "doctor": "doctor",
    "plan": "plan", "schema": "schema", "quantize": "quantize", "train-draft": "train_draft",
}  # fmt: skip


def run_command(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 failed with one line on stderr, 2 wrong usage."""
    parser = Parser(prog="stemma", description="A runtime for structured LLM programs.")
    parser.add_argument("--version", action="version", version=f"stemma {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    argv = sys.argv[1:] if argv is None else argv
    asked = argv[0] if argv else None
    for name in [MODULES[asked]] if asked in MODULES else dict.fromkeys(MODULES.values()):
        import_module(f".{name}", __package__).add_parser(commands)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except StemmaError as error:
        print(f"stemma {args.command}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `stemma tree | head`
        sys.stderr.close()
        return 0
