"""Suffix drafts for recorded calls: tokens a step that they would bring, and their cost.

Calls are replayed as if a step verified all of a draft of at most `--room` tokens: propose, take
the prefix that is right and the token behind it. Programs run one after the other, the branches of
one side by side. The calls are those of conversations with the embedded model, or with --calls
those of a file: JSON lines with `program`, `op`, `prompt`, `output` and, perhaps, `forced`
(1 for each token that costs no step), `after` (indices of the calls that must have ended) and
`skill`.

`propose_us` is CPU time a step, with reading the prompt at the first; `prompt_us` is a proposal
behind a new prompt of 8,192 random tokens, `extend_us` one of as many tokens appended singly, each
the least of three runs. `said` and `was` compare confidences with what became of the tokens.

The last two settings have three drafters, and as many tokens to verify as the others: those of the
one draft of which most is expected, or the likeliest tokens of the tree of all three (EAGLE-2's
rule, Li et al. 2024, arXiv:2406.16858).
"""

from __future__ import annotations

import argparse
import random
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...flags import count
from ...runtime.speculate.drafter import NO_DRAFT, Draft
from ...runtime.speculate.suffix import MAX_MATCH, Place, Scope, SuffixDrafter, SuffixText
from ..harness.report import print_table, write_report
from .recorded_calls import RecordedCall, read_calls, record_calls

_REPEATS = 3
_NUM_TOKENS = 8192
_EACH = ((Scope.OWN,), (Scope.OP,), (Scope.NAMESPACE,))


@dataclass(frozen=True, slots=True)
class Setting:
    """Drafters by where they look, and how much of a match counts."""

    scopes: tuple[tuple[Scope, ...], ...]
    max_match: int = MAX_MATCH
    is_tree: bool = False  # verified together; else the best draft is

    def drafters(self) -> list[SuffixDrafter]:
        """New ones."""
        return [SuffixDrafter(scopes=each, max_match=self.max_match) for each in self.scopes]


