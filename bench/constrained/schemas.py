"""Hundreds of generated real-shaped schemas, beside other engines: first mask, masks, right or not.

Each schema goes through all engines in turn, each in a process of its own that has seen other
schemas but not this one. docs/measure/grammars.md says what each column is.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...errors import InvalidRequest
from ...flags import count
from ..harness.report import console_progress, shown_value, write_report
from .grammar_workers import PEERS, STEMMA, GrammarWorker, WorkerSpec, peer
from .masks import percentile
from .matchers.follow import Following
from .matchers.protocol import GrammarRequest
from .matchers.spelling import mentioned_names, spellings
from .schema_instances import instances
from .schema_shapes import FAMILIES, generated_schema
from .vocabularies import SIZES, trained_vocabulary

NUM_SCHEMAS = 300
NUM_INSTANCES = 3  # valid ones of a schema, and as many invalid
NUM_SPELLINGS = 3  # in the schema's order of keys, as drawn, and one more
BASE = "llguidance"  # of the ratios


@dataclass(frozen=True, slots=True)
class GeneratedCase:
    """A schema with instances, each in its spellings."""

    name: str
    family: str
    schema: str
    valid: tuple[tuple[str, ...], ...]
    invalid: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Found:
    """One schema on one engine; `following` is None where it was not compiled."""

    case: GeneratedCase
    following: Following | None
    error: str = ""

    @property
    def is_right(self) -> bool:
        """Compiled, all valid instances accepted, all invalid ones refused."""
        found = self.following
        return found is not None and all(found.accepted) and not any(found.over_generated)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench schemas`."""
    add = parser.add_argument
    add("--peer", action="append", default=[], choices=PEERS, help="beside this engine")
    add("--peer-python", default=sys.executable, metavar="PYTHON",
        help="of the environment that has the peers (default: this one)")  # fmt: skip
    add("--vocab", type=count, nargs="+", default=SIZES, metavar="N",
        help="sizes of the vocabularies (default: 32000 128000)")  # fmt: skip
    add("--schemas", type=count, default=NUM_SCHEMAS, metavar="N",
        help="how many, of all families together (default: %(default)s)")  # fmt: skip
    add("--family", choices=FAMILIES, help="schemas of this family only")
    add("--seed", type=int, default=0, help="other schemas (default: %(default)s)")
    add("--timeout", type=float, default=30.0, metavar="S",
        help="for a schema with its instances (default: %(default)s)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    cases = generated_cases(args.schemas, args.seed, args.family)
    if not cases:
        raise InvalidRequest.of("schemas", args.schemas, "enough that a family has one")
    specs = [STEMMA, *(peer(name, args.peer_python) for name in dict.fromkeys(args.peer))]
    rows, details, engines = [], [], []
    for size in args.vocab:
        found, versions = _follow_all(specs, trained_vocabulary(size), cases, args.timeout)
        engines = [{"engine": spec.name, "version": versions[spec.name]} for spec in specs]
        rows += _rows(size, found)
        details += [_details(size, name, one) for name, all_ in found.items() for one in all_]
    write_report(
        "schemas", rows, args, shown=[_shown(row) for row in rows], engines=engines,
        schemas=details,
    )  # fmt: skip
    return 0


def generated_cases(num: int, seed: int, family: str | None = None) -> list[GeneratedCase]:
    """`num` schemas, by the families' shares; a schema without a valid instance is left out."""
    shares = {name: share for name, (_, share) in FAMILIES.items() if family in (None, name)}
    total = sum(shares.values())
    cases = []
    for name, share in shares.items():
        for number in range(round(num * share / total)):
            case = _case(name, seed * 1_000_000 + number)
            if case.valid:
                cases.append(case)
    return cases


def _case(family: str, seed: int) -> GeneratedCase:
    schema = generated_schema(family, seed)
    valid, invalid = instances(schema, seed, NUM_INSTANCES)
    names = mentioned_names(schema)

    def spelled(found: Sequence[object]) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(itertools.islice(spellings(one, names), NUM_SPELLINGS)) for one in found)

    text = json.dumps(schema, separators=(",", ":"))
    return GeneratedCase(f"{family} {seed}", family, text, spelled(valid), spelled(invalid))


def _follow_all(
    specs: Sequence[WorkerSpec], tokenizer: Path, cases: Sequence[GeneratedCase], timeout_s: float
) -> tuple[dict[str, list[Found]], dict[str, str]]:
    """By engine: its results and its version."""
    found: dict[str, list[Found]] = {spec.name: [] for spec in specs}
    with ExitStack() as stack:
        progress = stack.enter_context(console_progress())
        bar = progress.add_task("starting", total=len(cases) * len(specs))
        workers = [stack.enter_context(GrammarWorker(spec, tokenizer)) for spec in specs]
        for case in cases:
            for worker in workers:
                progress.update(bar, description=f"{worker.spec.name} {case.name}")
                found[worker.spec.name].append(_follow(worker, case, timeout_s))
                progress.advance(bar)
        return found, {worker.spec.name: worker.version for worker in workers}


