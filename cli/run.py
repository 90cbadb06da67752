"""`stemma run FILE.py`: run a program that a file defines."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..frontend.backend import set_default_backend
from ..frontend.dsl.state import ProgramState
from .connect import Commands, add_backend_flags, open_backend
from .program_file import add_program_flags, find_program, load_programs, program_arguments


def add_parser(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser("run", help="run a program that a file defines")
    add_program_flags(parser)
    parser.add_argument("--seed", type=int, metavar="N", help="fixes all draws")
    parser.add_argument("--json", action="store_true", help="print values and counts as JSON")
    add_backend_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run it; print its text, or with --json its values."""
    given = program_arguments(args.arg)
    if args.seed is not None:
        given.setdefault("seed", args.seed)
    program = find_program(load_programs(args.file), args.function)
    with open_backend(args) as backend:
        set_default_backend(backend)
        state = program.run(**given)
        print(json.dumps(_values(state), default=str) if args.json else state.text())
    return 0


def _values(state: ProgramState) -> dict[str, Any]:
    return {
        "text": state.text(),
        "values": {name: state[name] for name in state.names()},
        "meta": {name: state.get_meta_info(name) for name in state.generated()},
    }
