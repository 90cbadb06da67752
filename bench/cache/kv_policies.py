"""What is lost and won where only a part of each prompt's KV is kept: answers, and calls a second.

Each call asks for something of one text among others, which are no use to it: a prompt as retrieval
makes them. The texts of others are background, or all is; what is asked for stays whole. All
calls come at once to an engine whose pool holds a few of their prompts, so that it bounds how many
run together. Policies take turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from ...errors import InvalidRequest
from ...flags import count
from ...frontend.backend import Engine
from ...frontend.dsl.expr import assistant, text, user
from ...frontend.dsl.function import function
from ...frontend.dsl.generation import gen
from ...frontend.dsl.state import ProgramState
from ...frontend.protocol.kv_policy import KVPolicy
from ..harness.process_meter import ProcessMeter
from ..harness.report import write_report
from .endless import stream_rows
from .kv_tasks import TASKS, Case

STREAMS = ("streaming:512", "none")
POLICIES = ("none", "snapkv:0.5", "snapkv:0.25", "snapkv:0.125")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench kv-policies`."""
    add = parser.add_argument
    add("--model", metavar="FOLDER", help="checkpoint (default: the embedded model)")
    add("--calls", type=count, default=100, metavar="N", help="extractions, at most 200")
    add("--others", type=count, default=8, metavar="N", help="texts of others in a prompt")
    add(
        "--task",
        choices=sorted(TASKS),
        default="extract",
        help="extract: JSON of a text; needle: one value of many; keys: three (default: extract)",
    )
    add("--pool-tokens", type=count, default=4096, metavar="N", help="KV of the engine")
    add("--policy", action="append", metavar="KIND:KEEP",
        help=f"repeatable; none: all is kept (default: {', '.join(POLICIES)})")  # fmt: skip
    add("--background", choices=("others", "all"), default="others",
        help="what may be dropped: texts of others, or the whole prompt")  # fmt: skip
    add("--repeats", type=count, default=3, metavar="N")
    add("--stream", type=count, metavar="TOKENS",
        help="one chat of so many tokens instead, under each policy named streaming:KEEP or none "
        "(default: streaming:512 and none)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    if args.stream is not None:
        model = [] if args.model is None else [args.model]
        streams = [_stream(name) for name in args.policy or STREAMS]
        told = [row for each in streams for row in stream_rows(model, each, args.stream)]
        write_report("kv-policies-stream", told, args)
        return 0
    names = args.policy or list(POLICIES)
    policies = {name: None if name == "none" else KVPolicy.from_text(name) for name in names}
    cases = TASKS[args.task](args.calls, args.others)
    model = [] if args.model is None else [args.model]
    runs: dict[str, list[_Measured]] = {name: [] for name in names}
    with Engine(*model, max_total_tokens=args.pool_tokens, speculate="off") as engine:
        _measure(engine, cases[:8], None, args.background)
        for _ in range(args.repeats):
            for name, policy in policies.items():
                runs[name].append(_measure(engine, cases, policy, args.background))
    first = runs[names[0]]
    rows = [_row(name, each, first) for name, each in runs.items()]
    write_report("kv-policies", rows, args)
    return 0


def _stream(name: str) -> KVPolicy | None:
    """Raises InvalidRequest."""
    policy = None if name == "none" else KVPolicy.from_text(name)
    if policy is not None and policy.kind != "streaming":
        raise InvalidRequest.of("policy", name, "streaming:KEEP or none, with --stream")
    return policy


@dataclass(frozen=True, slots=True)
class _Measured:
    num_right: int
    num_calls: int
    prompt_tokens: int
    dropped_tokens: int
    wall_s: float
    cpu_s: float
    rows: float  # of a step, on average


@function
def asked(s: ProgramState, case: Case, policy: KVPolicy | None, is_all: bool) -> None:
    """Its questions are turns of one chat, the first of them behind the texts."""
    kv: Literal["background"] | None = None if is_all else "background"
    texts = text(case.before, kv=kv) + case.own + text(case.after, kv=kv)
    for index, question in enumerate(case.questions):
        s += user(question if index else texts + question)
        s += assistant(
            gen(
                f"reply{index}",
                max_tokens=case.max_tokens,
                temperature=0,
                kv_policy=policy,
                **case.limits,
            )
        )


def _measure(
    engine: Engine, cases: Sequence[Case], policy: KVPolicy | None, background: str
) -> _Measured:
    engine.flush_cache()
    before = engine.get_server_info()["stats"]
    arguments = [{"case": case, "policy": policy, "is_all": background == "all"} for case in cases]
    with ProcessMeter(engine.pid) as meter:
        began = time.perf_counter()
        states = asked.run_batch(arguments, backend=engine)
        wall_s = time.perf_counter() - began
    now = engine.get_server_info()["stats"]
    new = {name: now[name] - before[name] for name in now}
    calls = [
        (state.get_meta_info(f"reply{index}"), case.is_right(index, state[f"reply{index}"]))
        for state, case in zip(states, cases, strict=True)
        for index in range(len(case.questions))
    ]
    return _Measured(
        sum(is_right for _, is_right in calls),
        len(calls),
        sum(meta["prompt_tokens"] for meta, _ in calls),
        sum(meta.get("dropped_tokens", 0) for meta, _ in calls),
        wall_s,
        meter.cpu_s,
        (new["num_generated_tokens"] - new["num_jumped_tokens"]) / new["num_steps"],
    )


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
