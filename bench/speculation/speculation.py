"""What speculation brings: programs of the embedded model with drafts and without, taking turns.

Each engine is a process of its own and carries out the same conversations, one after the other, the
two in turns. Both begin with nothing: histories and caches fill as the conversations go; only the
process that compiles grammars is up, as in any server that has run for a second. Outputs
are compared, too: they differ only where rounding decides, since a step with several tokens of a
sequence rounds otherwise than one with one (docs/how-it-works/speculation.md).

`formula` is what the engine's own measurements predict of decoding alone: the tokens a step of both
sides, over the time of a step with as many guesses and of as many passes of the draft model.
Prompts, the gateway and waiting are not in it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import InvalidRequest
from ...flags import count
from ...frontend.backend import Engine
from ...frontend.dsl.function import function
from ...frontend.dsl.generation import gen
from ...frontend.dsl.state import ProgramState
from ...runtime.checkpoint.location import EMBEDDED_MODEL
from ...runtime.speculate.choice import MODEL, chosen_drafters
from ..harness.process_meter import ProcessMeter
from ..harness.report import write_report
from .conversations import Conversation, conversations


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench speculation`."""
    add = parser.add_argument
    add("--model", type=Path, default=EMBEDDED_MODEL, metavar="FOLDER",
        help="checkpoint (default: the embedded model)")  # fmt: skip
    add("--speculate", default="auto", metavar="LIST", help="(default: %(default)s)")
    add("--against", default="off", metavar="LIST", help="by these alone (default: %(default)s)")
    add("--draft-model", metavar="FOLDER", help="of --against, too, where that names model")
    add("--draft-quantization", default="none")
    add("--draft-layers", type=int, default=0, metavar="N")
    add("--draft-candidates", type=int, default=0, metavar="N",
        help="trees, of the one side: chains with --against model")  # fmt: skip
    add("--speculative-num-tokens", type=count, default=8, metavar="N")
    add("--dtype", default="auto")
    add("--skills", help="comma-separated (default: all)")
    add("--conversations", type=count, default=40, metavar="N", help="of each skill")
    add("--parallel", type=count, default=1, metavar="N", help="conversations at once")
    add("--max-tokens", type=count, metavar="N", help="of a reply (default: the program's)")
    add("--temperature", type=float, default=0.0)
    add("--repeats", type=count, default=3, help="of each engine, new each time")
    add("--again", action="store_true",
        help="each skill twice, then with prompts cached and grammars compiled")  # fmt: skip
    add("--num-threads", type=count, metavar="N")


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    by_skill = conversations(args.conversations)
    if args.skills:
        wanted = [name.strip() for name in args.skills.split(",")]
        if unknown := [name for name in wanted if name not in by_skill]:
            raise InvalidRequest.of("skills", unknown[0], f"some of {', '.join(by_skill)}")
        by_skill = {name: by_skill[name] for name in wanted}
    if args.max_tokens:
        by_skill = {
            name: [replace(case, max_tokens=args.max_tokens) for case in cases]
            for name, cases in by_skill.items()
        }
    rounds = ("", ", again") if args.again else ("",)
    measured = {
        f"{skill}{named}": [_Measured(), _Measured()] for skill in by_skill for named in rounds
    }
    for _ in range(args.repeats):
        for skill, cases in by_skill.items():
            _repeat(args, cases, [measured[f"{skill}{named}"] for named in rounds])
    together = [_together(sides) for sides in zip(*measured.values(), strict=True)]
    rows = [_row(skill, *sides) for skill, sides in (*measured.items(), ("all", together))]
    write_report("speculation", rows, args)
    return 0


_DRAFT_FLAGS = ("draft_model", "draft_quantization", "draft_layers")


