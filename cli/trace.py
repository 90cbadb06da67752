"""`stemma trace FILE.py`: what a file's programs send before they wait; `--run`: what they did."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from traceback import format_exception_only
from typing import Any

from ..errors import InvalidRequest, StemmaError
from ..frontend.backend import set_default_backend
from ..frontend.client.backend import Backend
from ..frontend.dsl.function import Function
from ..frontend.trace.graph import Graph
from ..frontend.trace.graph_picture import page_of, svg_of
from ..frontend.trace.observer import recorded_programs
from ..frontend.trace.report import Report, report_of_all
from .connect import Commands, add_backend_flags, open_backend
from .program_file import (
    add_program_flags,
    asked_program,
    failure_of,
    find_program,
    load_programs,
    program_arguments,
    require_file,
    run_script,
)


def add_parser(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "trace", help="show what programs send before they wait, or what a run of them cost"
    )
    add_program_flags(parser, "all of the file; with --run main, or the only one")
    parser.add_argument(
        "--run",
        action="store_true",
        dest="is_run",
        help="run it as `stemma run` does and report what each call cost",
    )
    parser.add_argument(
        "--script",
        action="store_true",
        help="with --run: run the file as `python FILE` does, its main block included",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="with --run: fixes all draws")
    parser.add_argument(
        "--html",
        type=Path,
        metavar="OUT",
        help="write the picture, or with --run the timeline "
        "(default with --run: FILE-timeline.html here)",
    )
    parser.add_argument("--svg", type=Path, metavar="OUT", help="write the picture as SVG")
    parser.add_argument("--json", action="store_true", help="print it as data")
    add_backend_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the captured graphs, or the report of a run."""
    if args.is_run:
        return _run(args)
    if args.script:
        raise InvalidRequest.of("script", True, "only together with --run")
    return _capture(args)


# --- what would be sent ---------------------------------------------------------------------------


def _capture(args: argparse.Namespace) -> int:
    """1 when a program raised before it waited; the others are shown all the same."""
    given = program_arguments(args.arg)
    programs = load_programs(args.file)
    if args.function is not None or not programs:
        programs = {args.function or "main": find_program(programs, args.function)}
    _require_known(given, programs)
    graphs: list[Graph] = []
    failures: list[str] = []
    for program in programs.values():
        known = {name: given[name] for name in given if name in program.parameters}
        try:
            graphs.append(program.trace(**known))
        except StemmaError as error:
            failures.append(str(error))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also sys.exit(): the others are shown all the same
            failures.append(f"{program.__name__}: {format_exception_only(error)[-1].rstrip()}")
    if args.json:
        print(json.dumps([graph.to_json() for graph in graphs]))
    elif graphs:
        print("\n\n".join(graph.to_text() for graph in graphs))
    if graphs:
        _write(args.html, lambda: page_of(graphs))
        _write(args.svg, lambda: svg_of(graphs))
    for failure in failures:
        print(f"stemma trace: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _require_known(given: dict[str, Any], programs: dict[str, Function]) -> None:
    known = sorted({n for program in programs.values() for n in program.parameters})
    for name in given:
        if name not in known:
            raise InvalidRequest.of("arg", name, f"a parameter of the file's programs: {known}")


# --- what a run did -------------------------------------------------------------------------------


def _run(args: argparse.Namespace) -> int:
    """The report is printed and written also when the run fails."""
    if args.svg is not None:
        raise InvalidRequest.of("svg", str(args.svg), "only without --run; use --html")
    work = _script(args) if args.script else asked_program(args)
    failure: BaseException | None = None
    with open_backend(args) as backend:
        set_default_backend(backend)
        with recorded_programs() as programs:
            try:
                with contextlib.redirect_stdout(sys.stderr if args.json else sys.stdout):
                    work()
            except (Exception, SystemExit) as error:
                failure = error
        if isinstance(failure, SystemExit) and not failure.code:
            failure = None
        report = report_of_all(programs, _tree(backend))
        set_default_backend(None)
    _show(report, args)
    if failure is None:
        return 0
    if isinstance(failure, StemmaError | SystemExit):
        raise failure
    raise failure_of(args.file, failure) from failure


def _tree(backend: Backend) -> dict[str, Any] | None:
    """None where the engine has died."""
    try:
        return backend.tree()
    except StemmaError:
        return None


def _script(args: argparse.Namespace) -> Callable[[], object]:
    """Runs the whole file, which gets no arguments."""
    for field in ("function", "arg", "seed"):
        if getattr(args, field) not in (None, []):
            raise InvalidRequest.of(field, getattr(args, field), "not together with --script")
    require_file(args.file)
    return lambda: run_script(args.file)


def _show(report: Report, args: argparse.Namespace) -> None:
    print(json.dumps(report.to_json(), default=str) if args.json else report.to_text())
    target = args.html
    if target is None and not args.json:
        target = Path(f"{args.file.stem}-timeline.html")
    _write(target, report.to_html)


def _write(target: Path | None, made: Callable[[], str]) -> None:
    if target is None:
        return
    try:
        target.write_text(made(), encoding="utf-8")
    except OSError as error:
        raise InvalidRequest.of("path", str(target), f"a file to write ({error})") from error
    print(f"wrote {target}", file=sys.stderr)
