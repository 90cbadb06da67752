"""A Python file that defines programs: loading it, finding them, arguments for them."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import InvalidProgram, InvalidRequest
from ..frontend.dsl.function import Function


def add_program_flags(
    parser: argparse.ArgumentParser, default: str = "main, or the only one"
) -> None:
    """The file, `--function` and `--arg`; `default` says which programs run without a name."""
    parser.add_argument("file", type=Path, help="a Python file with a @stemma.function")
    parser.add_argument("--function", metavar="NAME", help=f"which one (default: {default})")
    parser.add_argument(
        "--arg",
        action="append",
        default=[],
        metavar="K=V",
        help="an argument; V is read as JSON where it is JSON, else as text (repeatable)",
    )


def load_programs(file: Path) -> dict[str, Function]:
    """All programs at the file's top level, by name; its main block does not run.

    Raises InvalidRequest if there is no such file, or it raises.
    """
    return {name: value for name, value in vars(_load(file)).items() if isinstance(value, Function)}


def find_program(programs: dict[str, Function], name: str | None) -> Function:
    """That of the name; without one main, or the only one. Raises InvalidRequest."""
    if name is None:
        name = "main" if "main" in programs or len(programs) != 1 else next(iter(programs))
    if name not in programs:
        known = ", ".join(programs) or "none"
        raise InvalidRequest.of("function", name, f"a @function of the file (it has: {known})")
    return programs[name]


def asked_program(args: argparse.Namespace) -> Callable[[], Any]:
    """Runs the program of these flags, and `--seed`, with its arguments; returns the state. Raises
    InvalidRequest at once for what cannot be run."""
    given = program_arguments(args.arg)
    if args.seed is not None:
        given.setdefault("seed", args.seed)
    program = find_program(load_programs(args.file), args.function)
    try:
        program.check(**given)
    except InvalidProgram as error:
        told = f"{error}; given by --arg NAME=VALUE: {', '.join(given) or 'none'}"
        raise InvalidRequest(told, "arg") from None
    return lambda: program.run(**given)


def program_arguments(pairs: Sequence[str]) -> dict[str, Any]:
    """Of `--arg`. Raises InvalidRequest."""
    return dict(_argument(pair) for pair in pairs)


def require_file(file: Path) -> None:
    """Raises InvalidRequest."""
    if not file.is_file():
        raise InvalidRequest.of("file", str(file), "an existing Python file")


def run_script(file: Path) -> None:
    """As `python FILE` does, its main block included, without arguments. Raises what it raises."""
    before = sys.argv
    sys.argv = [str(file)]
    sys.path.insert(0, str(file.resolve().parent))
    try:
        runpy.run_path(str(file.absolute()), run_name="__main__")
    finally:
        sys.argv = before


def failure_of(file: Path, error: BaseException) -> InvalidRequest:
    """What tells the user that a program of this file has raised `error`."""
    return InvalidRequest(f"{file} failed:\n{own_traceback(error, file)}")


def own_traceback(error: BaseException, file: Path) -> str:
    """As Python shows what ends a script: from the first line of the file itself on."""
    shown = traceback.TracebackException.from_exception(error)
    own = itertools.dropwhile(lambda frame: Path(frame.filename) != file.absolute(), shown.stack)
    shown.stack = traceback.StackSummary.from_list(list(own))
    return "".join(shown.format()).rstrip()


def _load(file: Path) -> ModuleType:
    require_file(file)
    spec = importlib.util.spec_from_file_location("__stemma_program__", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise InvalidRequest(f"{file} cannot be loaded:\n{own_traceback(error, file)}") from error
    return module


def _argument(pair: str) -> tuple[str, Any]:
    name, found, text = pair.partition("=")
    if not found or not name.isidentifier():
        raise InvalidRequest.of("arg", pair, "NAME=VALUE")
    try:
        return name, json.loads(text)
    except ValueError:
        return name, text