@dataclass(slots=True)
class _Measured:
    """One side of one skill, over the repeats."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)  # of the engine
    texts: list[str] = field(default_factory=list)  # of the last repeat
    stats: dict[str, int] = field(default_factory=dict)  # of the last repeat
    speculation: dict[str, Any] = field(default_factory=dict)  # as the engine describes it


def _together(sides: Sequence[_Measured]) -> _Measured:
    """The same side of all skills."""
    return _Measured(
        [sum(repeat) for repeat in zip(*(side.wall_s for side in sides), strict=True)],
        [sum(repeat) for repeat in zip(*(side.cpu_s for side in sides), strict=True)],
        [text for side in sides for text in side.texts],
        {name: sum(side.stats[name] for side in sides) for name in sides[0].stats},
        sides[-1].speculation,
    )


def _repeat(
    args: argparse.Namespace, cases: list[Conversation], rounds: Sequence[list[_Measured]]
) -> None:
    """On new engines; each round is the same conversations once more."""
    options = {"dtype": args.dtype, "num_threads": args.num_threads}
    options["speculative_num_tokens"] = args.speculative_num_tokens
    drafts = {name: getattr(args, name) for name in _DRAFT_FLAGS if getattr(args, name)}
    against = drafts if MODEL in (chosen_drafters(args.against) or ()) else {}
    drafts = {**drafts, "draft_candidates": args.draft_candidates}
    engines = [
        Engine(args.model, speculate=args.against, **options, **against),
        Engine(args.model, speculate=args.speculate, **options, **drafts),
    ]
    try:
        for engine in engines:
            _warm_up.run(backend=engine).text()
        for sides in rounds:
            _round(args, cases, engines, sides)
    finally:
        for engine in engines:
            engine.shutdown()


def _round(
    args: argparse.Namespace,
    cases: list[Conversation],
    engines: list[Engine],
    sides: list[_Measured],
) -> None:
    for side in sides:
        side.wall_s.append(0.0)
        side.cpu_s.append(0.0)
        side.texts.clear()
    before = [engine.get_server_info()["stats"] for engine in engines]
    for first in range(0, len(cases), args.parallel):
        batch = cases[first : first + args.parallel]
        for engine, side in zip(engines, sides, strict=True):
            with ProcessMeter(engine.pid) as meter:
                side.wall_s[-1] += _carry_out(engine, batch, args.temperature, side.texts)
            side.cpu_s[-1] += meter.cpu_s
    for engine, side, old in zip(engines, sides, before, strict=True):
        new = engine.get_server_info()
        side.stats = {name: new["stats"][name] - old[name] for name in new["stats"]}
        side.speculation = new["speculation"]


@function
def _warm_up(s: ProgramState) -> None:
    s += "1" + gen("number", regex="[0-9]", max_tokens=2)


def _carry_out(
    engine: Engine, batch: list[Conversation], temperature: float, texts: list[str]
) -> float:
    """Seconds. Appends the conversations' texts."""
    program = batch[0].program
    many = [{"case": case, "temperature": temperature} for case in batch]
    started = time.perf_counter()
    if len(batch) == 1:
        states = [program.run(**many[0], backend=engine)]
    else:
        states = program.run_batch(many, backend=engine)
    found = [state.text() for state in states]
    duration_s = time.perf_counter() - started
    texts += found
    return duration_s


def _row(skill: str, off: _Measured, on: _Measured) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(off.wall_s, on.wall_s, strict=True)]
    cpu_ratios = [a / b for a, b in zip(off.cpu_s, on.cpu_s, strict=True)]
    drafted, accepted = on.stats["num_draft_tokens"], on.stats["num_accepted_tokens"]
    return {
        "program": skill,
        "off, s": statistics.median(off.wall_s),
        "steps, off": off.stats["num_steps"],
        "steps": on.stats["num_steps"],
        "on, s": statistics.median(on.wall_s),
        "ratio": statistics.median(ratios),
        "cpu ratio": statistics.median(cpu_ratios),
        "formula": _formula(off, on),
        "tokens a step, off": _tokens_a_step(off.stats),
        "on": _tokens_a_step(on.stats),
        "drafted": drafted,
        "accepted": accepted / max(drafted, 1),
        "other texts": sum(a != b for a, b in zip(off.texts, on.texts, strict=True)),
    }


def _tokens_a_step(stats: dict[str, int]) -> float:
    return stats["num_generated_tokens"] / max(stats["num_steps"], 1)


def _formula(off: _Measured, on: _Measured) -> float:
    """How many times as fast decoding is, by the times that the sides' engines have measured; 1
    where nothing was decoded."""
    step_ms = on.speculation.get("step_ms", {}) or off.speculation.get("step_ms", {})
    if not step_ms or not off.stats["num_generated_tokens"]:
        return 1.0
    sizes = [int(size) for size in step_ms]
    times = list(step_ms.values())

    def of_a_token(side: _Measured) -> float:
        num_steps = max(side.stats["num_steps"], 1)
        size = 1 + side.stats["num_draft_tokens"] / num_steps
        by_model = side.speculation.get("sources", {}).get("model", {}).get("drafted_tokens", 0)
        passes_ms: float = by_model / num_steps * (side.speculation.get("pass_ms") or 0.0)
        return (float(np.interp(size, sizes, times)) + passes_ms) / _tokens_a_step(side.stats)

    return of_a_token(off) / of_a_token(on)
