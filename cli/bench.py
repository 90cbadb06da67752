"""`stemma bench NAME`: the benchmarks of `bench/`, one subcommand each.

A benchmark's module has `add_flags(parser)` and `run(args) -> exit status`; its first docstring
line is its help. Modules keep heavy imports inside `run`.
"""

from __future__ import annotations

from ..bench import schedule, startup, threads
from ..bench.report import add_report_flags
from .connect import Commands

BENCHMARKS = (schedule, startup, threads)


def add_parser(commands: Commands) -> None:
    """Register the command and its benchmarks."""
    parser = commands.add_parser("bench", help="measure: a table, and JSON with the machine")
    names = parser.add_subparsers(dest="benchmark", required=True, metavar="NAME")
    for module in BENCHMARKS:
        name = module.__name__.rpartition(".")[2]
        text = (module.__doc__ or "").partition("\n")[0]
        benchmark = names.add_parser(name, help=text, description=module.__doc__)
        module.add_flags(benchmark)
        add_report_flags(benchmark)
        benchmark.set_defaults(run=module.run)