SETTINGS: dict[str, Setting] = {
    "off": Setting(((),)),
    "prompt lookup": Setting(((Scope.OWN,),), 3),
    "own text": Setting(((Scope.OWN,),)),
    "and program": Setting(((Scope.OWN, Scope.PROGRAM),)),
    "and op": Setting(((Scope.OWN, Scope.PROGRAM, Scope.OP),)),
    "and namespace": Setting((tuple(Scope),)),
    "best of three": Setting(_EACH),
    "tree of three": Setting(_EACH, is_tree=True),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench drafting`."""
    parser.add_argument("--calls", type=Path, metavar="FILE", help="recorded calls (JSON lines)")
    parser.add_argument(
        "--conversations", type=count, default=40, metavar="N", help="to be recorded, of each kind"
    )
    parser.add_argument("--room", type=count, default=8, metavar="N", help="tokens of a draft")
    parser.add_argument(
        "--after-prefill", action="store_true", help="no draft for the first token of a call"
    )


def run(args: argparse.Namespace) -> int:
    """Replay and report."""
    calls = read_calls(args.calls) if args.calls else record_calls(args.conversations)
    rows: list[dict[str, Any]] = []
    by_skill: dict[str, dict[str, float]] = {}
    for name, setting in SETTINGS.items():
        replays = []
        for _ in range(_REPEATS):
            replay = Replay(setting.drafters(), args, setting.is_tree)
            replay.run(calls)
            replays.append(replay)
        rows.append({"drafts": name, **_row(replays), **_costs(setting)})
        by_skill[name] = replays[0].tokens_a_step()
    skills = [
        {"skill": skill, **{name: found[skill] for name, found in by_skill.items()}}
        for skill in by_skill["off"]
    ]
    if not args.json:
        print_table("tokens a step", skills)
    write_report("drafting", rows, args, by_skill=skills)
    return 0


@dataclass(slots=True)
class _Running:
    call: RecordedCall
    texts: list[SuffixText]
    num_done: int = 0


@dataclass(slots=True)
class Replay:
    """The way of drafters through all calls, and what it came to."""

    drafters: list[SuffixDrafter]
    args: argparse.Namespace
    is_tree: bool = False
    steps: dict[str, int] = field(default_factory=dict)  # by skill
    tokens: dict[str, int] = field(default_factory=dict)
    num_drafted: int = 0
    propose_s: float = 0.0
    verified: list[tuple[float, bool]] = field(default_factory=list)  # confidence, and what was

    def run(self, calls: list[RecordedCall]) -> None:
        """All of them."""
        ended: set[int] = set()
        for program in dict.fromkeys(call.program for call in calls):
            waiting = [i for i, call in enumerate(calls) if call.program == program]
            running: dict[int, _Running] = {}
            while waiting or running:
                for index in [i for i in waiting if ended.issuperset(calls[i].after)]:
                    waiting.remove(index)
                    running[index] = self._open(calls[index])
                for index, each in [*running.items()]:
                    self._step(each)
                    if each.num_done == len(each.call.output):
                        for text in running.pop(index).texts:
                            text.close()
                        ended.add(index)

    def tokens_a_step(self) -> dict[str, float]:
        """By skill."""
        return {skill: count / self.steps[skill] for skill, count in self.tokens.items()}

    def _open(self, call: RecordedCall) -> _Running:
        place = Place("", call.program, call.op)
        prompt = array("i", call.prompt)
        return _Running(call, [drafter.open_at(place, prompt) for drafter in self.drafters])

    def _step(self, running: _Running) -> None:
        output, forced, skill = running.call.output, running.call.forced, running.call.skill
        end = running.num_done
        while end < len(output) and forced and forced[end]:
            end += 1
        self._extend(running, end)
        if end < len(output):
            drafts: list[Draft] = []
            if end or not self.args.after_prefill:
                drafts = self._propose(running)
            chosen = drafts if self.is_tree else [max(drafts, key=_num_expected, default=NO_DRAFT)]
            tree = _likeliest(chosen, self.args.room)
            num_right = 0
            while num_right < len(output) - end and tuple(output[end:][: num_right + 1]) in tree:
                num_right += 1
            for text, draft in zip(running.texts, drafts):
                self._note(text, draft.first(len(output) - end), output[end:])
            self._extend(running, min(end + num_right + 1, len(output)))
            self.num_drafted += len(tree)
            self.steps[skill] = self.steps.get(skill, 0) + 1

    def _note(self, text: SuffixText, draft: Draft, output: list[int]) -> None:
        num_right = _num_same(draft.tokens, output)
        text.note(draft, num_right)
        for i, confidence in enumerate(draft.confidences[: num_right + 1]):
            self.verified.append((confidence, i < num_right))

    def _propose(self, running: _Running) -> list[Draft]:
        started = time.thread_time()
        drafts = [text.propose(self.args.room) for text in running.texts]
        self.propose_s += time.thread_time() - started
        return drafts

    def _extend(self, running: _Running, end: int) -> None:
        tokens = running.call.output[running.num_done : end]
        for text in running.texts:
            text.extend(tokens)
        skill, running.num_done = running.call.skill, end
        self.tokens[skill] = self.tokens.get(skill, 0) + len(tokens)


def _num_expected(draft: Draft) -> float:
    return sum(draft.chances)


def _likeliest(drafts: Iterable[Draft], room: int) -> set[tuple[int, ...]]:
    """Of the tree of all drafts as many tokens as there is room for, each by the path to it."""
    chances: dict[tuple[int, ...], float] = {}
    for draft in drafts:
        for end, chance in enumerate(draft.chances, 1):
            path = draft.tokens[:end]
            chances[path] = max(chance, chances.get(path, 0.0))
    return set(sorted(chances, key=lambda path: (-chances[path], len(path)))[:room])


def _num_same(draft: tuple[int, ...], output: list[int]) -> int:
    same = (i for i, (a, b) in enumerate(zip(draft, output)) if a != b)
    return next(same, min(len(draft), len(output)))


def _row(replays: list[Replay]) -> dict[str, Any]:
    """The figures of equal replays."""
    first = replays[0]
    num_steps, num_tokens = sum(first.steps.values()), sum(first.tokens.values())
    num_verified = max(1, len(first.verified))
    return {
        "tokens_a_step": num_tokens / num_steps,
        "drafted_a_step": first.num_drafted / num_steps,
        "said": sum(confidence for confidence, _ in first.verified) / num_verified,
        "was": sum(is_right for _, is_right in first.verified) / num_verified,
        "propose_us": 1e6 * min(replay.propose_s for replay in replays) / num_steps,
        "history_bytes": sum(each.describe().history_bytes for each in first.drafters),
    }


def _costs(setting: Setting) -> dict[str, float]:
    """Of its first drafter."""
    rng, drafter = random.Random(0), setting.drafters()[0]
    tokens = array("i", (rng.randrange(300, 4000) for _ in range(_NUM_TOKENS)))
    prompt_s, extend_s = [], []
    for program in range(_REPEATS):
        started = time.thread_time()
        text = drafter.open_at(Place("", program, "op"), tokens)
        text.propose(8)
        prompt_s.append(time.thread_time() - started)
        started = time.thread_time()
        for token in tokens:
            text.extend((token,))
        extend_s.append(time.thread_time() - started)
        text.close()
    return {"prompt_us": 1e6 * min(prompt_s), "extend_us": 1e6 * min(extend_s) / _NUM_TOKENS}
