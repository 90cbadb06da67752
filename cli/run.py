"""`stemma run FILE.py`: run a program that a file defines."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import InvalidRequest
from ..frontend.backend import set_default_backend
from ..frontend.function import Function
from ..frontend.state import ProgramState
from .connect import Commands, add_backend_flags, open_backend


def add_parser(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser("run", help="run a program that a file defines")
    parser.add_argument("file", type=Path, help="a Python file with a @stemma.function")
    parser.add_argument(
        "--function", metavar="NAME", help="which one (default: main, or the only one)"
    )
    parser.add_argument(
        "--arg",
        action="append",
        default=[],
        metavar="K=V",
        help="an argument; V is read as JSON where it is JSON, else as text (repeatable)",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="fixes all draws")
    parser.add_argument("--json", action="store_true", help="print values and counts as JSON")
    add_backend_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run it; print its text, or with --json its values."""
    arguments = dict(_argument(pair) for pair in args.arg)
    program = _find(_load(args.file), args.function)
    with open_backend(args) as backend:
        set_default_backend(backend)
        state = program.run(seed=args.seed, **arguments)
        print(json.dumps(_values(state), default=str) if args.json else state.text())
    return 0


def _load(file: Path) -> ModuleType:
    if not file.is_file():
        raise InvalidRequest.of("file", str(file), "an existing Python file")
    spec = importlib.util.spec_from_file_location("__stemma_program__", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.resolve().parent))
    spec.loader.exec_module(module)
    return module


def _find(module: ModuleType, name: str | None) -> Function:
    programs = {n: value for n, value in vars(module).items() if isinstance(value, Function)}
    if name is None:
        name = "main" if "main" in programs or len(programs) != 1 else next(iter(programs))
    if name not in programs:
        known = ", ".join(programs) or "none"
        raise InvalidRequest.of("function", name, f"a @function of the file (it has: {known})")
    return programs[name]


def _argument(pair: str) -> tuple[str, Any]:
    name, found, text = pair.partition("=")
    if not found or not name.isidentifier():
        raise InvalidRequest.of("arg", pair, "NAME=VALUE")
    try:
        return name, json.loads(text)
    except ValueError:
        return name, text


def _values(state: ProgramState) -> dict[str, Any]:
    return {
        "text": state.text(),
        "values": {name: state[name] for name in state.names()},
        "meta": {name: state.get_meta_info(name) for name in state.generated()},
    }