def _follow(worker: GrammarWorker, case: GeneratedCase, timeout_s: float) -> Found:
    request = asdict(GrammarRequest("json_schema", case.schema))
    reply = worker.ask(
        timeout_s, op="follow", request=request, valid=case.valid, invalid=case.invalid
    )
    if "error" in reply:
        return Found(case, None, reply["error"])
    return Found(case, Following(**reply))


def _rows(size: int, found: dict[str, list[Found]]) -> list[dict[str, Any]]:
    """A row for each engine and each way in which it matches."""
    rows = []
    base = _row(size, BASE, "all", found[BASE]) if BASE in found else None
    for name, all_ in found.items():
        paths = {one.following.path for one in all_ if one.following} - {""}
        rows.append(_with_ratios(_row(size, name, "all", all_), base))
        for path in sorted(paths) if len(paths) > 1 else ():
            own = [one for one in all_ if one.following and one.following.path == path]
            rows.append(_with_ratios(_row(size, name, path, own), None))
    return rows


def _row(size: int, engine: str, path: str, found: Sequence[Found]) -> dict[str, Any]:
    compiled = [one.following for one in found if one.following]
    first_ms = [one.first_mask_ms for one in compiled]
    mask_us = [us for one in compiled for us in one.mask_us]
    return {
        "vocab": size,
        "engine": engine,
        "path": path,
        "schemas": len(found),
        "compiled": len(compiled),
        "right": sum(one.is_right for one in found),
        "valid": sum(len(one.case.valid) for one in found),
        "accepted": sum(sum(one.accepted) for one in compiled),
        "invalid": sum(len(one.case.invalid) for one in found),
        "over_generated": sum(sum(one.over_generated) for one in compiled),
        "first_mask_p50_ms": percentile(first_ms, 50),
        "first_mask_p95_ms": percentile(first_ms, 95),
        "first_mask_max_ms": max(first_ms, default=None),
        "mask_p50_us": percentile(mask_us, 50),
        "mask_p95_us": percentile(mask_us, 95),
        "mask_p99_us": percentile(mask_us, 99),
    }


def _with_ratios(row: dict[str, Any], base: dict[str, Any] | None) -> dict[str, Any]:
    """Times over those of the engine that the ratios are of, each over its own schemas."""
    names = ("first_mask_p50_ms", "first_mask_p95_ms", "mask_p50_us", "mask_p95_us", "mask_p99_us")
    ratios = {}
    for name in names:
        own, other = row[name], None if base is None else base[name]
        ratios[f"{name.rpartition('_')[0]}_ratio"] = own / other if own and other else None
    return {**row, **ratios}


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """The table's form of a row; ratios of first masks p50 / p95, of masks p50 / p95 / p99."""
    path = "" if row["path"] == "all" else f" {row['path']}"
    return {
        "vocab": f"{row['vocab'] / 1000:g}k",
        "engine": f"{row['engine']}{path}",
        "compiled": f"{row['compiled']}/{row['schemas']}",
        "right": f"{row['right']}/{row['schemas']}",
        "accepted": f"{row['accepted']}/{row['valid']}",
        "over": f"{row['over_generated']}/{row['invalid']}",
        "first mask ms": _cell(row, "first_mask_p50_ms", "first_mask_p95_ms", "first_mask_max_ms"),
        "ratio": _cell(row, "first_mask_p50_ratio", "first_mask_p95_ratio"),
        "mask us": _cell(row, "mask_p50_us", "mask_p95_us", "mask_p99_us"),
        "ratio ": _cell(row, "mask_p50_ratio", "mask_p95_ratio", "mask_p99_ratio"),
    }


def _cell(row: dict[str, Any], *names: str) -> str:
    return " / ".join("-" if row[name] is None else shown_value(row[name]) for name in names)


def _details(size: int, engine: str, found: Found) -> dict[str, Any]:
    """Details of one schema, for the file."""
    kept = {"vocab": size, "engine": engine, "name": found.case.name, "error": found.error}
    one = found.following
    if one is None:
        return kept
    masks = {"mask_p50_us": percentile(one.mask_us, 50), "mask_max_us": max(one.mask_us, default=0)}
    return {
        **kept,
        "path": one.path,
        "first_mask_ms": one.first_mask_ms,
        "refused": one.accepted.count(False),
        "over_generated": one.over_generated.count(True),
        **masks,
    }
