"""`stemma run FILE.py`: run a program that a file defines."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..errors import StemmaError
from ..frontend.backend import set_default_backend
from ..frontend.dsl.result import Result
from ..frontend.dsl.state import ProgramState
from .connect import Commands, add_backend_flags, open_backend
from .program_file import add_program_flags, asked_program, failure_of


def add_parser(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser("run", help="run a program that a file defines")
    add_program_flags(parser)
    parser.add_argument("--seed", type=int, metavar="N", help="fixes all draws")
    parser.add_argument("--json", action="store_true", help="print values and counts as JSON")
    add_backend_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run it; print its text and what it returns, or with --json its values, too."""
    run_asked = asked_program(args)
    with open_backend(args) as backend:
        set_default_backend(backend)
        try:
            state = run_asked()
        except StemmaError:
            raise
        except Exception as error:
            raise failure_of(args.file, error) from error
        returned = None if isinstance(state.ret_value, ProgramState) else state.ret_value
        if args.json:
            print(json.dumps({**_values(state), "returned": returned}, default=str))
        else:
            print(state.text())
            if returned is not None:
                print(f"returned: {returned}")
    return 0


def _values(state: ProgramState | Result) -> dict[str, Any]:
    return {
        "text": state.text(),
        "values": {name: state[name] for name in state.names()},
        "meta": {name: state.get_meta_info(name) for name in state.generated()},
    }
