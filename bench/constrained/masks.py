"""Compile, mask and jump-forward times over realistic schemas and regexes, beside other engines.

Every engine has a process of its own, started anew for each round; each grammar goes through all of
them in turn. A figure of a grammar, or of one place in an instance, is its median over the rounds;
the table has percentiles of those. docs/measure/grammars.md says what each column is.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...errors import InvalidRequest
from ...flags import count
from ..harness.report import console_progress, shown_value, write_report
from .grammar_cache import cache_hit_us
from .grammar_workers import PEERS, STEMMA, GrammarWorker, WorkerSpec, peer
from .grammars import FLAT, GrammarCase, grammar_cases
from .matchers.measure import Figures
from .vocabularies import SIZES, trained_vocabulary

TIMES = ("cold_us", "warm_us", "consume_us", "forced_us")


@dataclass(slots=True)
class Found:
    """The results of all rounds for one grammar on one engine."""

    case: GrammarCase
    rounds: list[Figures] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def first(self) -> Figures | None:
        """What no round changes: counts and the path; None where every round failed."""
        return self.rounds[0] if self.rounds else None

    def compile_ms(self) -> float:
        """Median over the rounds."""
        return statistics.median(figures.compile_ms for figures in self.rounds)

    def times(self, name: str) -> list[float]:
        """Medians over the rounds, one per place."""
        return [statistics.median(found) for found in zip(*(getattr(f, name) for f in self.rounds))]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench masks`."""
    add = parser.add_argument
    add("--peer", action="append", default=[], choices=PEERS, help="beside this engine")
    add("--peer-python", default=sys.executable, metavar="PYTHON",
        help="of the environment that has the peers (default: this one)")  # fmt: skip
    add("--vocab", type=count, nargs="+", default=SIZES, metavar="N",
        help="sizes of the vocabularies (default: 32000 128000)")  # fmt: skip
    add("--rounds", type=count, default=3, help="processes an engine (default: %(default)s)")
    add("--only", metavar="TEXT", help="grammars whose name or group contains TEXT")
    add("--timeout", type=float, default=60.0, metavar="S",
        help="for all of a grammar's measurements (default: %(default)s)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    cases = [c for c in grammar_cases() if not args.only or args.only in f"{c.group} {c.name}"]
    if not cases:
        raise InvalidRequest.of("only", args.only, "part of a grammar's name or group")
    specs = [STEMMA, *(peer(name, args.peer_python) for name in dict.fromkeys(args.peer))]
    rows, details, engines = [], [], []
    for size in args.vocab:
        tokenizer = trained_vocabulary(size)
        found, versions = _measure(specs, tokenizer, cases, args)
        engines = [{"engine": spec.name, "version": versions[spec.name]} for spec in specs]
        for spec in specs:
            rows += _rows(size, spec.name, found[spec.name])
            details += [_details(size, spec.name, one) for one in found[spec.name]]
    hit_us = cache_hit_us(trained_vocabulary(args.vocab[0]), [case.request for case in cases])
    rows = [{**row, "cache_hit_us": hit_us if row["engine"] == "stemma" else None} for row in rows]
    write_report(
        "masks", rows, args, shown=[_shown(r) for r in rows], engines=engines, grammars=details
    )
    if not args.json:
        print(f"a grammar that the runtime has in its cache: {hit_us:.2g} us")
    return 0


def _measure(
    specs: Sequence[WorkerSpec],
    tokenizer: Path,
    cases: Sequence[GrammarCase],
    args: argparse.Namespace,
) -> tuple[dict[str, list[Found]], dict[str, str]]:
    """By engine: its results and its version."""
    found = {spec.name: [Found(case) for case in cases] for spec in specs}
    with ExitStack() as stack:
        progress = stack.enter_context(console_progress())
        bar = progress.add_task("starting", total=args.rounds * len(cases) * len(specs))
        workers = [stack.enter_context(GrammarWorker(spec, tokenizer)) for spec in specs]
        for number in range(args.rounds):
            if number:
                for worker in workers:
                    worker.restart()
            for i, case in enumerate(cases):
                for worker in workers:
                    progress.update(bar, description=f"{worker.spec.name} {case.name}")
                    _ask(worker, found[worker.spec.name][i], args.timeout)
                    progress.advance(bar)
        return found, {worker.spec.name: worker.version for worker in workers}


def _ask(worker: GrammarWorker, found: Found, timeout_s: float) -> None:
    if "timeout" in found.errors:
        return  # a retry would time out again
    case = found.case
    reply = worker.ask(timeout_s, op="measure", request=asdict(case.request), texts=case.texts)
    if "error" in reply:
        found.errors.append(reply["error"])
    else:
        found.rounds.append(Figures(**reply))


def _rows(size: int, engine: str, found: Sequence[Found]) -> list[dict[str, Any]]:
    """All grammars together, then by path where the engine has several."""
    rows = [_row(size, engine, "all", found)]
    for path in sorted({one.first.path for one in found if one.first} - {""}):
        of_path = [one for one in found if one.first and one.first.path == path]
        rows.append(_row(size, engine, path, of_path))
    return rows


def _row(size: int, engine: str, path: str, found: Sequence[Found]) -> dict[str, Any]:
    compiled = [one for one in found if one.first]
    compile_ms = [one.compile_ms() for one in compiled]
    times = {name: [t for one in compiled for t in one.times(name)] for name in TIMES}
    figures = [one.first for one in compiled if one.first]
    flat = [one.first for one in compiled if one.first and one.case.group == FLAT]
    return {
        "vocab": size,
        "engine": engine,
        "path": path,
        "grammars": len(found),
        "compiled": len(compiled),
        "instances": sum(len(one.case.instances) for one in compiled),
        "accepted": sum(one.num_accepted for one in figures),
        "compile_p50_ms": percentile(compile_ms, 50),
        "compile_p95_ms": percentile(compile_ms, 95),
        "cold_p50_us": percentile(times["cold_us"], 50),
        "cold_p99_us": percentile(times["cold_us"], 99),
        "warm_p50_us": percentile(times["warm_us"], 50),
        "warm_p99_us": percentile(times["warm_us"], 99),
        "consume_p50_us": percentile(times["consume_us"], 50),
        "forced_p50_us": percentile(times["forced_us"], 50),
        "forced_p99_us": percentile(times["forced_us"], 99),
        "skipped_pct": _skipped_pct(figures),
        "flat_skipped_pct": _skipped_pct(flat),
        "non_canonical": sum(one.num_non_canonical for one in figures),
    }


def _skipped_pct(figures: Iterable[Figures]) -> float | None:
    """The share of forced tokens among all tokens."""
    counts = [(one.num_forced, one.num_tokens) for one in figures]
    num_tokens = sum(tokens for _, tokens in counts)
    return 100 * sum(forced for forced, _ in counts) / num_tokens if num_tokens else None


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """The table's form of a row: p50/p95 of compilations, p50/p99 of masks, flat/all skipped."""
    path = "" if row["path"] == "all" else f" {row['path']}"
    return {
        "vocab": f"{row['vocab'] / 1000:g}k",
        "engine": f"{row['engine']}{path}",
        "compiled": f"{row['compiled']}/{row['grammars']}",
        "accepted": f"{row['accepted']}/{row['instances']}",
        "compile ms": _cell(row, "compile_p50_ms", "compile_p95_ms"),
        "cold us": _cell(row, "cold_p50_us", "cold_p99_us"),
        "warm us": _cell(row, "warm_p50_us", "warm_p99_us"),
        "consume us": _cell(row, "consume_p50_us"),
        "forced us": _cell(row, "forced_p50_us", "forced_p99_us"),
        "skip %": _cell(row, "flat_skipped_pct", "skipped_pct"),
        "odd": str(row["non_canonical"]),
    }


def _cell(row: dict[str, Any], *names: str) -> str:
    return " / ".join("-" if row[name] is None else shown_value(row[name]) for name in names)


def _details(size: int, engine: str, found: Found) -> dict[str, Any]:
    """Details of one grammar, for the file."""
    kept = {"vocab": size, "engine": engine, "name": found.case.name, "group": found.case.group}
    if not found.first:
        return {**kept, "error": found.errors[0]}
    times = {name: percentile(found.times(name), 50) for name in TIMES}
    counts = {k: v for k, v in asdict(found.first).items() if k.startswith("num_") or k == "path"}
    worst = {"cold_max_us": max(found.times("cold_us"), default=None)}
    return {**kept, **counts, "compile_ms": found.compile_ms(), **times, **worst}


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The value that `percent` % of all values do not exceed; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(percent / 100 * len(ordered)))]
