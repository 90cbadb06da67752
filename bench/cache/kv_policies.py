"""What is lost and won where only a part of each prompt's KV is kept: answers, and calls a second.

Each call is an extraction behind texts of others, which are no use to it: a prompt as retrieval
makes them. Its own text, or the texts of others, are background; what is asked for stays whole. All
calls come at once to an engine whose pool holds a few of their prompts, so that it bounds how many
run together. A reply is right where it is the same JSON value. Policies take turns.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from statistics import median
from typing import Any

from ...flags import count
from ...frontend.backend import Engine
from ...frontend.dsl.expr import assistant, text, user
from ...frontend.dsl.function import function
from ...frontend.dsl.generation import gen
from ...frontend.dsl.state import ProgramState
from ...frontend.protocol.kv_policy import KVPolicy
from ..harness.process_meter import ProcessMeter
from ..harness.report import write_report

POLICIES = ("none", "snapkv:0.5", "snapkv:0.25", "snapkv:0.125")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench kv-policies`."""
    add = parser.add_argument
    add("--model", metavar="FOLDER", help="checkpoint (default: the embedded model)")
    add("--calls", type=count, default=100, metavar="N", help="extractions, at most 200")
    add("--others", type=count, default=8, metavar="N", help="texts of others in a prompt")
    add("--pool-tokens", type=count, default=4096, metavar="N", help="KV of the engine")
    add("--policy", action="append", metavar="KIND:KEEP",
        help=f"repeatable; none: all is kept (default: {', '.join(POLICIES)})")  # fmt: skip
    add("--background", choices=("others", "all"), default="others",
        help="what may be dropped: texts of others, or the whole prompt")  # fmt: skip
    add("--repeats", type=count, default=3, metavar="N")


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    names = args.policy or list(POLICIES)
    policies = {name: None if name == "none" else KVPolicy.from_text(name) for name in names}
    cases = _cases(args.calls, args.others)
    model = [] if args.model is None else [args.model]
    runs: dict[str, list[_Measured]] = {name: [] for name in names}
    with Engine(*model, max_total_tokens=args.pool_tokens, speculate="off") as engine:
        _extract(engine, cases[:8], None, args.background)
        for _ in range(args.repeats):
            for name, policy in policies.items():
                runs[name].append(_extract(engine, cases, policy, args.background))
    first = runs[names[0]]
    rows = [_row(name, each, first) for name, each in runs.items()]
    write_report("kv-policies", rows, args)
    return 0


@dataclass(frozen=True, slots=True)
class _Case:
    others: str
    question: str
    limits: dict[str, Any]
    answer: str


@dataclass(frozen=True, slots=True)
class _Measured:
    num_right: int
    num_calls: int
    prompt_tokens: int
    dropped_tokens: int
    wall_s: float
    cpu_s: float
    rows: float  # of a step, on average


def _cases(num: int, num_others: int) -> list[_Case]:
    """The first question of extractions, behind texts of others."""
    written = files(__package__).joinpath("../speculation/data/extractions.json").read_text()
    told = json.loads(written)
    rng = random.Random(7)
    texts = [fields["user"][0].partition("\n")[0] for fields in told]
    return [
        _Case(
            "\n".join(rng.sample(texts[:index] + texts[index + 1 :], num_others)) + "\n",
            fields["user"][0],
            fields["limits"][0],
            fields["answers"][0],
        )
        for index, fields in enumerate(told[:num])
    ]


@function
def extraction(s: ProgramState, case: _Case, policy: KVPolicy | None, is_all: bool) -> None:
    """One call."""
    others = case.others if is_all else text(case.others, kv="background")
    s += user(others + case.question)
    s += assistant(gen("reply", max_tokens=160, temperature=0, kv_policy=policy, **case.limits))


def _extract(
    engine: Engine, cases: Sequence[_Case], policy: KVPolicy | None, background: str
) -> _Measured:
    engine.flush_cache()
    before = engine.get_server_info()["stats"]
    arguments = [{"case": case, "policy": policy, "is_all": background == "all"} for case in cases]
    with ProcessMeter(engine.pid) as meter:
        began = time.perf_counter()
        states = extraction.run_batch(arguments, backend=engine)
        wall_s = time.perf_counter() - began
    now = engine.get_server_info()["stats"]
    new = {name: now[name] - before[name] for name in now}
    metas = [state.get_meta_info("reply") for state in states]
    right = [_is_right(state["reply"], case.answer) for state, case in zip(states, cases)]
    return _Measured(
        sum(right),
        len(right),
        sum(meta["prompt_tokens"] for meta in metas),
        sum(meta.get("dropped_tokens", 0) for meta in metas),
        wall_s,
        meter.cpu_s,
        (new["num_generated_tokens"] - new["num_jumped_tokens"]) / new["num_steps"],
    )


def _is_right(reply: str, answer: str) -> bool:
    try:
        return bool(json.loads(reply) == json.loads(answer))
    except ValueError:
        return False


def _row(name: str, runs: Sequence[_Measured], first: Sequence[_Measured]) -> dict[str, Any]:
    one = runs[0]
    return {
        "policy": name,
        "right_percent": round(100 * one.num_right / one.num_calls, 1),
        "prompt_tokens": round(one.prompt_tokens / one.num_calls),
        "kept_percent": round(100 - 100 * one.dropped_tokens / one.prompt_tokens, 1),
        "rows_a_step": round(median(each.rows for each in runs), 1),
        "wall_s": round(median(each.wall_s for each in runs), 2),
        "cpu_s": round(median(each.cpu_s for each in runs), 2),
        "speed": round(median(f.wall_s / each.wall_s for f, each in zip(first, runs)), 2),
        "calls": one.num_calls,
    }
