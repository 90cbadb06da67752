"""JSON Schema conformance: of a test suite's schemas, how many are compiled and right in every way.

Each schema is compiled with the product's own limits in a process that can be ended; each instance
is fed token by token through mask and consume, in canonical spelling (docs/measure/grammars.md). A
schema is right when every valid instance is accepted and every invalid one is not. An
over-generation is an invalid instance that is accepted. Formats are asserted, as the product does
by default.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...constrained.serving.frames import DEFAULT_GRAMMAR_TIMEOUT_S
from ...flags import count
from ...runtime.checkpoint.location import EMBEDDED_MODEL
from ..harness.report import console_progress, print_table, write_report
from .grammar_workers import PEERS, STEMMA, GrammarWorker, WorkerSpec, peer
from .matchers.protocol import GrammarRequest
from .matchers.spelling import mentioned_names
from .schema_suites import DIALECTS, SchemaCase, read_cases, read_suite
from .vocabularies import trained_vocabulary

NUM_REASONS = 10
EXAMPLE_CHARS = 160
COLUMNS = {
    "engine": "engine",
    "compiled %": "compiled_pct",
    "valid accepted %": "valid_accepted_pct",
    "in other order": "num_in_other_order",
    "invalid rejected %": "invalid_rejected_pct",
    "right %": "right_pct",
    "over": "over_generated",
    "fsm %": "fsm_pct",
    "pushdown %": "pushdown_pct",
}


@dataclass(slots=True)
class Outcome:
    """The result of one schema on one engine."""

    id: str
    path: str | None = None  # None: not compiled
    num_valid: int = 0
    num_accepted: int = 0  # of the valid instances
    num_in_other_order: int = 0  # of these, with their keys in another order than given only
    num_invalid: int = 0
    num_over_generated: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)  # reason, example
    num_disagreements: int = 0  # tokens on which mask and consume() differ

    @property
    def is_right(self) -> bool:
        """Compiled, and every instance judged correctly."""
        return not self.failures


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench conformance`."""
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--suite", type=Path, metavar="DIR",
        help="JSON-Schema-Test-Suite, or one draft's folder of it")  # fmt: skip
    source.add_argument("--cases", type=Path, metavar="FILE",
        help='lines of {"id", "schema", "tests": [{"data", "valid"}]}')  # fmt: skip
    add("--draft", choices=sorted(DIALECTS),
        help="dialect of schemas without $schema (default: the folder's name)")  # fmt: skip
    add("--optional", action="store_true", help="with optional/ and optional/format/")
    add("--lenient", action="store_true", help="enforce what can be enforced")
    add("--peer", action="append", default=[], choices=PEERS, help="beside this engine")
    add("--peer-python", default=sys.executable, metavar="PYTHON",
        help="of the environment that has the peers (default: this one)")  # fmt: skip
    add("--vocab", type=count, metavar="N",
        help="a vocabulary trained here (default: the embedded model's)")  # fmt: skip
    add("--timeout", type=float, default=30.0, metavar="S",
        help="for a schema's instances, and for its compilation by a peer; Stemma's has the "
        "runtime's own limit (default: %(default)s)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Judge and report."""
    if args.suite:
        cases = read_suite(args.suite, args.draft, has_optional=args.optional)
    else:
        cases = read_cases(args.cases, args.draft)
    tokenizer = EMBEDDED_MODEL / "tokenizer.json"
    if args.vocab:
        tokenizer = trained_vocabulary(args.vocab)
    specs = [STEMMA, *(peer(name, args.peer_python) for name in dict.fromkeys(args.peer))]
    outcomes = _judge_all(specs, tokenizer, cases, args)
    rows = [{"engine": spec.name, **summary(outcomes[spec.name])} for spec in specs]
    reasons = {spec.name: commonest_reasons(outcomes[spec.name]) for spec in specs}
    _write(rows, reasons, outcomes, args)
    return 0


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Percentages and counts; a percentage of nothing is None. Of invalid instances those of
    compiled schemas count, since a schema that is refused lets nothing through."""
    compiled = [one for one in outcomes if one.path is not None]
    num_valid = sum(one.num_valid for one in outcomes)
    num_invalid = sum(one.num_invalid for one in compiled)
    num_accepted = sum(one.num_accepted for one in compiled)
    over_generated = sum(one.num_over_generated for one in compiled)
    num_right = sum(one.is_right for one in outcomes)
    paths = Counter(one.path for one in compiled)
    has_paths = not paths[""]
    return {
        "compiled_pct": _percent(len(compiled), len(outcomes)),
        "valid_accepted_pct": _percent(num_accepted, num_valid),
        "invalid_rejected_pct": _percent(num_invalid - over_generated, num_invalid),
        "right_pct": _percent(num_right, len(outcomes)),
        "over_generated": over_generated,
        "fsm_pct": _percent(paths["fsm"] + paths["lazy"], len(compiled)) if has_paths else None,
        "pushdown_pct": _percent(paths["pushdown"], len(compiled)) if has_paths else None,
        "num_schemas": len(outcomes),
        "num_compiled": len(compiled),
        "num_right": num_right,
        "num_valid": num_valid,
        "num_valid_accepted": num_accepted,
        "num_valid_of_compiled": sum(one.num_valid for one in compiled),
        "num_in_other_order": sum(one.num_in_other_order for one in compiled),
        "num_invalid": num_invalid,
        "num_disagreements": sum(one.num_disagreements for one in compiled),
    }


def commonest_reasons(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """Why schemas are not right: the number of schemas per reason, and one example."""
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for one in outcomes:
        counts.update({reason for reason, _ in one.failures})
        for reason, example in one.failures:
            examples.setdefault(reason, f"{one.id}: {example}")
    return [
        {"schemas": count, "reason": reason, "example": examples[reason]}
        for reason, count in counts.most_common(NUM_REASONS)
    ]


def normalised(message: str) -> str:
    """A message without the parts that vary by schema: pointers, quoted texts, numbers."""
    message = re.sub(r"'[^']*'|\"[^\"]*\"|`[^`]*`", "'...'", message)
    message = re.sub(r"(?<![\w/])#?/[^\s:,;]*", "/...", message)
    return re.sub(r"-?\d+(\.\d+)?", "N", message.partition("\n")[0])[:EXAMPLE_CHARS]


def judge(
    worker: GrammarWorker, case: SchemaCase, *, is_lenient: bool, timeout_s: float
) -> Outcome:
    """Compile the schema and feed its instances."""
    outcome = Outcome(case.id, num_valid=len(case.valid), num_invalid=len(case.invalid))
    request = GrammarRequest(
        "json_schema", json.dumps(case.schema), is_lenient, case.asserts_format
    )
    limit_s = DEFAULT_GRAMMAR_TIMEOUT_S if worker.spec is STEMMA else timeout_s
    compiled = worker.ask(limit_s, op="compile", request=asdict(request))
    if "error" in compiled:
        reason = f"not compiled: {normalised(compiled['error'])}"
        outcome.failures.append((reason, compiled["error"][:EXAMPLE_CHARS]))
        return outcome
    outcome.path = compiled["path"]
    instances = [*case.valid, *case.invalid]
    names = mentioned_names(case.schema)
    judged = worker.ask(timeout_s, op="judge", instances=instances, names=names)
    if "error" in judged:
        reason = f"not judged: {normalised(judged['error'])}"
        outcome.failures.append((reason, judged["error"][:EXAMPLE_CHARS]))
        return outcome
    for i, (instance, verdict) in enumerate(zip(instances, judged["verdicts"], strict=True)):
        _count(outcome, instance, verdict, is_valid=i < len(case.valid))
    return outcome


def _count(outcome: Outcome, instance: object, verdict: dict[str, Any], *, is_valid: bool) -> None:
    is_accepted = verdict["text"] is not None
    outcome.num_accepted += is_valid and is_accepted
    outcome.num_in_other_order += is_valid and verdict["needs_other_order"]
    outcome.num_over_generated += is_accepted and not is_valid
    outcome.num_disagreements += verdict["num_disagreements"]
    example = json.dumps(instance)[:EXAMPLE_CHARS]
    file = outcome.id.partition(":")[0]
    if is_accepted != is_valid:
        what = "valid instance refused" if is_valid else "invalid instance accepted"
        outcome.failures.append((f"{what} ({file})", example))


def _judge_all(
    specs: Sequence[WorkerSpec],
    tokenizer: Path,
    cases: Sequence[SchemaCase],
    args: argparse.Namespace,
) -> dict[str, list[Outcome]]:
    """Outcomes by engine, in the order of the cases."""
    outcomes: dict[str, list[Outcome]] = {spec.name: [] for spec in specs}
    with ExitStack() as stack:
        progress = stack.enter_context(console_progress())
        bar = progress.add_task("judging", total=len(cases) * len(specs))
        workers = [stack.enter_context(GrammarWorker(spec, tokenizer)) for spec in specs]
        for case in cases:
            for worker in workers:
                outcome = judge(worker, case, is_lenient=args.lenient, timeout_s=args.timeout)
                outcomes[worker.spec.name].append(outcome)
                progress.advance(bar)
    return outcomes


def _write(
    rows: list[dict[str, Any]],
    reasons: dict[str, list[dict[str, Any]]],
    outcomes: dict[str, list[Outcome]],
    args: argparse.Namespace,
) -> None:
    """With --json one object: Stemma's row, its reasons, and the peers' rows."""
    source = args.suite or args.cases
    write_report(
        "conformance",
        rows,
        args,
        shown=[{heading: row[key] for heading, key in COLUMNS.items()} for row in rows],
        printed={**rows[0], "reasons": reasons["stemma"], "peers": rows[1:]},
        source=source.resolve().name,
        lenient=args.lenient,
        reasons=reasons,
        outcomes={name: [asdict(one) for one in found] for name, found in outcomes.items()},
    )
    if not args.json:
        for name, found in reasons.items():
            print_table(f"{name}: commonest reasons for failure", found)


def _percent(part: int, whole: int) -> float | None:
    return 100 * part / whole if whole else None
