"""`stemma train-draft MODEL --programs FILE --out DIR`: a draft that learns what a model says."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InvalidRequest
from ..flags import count
from ..frontend.client.progress import byte_progress
from ..runtime.checkpoint.location import EMBEDDED_MODEL, locate_model
from ..runtime.checkpoint.new_folder import require_new
from ..runtime.config import EngineConfig
from ..runtime.execute.threads import configure_threads
from ..runtime.models.model_config import read_model_config
from .connect import Commands
from .program_work import require_work, work_of

if TYPE_CHECKING:
    from ..training.making import Report

_KINDS = ("eagle", "medusa", "model")
_SHOWN_EVERY_S = 5.0


def add_parser(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "train-draft", help="train a draft for a model, on what it says in your programs"
    )
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        default=str(EMBEDDED_MODEL),
        metavar="MODEL",
        help="folder in Hugging Face layout, hub id or GGUF file (default: the embedded model)",
    )
    add(
        "--programs",
        type=Path,
        required=True,
        metavar="FILE",
        help="a Python file whose main block runs programs, or JSON lines of chats or prompts",
    )
    add("--out", type=Path, required=True, metavar="DIR", help="folder to be made")
    add(
        "--kind",
        choices=_KINDS,
        default=_KINDS[0],
        help="an EAGLE head, Medusa's heads, or a small model of its own (default: %(default)s)",
    )
    add("--steps", type=count, default=1500, metavar="N", help="default: %(default)s")
    add("--max-minutes", type=float, metavar="N", help="train so long, if that is less")
    add(
        "--held-out",
        type=float,
        default=0.1,
        metavar="SHARE",
        help="of the programs, to measure by (default: %(default)s)",
    )
    add("--seed", type=int, default=0, metavar="N", help="fixes all draws (default: %(default)s)")
    add("--revision", metavar="NAME", help="of a hub id: branch, tag or commit")
    add("--json", action="store_true", help="print what came of it as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Record, train, write; say how often guesses were right before and are now."""
    require_new(args.out)
    require_work(args.programs, "programs")
    if args.max_minutes is not None and not args.max_minutes > 0:
        raise InvalidRequest.of("max_minutes", args.max_minutes, "a number above 0")
    with byte_progress(sys.stderr, f"fetching {args.model}") as on_progress:
        folder = locate_model(args.model, revision=args.revision, on_progress=on_progress)
    config = read_model_config(folder)
    if "torch" not in sys.modules:  # which reads what this sets when it is imported
        configure_threads(len(os.sched_getaffinity(0)), None)
    from ..runtime.loaded_model import LoadedModel
    from ..training.making import Recipe, make_draft, record, require_trainable

    recipe = Recipe(args.kind, args.steps, args.max_minutes, args.held_out, args.seed)
    require_trainable(config, recipe)
    work = work_of(args.programs, "programs")
    loaded = LoadedModel(EngineConfig(model=str(folder), speculate="off"))
    started = time.monotonic()
    programs = record(loaded, work, str(args.programs), "programs")
    num_tokens = sum(text.num_guessed for texts in programs for text in texts)
    _say(f"recorded {len(programs)} programs, {num_tokens} tokens to guess", started)
    report = make_draft(loaded, programs, args.out, recipe, _Shown(args.steps).step)
    print(json.dumps(_summary(args, report)) if args.json else _text(args, report))
    return 0


class _Shown:
    """Lines of progress, one every few seconds."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._started = self._last = time.monotonic()
        self._losses: list[float] = []

    def step(self, done: int, loss: float) -> None:
        self._losses.append(loss)
        if time.monotonic() - self._last >= _SHOWN_EVERY_S:
            self._last = time.monotonic()
            mean = sum(self._losses) / len(self._losses)
            self._losses.clear()
            _say(f"step {done} of at most {self._num_steps}, loss {mean:.3f}", self._started)


def _say(text: str, started: float) -> None:
    print(f"{text}, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def _summary(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    return {"out": str(args.out), **asdict(report), "tokens_a_step": report.tokens_a_step}


def _share(rate: float | None) -> str:
    return f"{'-':>7}" if rate is None else f"{rate:7.1%}"


def _text(args: argparse.Namespace, report: Report) -> str:
    lines = [
        f"{args.out}: {args.kind}, {report.num_weights / 1e6:.2f} million weights, trained on "
        f"{report.num_tokens} tokens in {report.num_steps} steps, {report.seconds:.0f} s",
        f"guesses that are right, of {report.num_held_tokens} tokens held out, where those before "
        "them are:",
        "  place    before   after",
    ]
    for place, (before, after) in enumerate(zip(report.before, report.after, strict=True), 1):
        lines.append(f"  {place}       {_share(before)} {_share(after)}")
    lines += [
        f"with {len(report.after)} guesses a step at most {report.tokens_a_step:.2f} tokens a step",
        f"try it: stemma serve --model {args.model} --draft-model {args.out}",
    ]
    return "\n".join(lines)
