"""`stemma bench NAME`: the benchmarks of `bench/`, and what they are made of, a subcommand each.

A module of either has `add_flags(parser)` and `run(args) -> exit status`; its first docstring line
is its help. Only the module that is asked for is imported, for the help of `stemma bench` all of
them. Modules keep heavy imports inside `run`.
"""

from __future__ import annotations

from argparse import Namespace, _SubParsersAction
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module

from ..flags import Parser
from .connect import Commands

BENCHMARKS = (
    "serving.serving", "constrained.masks", "constrained.schemas", "constrained.conformance",
    "constrained.grammar_load", "constrained.grammar_cost",
    "cache.radix", "cache.kv_policies", "scheduling.schedule", "scheduling.placement",
    "scheduling.fleet", "scheduling.fleet_studies",
    "cluster.router", "cluster.replicas", "cluster.shared_kv", "cluster.simulated",
    "cluster.prefill", "cluster.kv_transport", "cluster.roles",
    "device.step", "scheduling.stall", "serving.startup",
    "serving.threads", "gpu", "scheduling.dsl", "serving.latency", "serving.load",
    "scheduling.programs", "harness.limits", "serving.watch", "serving.plan", "serving.memory",
    "device.quantization", "device.kv_bits", "device.determinism", "speculation.speculation",
    "speculation.drafting", "speculation.constraint_cost",
    "speculation.drafting_peers", "speculation.oracle", "speculation.acceptance",
    "speculation.draft_kv", "speculation.cascade", "speculation.early_exit", "speculation.ahead",
    "speculation.analogies", "device.beam", "device.encoding", "device.kernels", "device.ranks",
)  # fmt: skip
TOOLS = (  # which write no report
    "harness.model", "constrained.vocabularies", "harness.workloads", "harness.compare",
    "harness.collect",
)  # fmt: skip


def add_parser(commands: Commands) -> None:
    """Register the command; its benchmarks once it is parsed."""
    parser = commands.add_parser("bench", help="measure: a table, and JSON with the machine")
    assert isinstance(parser, Parser)
    names = parser.add_subparsers(dest="benchmark", required=True, metavar="NAME")
    parser.before_parsing = partial(_add_benchmarks, names)


def _add_benchmarks(names: _SubParsersAction[Parser], words: Sequence[str]) -> None:
    """Those that are asked for and not there yet."""
    from ..bench.harness.report import add_report_flags

    modules = {path.rpartition(".")[2].replace("_", "-"): path for path in (*BENCHMARKS, *TOOLS)}
    asked = words[0] if words else None
    wanted = [asked] if asked in modules else modules
    for name in (name for name in wanted if name not in names.choices):
        module = import_module(f"..bench.{modules[name]}", __package__)
        text = (module.__doc__ or "").partition("\n")[0]
        command = names.add_parser(name, help=text, description=module.__doc__)
        module.add_flags(command)
        if modules[name] in BENCHMARKS:
            add_report_flags(command)
        command.set_defaults(run=partial(_run, module.run))


def _run(run: Callable[[Namespace], int], args: Namespace) -> int:
    """It leaves no process behind, however it ends, and ends soon when it is asked to."""
    from ..bench.harness.descendants import ending_descendants

    with ending_descendants():
        return run(args)
