"""`stemma bench NAME`: the benchmarks of `bench/`, and what they are made of, a subcommand each.

A module of either has `add_flags(parser)` and `run(args) -> exit status`; its first docstring line
is its help. Modules keep heavy imports inside `run`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial

from ..bench import gpu
from ..bench.cache import radix
from ..bench.cluster import replicas, router, shared_kv
from ..bench.constrained import conformance, grammar_load, masks, vocabularies
from ..bench.device import beam, determinism, encoding, kernels, quantization, step
from ..bench.harness import limits, model, workloads
from ..bench.harness.descendants import ending_descendants
from ..bench.harness.report import add_report_flags
from ..bench.scheduling import dsl, placement, programs, schedule, stall
from ..bench.serving import latency, load, memory, plan, serving, startup, threads, watch
from ..bench.speculation import drafting, drafting_peers, oracle, speculation
from .connect import Commands

BENCHMARKS = (
    serving, masks, conformance, grammar_load, radix, schedule, placement, router, replicas,
    shared_kv, step, stall, startup, threads, gpu, dsl, latency, load, programs, limits, watch,
    plan, memory, quantization, determinism, speculation, drafting, drafting_peers, oracle, beam,
    encoding, kernels,
)  # fmt: skip
MAKERS = (model, vocabularies, workloads)


def add_parser(commands: Commands) -> None:
    """Register the command and its benchmarks."""
    parser = commands.add_parser("bench", help="measure: a table, and JSON with the machine")
    names = parser.add_subparsers(dest="benchmark", required=True, metavar="NAME")
    for module in (*BENCHMARKS, *MAKERS):
        name = module.__name__.rpartition(".")[2].replace("_", "-")
        text = (module.__doc__ or "").partition("\n")[0]
        command = names.add_parser(name, help=text, description=module.__doc__)
        module.add_flags(command)
        if module in BENCHMARKS:
            add_report_flags(command)
        command.set_defaults(run=partial(_run, module.run))


def _run(run: Callable[[Namespace], int], args: Namespace) -> int:
    """It leaves no process behind, however it ends, and ends soon when it is asked to."""
    with ending_descendants():
        return run(args)
