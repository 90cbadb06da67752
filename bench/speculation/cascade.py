"""What a cascade saves: extractions by a small model, by a large one, and by both under each rule.

Each extraction has a right answer; a reply is right where it is the same JSON value. Compute is
what the linear layers of both engines multiply, counted: every token that a step computes (prompts,
outputs, scored answers, guesses that were wrong) with the layers' weights, and every token that is
drawn or scored with the head's. Attention over these short prompts is some 5% beside it, and is
left out. CPU seconds are those of both engines' processes. Every run begins with empty caches; the
engines draft from predictions alone, which a cascade makes of the small model's answers.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...flags import count
from ...frontend.backend import Engine
from ...frontend.cascade.acceptance import rule_named
from ...frontend.cascade.backend import CascadeBackend, cascade
from ...frontend.client.backend import Backend
from ...frontend.dsl.state import ProgramState
from ...runtime.checkpoint.location import EMBEDDED_MODEL
from ..harness.limits import model_costs
from ..harness.process_meter import ProcessMeter
from ..harness.report import write_report
from .conversations import Extraction, converse, extractions, is_answer

RULES = (
    "mean_logprob(-0.2)", "mean_logprob(-0.05)", "mean_logprob(-0.02)", "mean_logprob(-0.01)",
    "mean_logprob(-0.005)", "mean_logprob(-0.002)", "agree(0.1)", "agree(0.5)", "agree(0.9)",
    "mean_logprob(-0.01) | agree(0.5)", "mean_logprob(-0.005) | agree(0.5)",
)  # fmt: skip
_WARM_UP = 20  # extractions, before anything is measured


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench cascade`."""
    add = parser.add_argument
    add("--small", default=str(EMBEDDED_MODEL), metavar="FOLDER",
        help="checkpoint (default: the embedded model)")  # fmt: skip
    add("--small-quantization", default="none")
    add("--large", default=str(EMBEDDED_MODEL), metavar="FOLDER")
    add("--samples", type=count, default=200, metavar="N", help="extractions, at most 200")
    add("--rule", action="append", metavar="RULE",
        help=f"repeatable, terms with | between them (default: {', '.join(RULES)})")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    rules = {text: rule_named(text) for text in args.rule or RULES}
    cases = extractions(args.samples)
    options: dict[str, Any] = {"speculate": "prediction", "num_threads": 1}
    with (
        Engine(args.small, quantization=args.small_quantization, **options) as small,
        Engine(args.large, **options) as large,
    ):
        both = [_Side(small, _costs(args.small)), _Side(large, _costs(args.large))]
        for engine in (small, large):
            _converse_all(engine, cases[:_WARM_UP])
        measured = {"large alone": _measured(large, cases, both)}
        measured["small alone"] = _measured(small, cases, both)
        for text, rule in rules.items():
            backend = cascade(small, large, accept=rule)
            measured[text] = _measured(backend, cases, both)
            backend.shutdown()
    alone = measured["large alone"]
    rows = [_row(name, each, alone) for name, each in measured.items()]
    write_report("cascade", rows, args)
    return 0


@dataclass(frozen=True, slots=True)
class _Side:
    """An engine, and the weights of its layers and of its head."""

    engine: Engine
    weights: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Measured:
    num_right: int
    num_replies: int
    flop: int
    cpu_s: float
    counts: dict[str, int]  # of the small model


def _costs(model: str) -> tuple[int, int]:
    costs = model_costs(Path(model))
    return costs.body_weights, costs.head_weights


def _measured(backend: Backend, cases: list[Extraction], both: list[_Side]) -> _Measured:
    for side in both:
        side.engine.flush_cache()
    before = [side.engine.get_server_info()["stats"] for side in both]
    with ProcessMeter(both[0].engine.pid) as one, ProcessMeter(both[1].engine.pid) as other:
        states = _converse_all(backend, cases)
    counts = backend.counts if isinstance(backend, CascadeBackend) else {}
    of_sides = list(counts.values()) or [{}, {}]
    flop = 0
    for side, old, counted in zip(both, before, of_sides, strict=True):
        new = side.engine.get_server_info()["stats"]
        flop += _flop(side, {name: new[name] - old[name] for name in new}, counted)
    right = [
        is_answer(state[f"reply{turn}"], answer)
        for case, state in zip(cases, states, strict=True)
        for turn, answer in enumerate(case.answers)
    ]
    return _Measured(sum(right), len(right), flop, one.cpu_s + other.cpu_s, of_sides[0])


def _converse_all(backend: Backend, cases: list[Extraction]) -> list[ProgramState]:
    arguments = [{"case": case.conversation, "temperature": 0.0} for case in cases]
    states: list[ProgramState] = converse.run_batch(arguments, backend=backend)
    return states


def _flop(side: _Side, stats: dict[str, int], counted: dict[str, int]) -> int:
    body, head = side.weights
    wrong = stats["num_draft_tokens"] - stats["num_accepted_tokens"]
    drawn = stats["num_generated_tokens"] - stats["num_jumped_tokens"] + wrong
    scored = counted.get("num_scored_tokens", 0) - counted.get("num_kept_tokens", 0)
    return 2 * body * stats["num_computed_tokens"] + 2 * head * (drawn + scored)


def _row(name: str, measured: _Measured, alone: _Measured) -> dict[str, Any]:
    counts = measured.counts
    asked = counts.get("num_answers", 0)
    return {
        "rule": name,
        "right_percent": round(100 * measured.num_right / measured.num_replies, 1),
        "taken_percent": round(100 * counts.get("num_taken", 0) / asked, 1) if asked else 0.0,
        "gflop": round(measured.flop / 1e9, 2),
        "less_compute": round(alone.flop / measured.flop, 2),
        "cpu_s": round(measured.cpu_s, 2),
        "replies": measured.num_replies,
    }
