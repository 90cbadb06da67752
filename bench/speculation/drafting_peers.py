"""Recorded calls on Stemma and on other engines with drafts of their own, one call at a time.

Each engine is a process, kept alive for the whole run, and gets the same calls in turn: the prompts
of conversations with the embedded model as token ids, each with as many tokens to generate as the
model's own greedy answer has. No schema is sent, so that all do the same work. Repeats are made of
different conversations: what an engine has learnt from earlier ones it may use.

With --model of another model the calls are random prompts, and all tokens are generated greedily:
what a draft model brings, on a model that `stemma bench model --draft-layers` makes, whose draft is
right as often as real ones are.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...flags import count
from ...runtime.checkpoint.location import EMBEDDED_MODEL
from ...runtime.models.model_config import read_model_config
from ...runtime.speculate.choice import chosen_drafters
from ..harness.prompts import plain_ids, random_prompt
from ..harness.report import write_report
from ..harness.workloads import WorkItem, Workload, make_workload
from ..serving.engines import PEER_FORMS, RunningEngine, peer_spec
from .recorded_calls import RecordedCall, record_calls

_KV_TOKENS = 65_536


@dataclass(frozen=True, slots=True)
class _Timed:
    """A call on all engines, in their order."""

    repeat: int
    skill: str
    wall_s: list[float]
    shas: list[str]
    num_tokens: int


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench drafting-peers`."""
    add = parser.add_argument
    add("--peer", action="append", default=[], metavar="KIND=WHERE", help=PEER_FORMS)
    add("--model", type=Path, default=EMBEDDED_MODEL, metavar="FOLDER",
        help="(default: the embedded model, on its conversations)")  # fmt: skip
    add("--draft-model", metavar="FOLDER", help="of Stemma, first of all; then without it")
    add("--calls", type=count, default=6, metavar="N", help="with --model")
    add("--prompt-tokens", type=count, default=128, metavar="N", help="with --model")
    add("--tokens", type=count, default=128, metavar="N", help="with --model: generated")
    add("--speculate", default="auto", metavar="LIST", help="of Stemma (default: %(default)s)")
    add("--conversations", type=count, default=12, metavar="N", help="of each kind")
    add("--repeats", type=count, default=3, metavar="N", help="parts of them, for medians")
    add("--num-threads", type=count, metavar="N", help="of every engine (default: its own choice)")


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    chosen_drafters(args.speculate)
    with_draft = [f"stemma={args.speculate},{args.draft_model}"] if args.draft_model else []
    given = [*with_draft, f"stemma={args.speculate}", "stemma=off", *args.peer]
    specs = [peer_spec(form, args.model) for form in given]
    is_embedded = args.model == EMBEDDED_MODEL
    vocab = read_model_config(args.model).vocab_size
    calls = record_calls(args.conversations) if is_embedded else _random_calls(args, vocab)
    timed: list[_Timed] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stemma-bench-")))
        engines = [
            stack.enter_context(RunningEngine(spec, threads=args.num_threads, kv_tokens=_KV_TOKENS))
            for spec in specs
        ]
        path = folder / "call.json"
        _run(make_workload("decode", vocab=vocab), path, engines)  # what is compiled, is now
        for call in calls:
            work = Workload("call", "", vocab, True, None, (_item(call),))
            replies = _run(work, path, engines)
            timed.append(
                _Timed(
                    call.program % args.repeats,
                    call.skill,
                    [reply["wall_s"] for reply in replies],
                    [reply["output_sha"] for reply in replies],
                    len(call.output),
                )
            )
    names = [engine.spec.name for engine in engines]
    skills = [*dict.fromkeys(one.skill for one in timed)]
    groups = {skill: [one for one in timed if one.skill == skill] for skill in skills}
    if len(groups) > 1:
        groups["all"] = timed
    rows = [row for skill, group in groups.items() for row in _rows(skill, names, group)]
    write_report("drafting-peers", rows, args, engines=[engine.welcome for engine in engines])
    return 0


def _random_calls(args: argparse.Namespace, vocab_size: int) -> list[RecordedCall]:
    rng, ids = random.Random(0), plain_ids(vocab_size)
    output = [0] * args.tokens
    prompts = [[*random_prompt(rng, args.prompt_tokens, ids)] for _ in range(args.calls)]
    return [
        RecordedCall(number, "", prompt, output, skill="random")
        for number, prompt in enumerate(prompts)
    ]


def _item(call: RecordedCall) -> WorkItem:
    return WorkItem(0, tuple(call.prompt), len(call.output))


def _run(work: Workload, path: Path, engines: Sequence[RunningEngine]) -> list[dict[str, Any]]:
    path.write_text(work.to_json())
    for engine in engines:
        engine.load(path, 0)
    return [engine.run() for engine in engines]


def _rows(skill: str, names: Sequence[str], timed: Sequence[_Timed]) -> list[dict[str, Any]]:
    """One of each engine: the medians of the repeats of its time and of that through the first
    one's, and the share of calls with the first one's tokens."""
    repeats = sorted({one.repeat for one in timed})
    sums = [
        [sum(one.wall_s[place] for one in timed if one.repeat == repeat) for repeat in repeats]
        for place in range(len(names))
    ]
    return [
        {
            "calls": skill,
            "engine": name,
            "tokens": sum(one.num_tokens for one in timed),
            "wall_s": statistics.median(sums[place]),
            "ratio": statistics.median(b / a for a, b in zip(sums[0], sums[place], strict=True)),
            "same_tokens": statistics.fmean(one.shas[place] == one.shas[0] for one in timed),
        }
        for place, name in enumerate(names)
    ]
