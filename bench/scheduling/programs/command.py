"""`stemma bench programs`: its flags, the works one after the other, tables and targets."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ....errors import InvalidRequest
from ....flags import count
from ....runtime.checkpoint.location import EMBEDDED_MODEL
from ...harness.report import print_table, write_report
from .measure import Bench, Runs, rows_of, say, shown, shown_programs
from .restart import PROMPT_TOKENS, measure_restart
from .scripts import QUICK_MIXED, QUICK_REACT, MixedSizes, ReactSizes, Work, mixed, react
from .simulated import simulate
from .targets import Target, mixed_targets, react_targets, restart_target
from .variants import Variant, mixed_variants, react_variants

WORKS = ("react", "mixed", "restart")
PEER_FORM = "vllm=PYTHON (of vLLM's environment)"
QUICK_PROMPT_TOKENS = 300
WARM_UP_REPEAT = -1


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench programs`."""
    add = parser.add_argument
    add("--model", type=Path, default=EMBEDDED_MODEL, metavar="FOLDER",
        help="checkpoint (default: the embedded model)")  # fmt: skip
    add("--work", help=f"comma-separated, of {', '.join(WORKS)} (default: all)")
    add("--repeats", type=count, default=3, help="of each engine (default: %(default)s)")
    add("--seed", type=int, default=0, help="of lengths, pauses and token ids")
    add("--quick", action="store_true", help="small works, to try it out")
    add("--simulate", action="store_true",
        help="over a modelled device instead: seconds, and the same figures each time")  # fmt: skip
    add("--peer", metavar="vllm=PYTHON", help=f"react also per call on {PEER_FORM}")
    add("--wait-idle", type=float, default=0.0, metavar="S",
        help="before each repeat wait up to S seconds for an idle machine")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    works, bench = _works(args.work), _bench(args)
    found: dict[str, Runs] = {}
    targets: list[Target] = []
    details: dict[str, Any] = {}
    if "react" in works:
        found["react"], details["react"] = _react(bench, args)
        targets += react_targets(found["react"])
    if "mixed" in works:
        found["mixed"], details["mixed"] = _mixed(bench, args)
        targets += mixed_targets(found["mixed"])
    if "restart" in works:
        details["restart"] = _restart(bench, args)
        if details["restart"] is not None:
            targets.append(restart_target(details["restart"]["ratio"]))
    _report(found, targets, details, args)
    return 0


def _react(bench: Bench, args: argparse.Namespace) -> tuple[Runs, dict[str, Any]]:
    sizes, vocab = QUICK_REACT if args.quick else ReactSizes(), _vocab(args.model)

    def make(repeat: int) -> Work:
        return react(sizes, vocab=vocab, seed=args.seed, repeat=repeat)

    warm_up = react(QUICK_REACT, vocab=vocab, seed=args.seed, repeat=WARM_UP_REPEAT)
    variants = react_variants(make(0).working_set)
    if args.simulate:
        return simulate(make(0), variants), asdict(sizes)
    return bench.measure(make, warm_up, variants), asdict(sizes)


def _mixed(bench: Bench, args: argparse.Namespace) -> tuple[Runs, dict[str, Any]]:
    sizes, vocab = QUICK_MIXED if args.quick else MixedSizes(), _vocab(args.model)

    def make(repeat: int) -> Work:
        return mixed(sizes, vocab=vocab, seed=args.seed, repeat=repeat)

    warm_up = mixed(QUICK_MIXED, vocab=vocab, seed=args.seed, repeat=WARM_UP_REPEAT)
    if args.simulate:
        return simulate(make(0), mixed_variants()), asdict(sizes)
    bench = replace(bench, vllm_python=None)
    return bench.measure(make, warm_up, mixed_variants()), asdict(sizes)


def _restart(bench: Bench, args: argparse.Namespace) -> dict[str, float] | None:
    reason = Variant("restart", {"kv_store": Path("store")}).reason_against()
    if args.simulate:
        reason = "it cannot be simulated"
    if reason is not None:
        say(f"restart is left out: {reason}")
        return None
    num_prompt = QUICK_PROMPT_TOKENS if args.quick else PROMPT_TOKENS
    say(f"restart: {num_prompt} tokens")
    return measure_restart(
        bench.model, vocab=_vocab(bench.model), num_prompt=num_prompt, repeats=bench.num_repeats
    )


def _report(
    found: dict[str, Runs],
    targets: Sequence[Target],
    details: dict[str, Any],
    args: argparse.Namespace,
) -> None:
    rows = [row for work, runs in found.items() for row in rows_of(work, runs)]
    target_rows = [target.row() for target in targets]
    write_report(
        "programs-simulated" if args.simulate else "programs",
        rows,
        args,
        shown=[shown(row) for row in rows],
        printed={"rows": rows, "targets": target_rows, "restart": details.get("restart")},
        model=args.model.resolve().name,
        targets=target_rows,
        details=details,
        repeats=[asdict(one) for runs in found.values() for many in runs.values() for one in many],
    )
    if not args.json:
        print_table("completion of programs, and its parts", list(map(shown_programs, rows)))
        print_table("targets", target_rows)


# --- flags ---------------------------------------------------------------------------------------


def _works(given: str | None) -> Sequence[str]:
    names = [name.strip() for name in given.split(",")] if given else WORKS
    for name in names:
        if name not in WORKS:
            raise InvalidRequest.of("work", name, f"one of {WORKS}")
    return names


def _bench(args: argparse.Namespace) -> Bench:
    if not (args.model / "config.json").is_file():
        raise InvalidRequest.of("model", str(args.model), "a folder with a config.json")
    return Bench(args.model, args.repeats, args.wait_idle, _vllm_python(args.peer))


def _vllm_python(given: str | None) -> str | None:
    if given is None:
        return None
    kind, _, python = given.partition("=")
    if kind != "vllm" or not Path(python).is_file():
        raise InvalidRequest.of("peer", given, PEER_FORM)
    return os.path.abspath(python)  # not resolved: an environment's python is a link


def _vocab(model: Path) -> int:
    return int(json.loads((model / "config.json").read_text())["vocab_size"])
