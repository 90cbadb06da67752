"""Early exit: what layers before the last know of the next token, and programs that stop there.

Conversations of the embedded model; three in four teach exits (exits.py), the fourth is measured.

First table, of the tokens that the model drew: how often a layer's likeliest is the last layer's,
by its state as it is (`lens`) and by its exit; then for each probability of `--sure` how many
tokens the exit is so sure of, and how many of these are right.

Second table: the programs on the engine, where each token that is computed alone stops at the first
exit that is so sure. `layers`: that such a token has had on average; `weights`: that it has read,
of a whole pass's; `bound`: how many times as fast that is where a token costs what it reads;
`same`: texts that are the whole model's; `right`: replies that are the file's `answers`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ...errors import InvalidRequest
from ...flags import count
from ...frontend.client.backend import Backend
from ...frontend.dsl.state import ProgramState
from ...runtime.checkpoint.config.model_config import ModelConfig
from ...runtime.checkpoint.location import EMBEDDED_MODEL
from ...runtime.config import EngineConfig
from ...runtime.execute.threads import configure_threads, default_num_threads
from ...runtime.models.model_config import read_model_config
from ..harness.limits import model_costs
from ..harness.report import print_table, write_report
from .conversations import MAX_ACTIONS, Conversation, is_answer
from .oracle import probability

if TYPE_CHECKING:  # they import torch
    from ...runtime.loaded_model import LoadedModel
    from .exits import Exit

_EVERY = 4  # conversation is measured
_LEAST = 2  # of conversations, as `record` demands
_SELECTING = "classify"  # a skill that generates nothing


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench early-exit`."""
    add = parser.add_argument
    add("--model", type=Path, default=EMBEDDED_MODEL, metavar="FOLDER",
        help="checkpoint (default: the embedded model)")  # fmt: skip
    add("--file", type=Path, metavar="FILE",
        help="conversations, as examples/tiny_model/conversations.py writes them "
        "(default: those of `stemma bench speculation`)")  # fmt: skip
    add("--conversations", type=count, default=40, metavar="N", help="of each skill, at most")
    add("--sure", type=probability, nargs="+", default=[0.9, 0.97, 0.99], metavar="P")
    add("--num-threads", type=count, metavar="N")


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    config = read_model_config(args.model)
    by_skill = read_cases(args.file, args.conversations)
    to_learn = [case for cases in by_skill for i, case in enumerate(cases) if i % _EVERY]
    held = [case for cases in by_skill for case in cases[::_EVERY]]
    if min(len(to_learn), len(held)) < _LEAST:
        allowed = (
            f"so many that {_LEAST} teach and {_LEAST} are measured, one in {_EVERY} of each skill"
        )
        raise InvalidRequest.of("conversations", args.conversations, allowed)
    configure_threads(args.num_threads or default_num_threads(args.model), None)
    from ...training.making import Recipe, require_trainable
    from .exits import layer_rows, learnt, states_of

    require_trainable(config, Recipe())
    exits = learnt(states_of(_loaded(args.model), _conversing(to_learn)))
    states = states_of(_loaded(args.model), _conversing(held))
    layers = layer_rows(states, exits, args.sure)
    whole = _carried_out(args.model, held)
    rows = [_row("-", whole, whole, args.model, config)]
    for sure in args.sure:
        early = _carried_out(args.model, held, exits, sure)
        rows.append(_row(f"{sure:g}", early, whole, args.model, config))
    if not args.json:
        print_table("layers", layers)
    write_report("early-exit", rows, args, layers=layers)
    return 0


@dataclass(frozen=True, slots=True)
class Case:
    """A conversation, and what is to be generated in it, if that is known."""

    conversation: Conversation
    answers: list[str] | None


def read_cases(file: Path | None, num_each: int) -> list[list[Case]]:
    """By skill, of those that generate, at most so many. Raises InvalidRequest."""
    path = files(__package__).joinpath("data/conversations.json") if file is None else file
    by_skill: dict[str, list[Case]] = {}
    try:
        for fields in json.loads(path.read_text(encoding="utf-8")):
            answers = fields.pop("answers", None)
            case = Case(Conversation(**fields), answers)
            cases = by_skill.setdefault(case.conversation.skill, [])
            if len(cases) < num_each and case.conversation.skill != _SELECTING:
                cases.append(case)
    except (OSError, TypeError, ValueError, AttributeError) as error:
        allowed = f"a file that examples/tiny_model/conversations.py has written ({error})"
        raise InvalidRequest.of("file", str(file), allowed) from error
    return list(by_skill.values())


@dataclass(frozen=True, slots=True)
class _CarriedOut:
    """Conversations on the engine."""

    texts: list[str]
    num_layers: list[int]  # that each token computed alone has had
    right: list[bool]  # of each reply whose answer is known


def _carried_out(
    model: Path, cases: Sequence[Case], exits: Sequence[Exit] = (), sure: float = 1.0
) -> _CarriedOut:
    """In which tokens stop where exits are so sure."""
    from ...runtime.execute.captured import CapturedForward
    from ...training.recording import recording
    from .exits import exiting

    loaded = _loaded(model)
    decoder = exiting(loaded, exits, sure)
    loaded.runner.steps.forward = CapturedForward(decoder, None)
    with recording(loaded) as (backend, _):
        states = _converse(cases, backend)
        texts = [state.text() for state in states]
        right = [
            is_answer(said, answer)
            for case, state in zip(cases, states, strict=True)
            if case.answers is not None
            for said, answer in zip_longest(_said(case, state), case.answers)
        ]
    return _CarriedOut(texts, decoder.num_layers, right)


def _loaded(model: Path) -> LoadedModel:
    from ...runtime.loaded_model import LoadedModel

    return LoadedModel(EngineConfig(model=str(model), speculate="off"))


def _converse(cases: Sequence[Case], backend: Backend) -> list[ProgramState]:
    """One after the other, so that tokens are computed alone."""
    states = []
    for case in cases:
        told = case.conversation
        states.append(told.program.run(case=told, temperature=0.0, backend=backend))
        states[-1].text()  # it has ended
    return states


def _conversing(cases: Sequence[Case]) -> Callable[[Backend], None]:
    def run(backend: Backend) -> None:
        _converse(cases, backend)

    return run


def _said(case: Case, state: ProgramState) -> list[str]:
    """What was generated, by the names that the programs give it (conversations.py)."""
    names = []
    for turn in range(len(case.conversation.user)):
        names.append(f"reply{turn}")
        names += [f"step{turn}.{step}" for step in range(MAX_ACTIONS + 1)]
    return [state[name] for name in names if name in state]


def _row(
    name: str, found: _CarriedOut, whole: _CarriedOut, model: Path, config: ModelConfig
) -> dict[str, Any]:
    costs, num_layers = model_costs(model), fmean(found.num_layers)
    stopped = fmean(num < config.num_layers for num in found.num_layers)
    kv_weights = 2 * config.num_kv_heads * config.head_dim * config.hidden_size
    unread = (config.num_layers - num_layers) * (
        costs.body_weights / config.num_layers - kv_weights
    )
    of_maps = stopped * config.hidden_size**2
    weights = 1 - (unread - of_maps) / (costs.body_weights + costs.head_weights)
    row = {
        "sure": name,
        "stopped": stopped,
        "layers": num_layers,
        "weights": weights,
        "bound": 1 / weights,
        "same": fmean(a == b for a, b in zip(found.texts, whole.texts, strict=True)),
    }
    return row | ({"right": fmean(found.right)} if found.right else {})
