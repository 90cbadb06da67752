"""What analogies tell of outputs that are new, without a model: agents' conversations are replayed.

The right replies to held-out tasks of the embedded model's training are said word by word. Behind a
number of conversations, others are foretold: at their outputs' start, after a third, half and the
first line; and as the engine asks, where what counts is how early the right call is told, and how
many wrong ones are.
"""

from __future__ import annotations

import argparse
import re
import time
from dataclasses import dataclass, field
from typing import Any

from ...flags import count
from ...runtime.programs.analogies import Analogies, Analogy
from ...runtime.programs.foretelling import MIN_ANALOGY_CHANCE
from ..harness.report import write_report
from .agent_tasks import answered_tasks
from .conversations import ACTION, STOP, Conversation, use_tool

MAX_PROMPT_CHARS = 1500  # of a prompt's end
MIN_AT_PLACES = 0.5  # the chance from which guesses count at the places
PLACES = ("start", "third", "half", "line")
_WORD_END = re.compile(r"\b\w+")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench analogies`."""
    add = parser.add_argument
    add("--history", type=count, nargs="+", default=[20, 60, 100], metavar="N",
        help="conversations before (default: 20 60 100)")  # fmt: skip
    add("--conversations", type=count, default=60, metavar="N", help="(default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    tasks = answered_tasks()
    rows = []
    for num_before in args.history:
        seen = _Seen()
        for number, (task, replies) in enumerate(tasks[: num_before + args.conversations]):
            _replay(seen, task, replies, is_measured=number >= num_before)
        rows.append(seen.row(num_before))
    write_report("analogies", rows, args)
    return 0


@dataclass(slots=True)
class _Seen:
    """Examples, and what was told of measured outputs."""

    known: Analogies = field(default_factory=Analogies)
    probed: Analogies = field(default_factory=Analogies)  # the same, asked at the places alone
    num_calls: int = 0
    told: dict[str, list[bool]] = field(default_factory=lambda: {place: [] for place in PLACES})
    left: list[float] = field(default_factory=list)  # of outputs, when right calls were told
    num_wrong: int = 0  # calls that were told
    asked_s: list[float] = field(default_factory=list)  # of a core's time

    def row(self, num_before: int) -> dict[str, Any]:
        shares = {
            place: f"{_share(sum(told), len(told))} of {len(told)}, "
            f"{_share(sum(told), self.num_calls)}"
            for place, told in self.told.items()
        }
        num_told = len(self.left) + self.num_wrong
        return {
            "before": num_before,
            "calls": self.num_calls,
            **shares,
            "told": len(self.left),
            "right": _share(len(self.left), num_told),
            "ahead": _share(sum(self.left), self.num_calls),
            "ms": f"{sum(self.asked_s) / max(1, len(self.asked_s)) * 1e3:.2f}",
        }


def _replay(seen: _Seen, task: Conversation, replies: list[str], *, is_measured: bool) -> None:
    """A conversation as the engine sees it, one gen behind the other."""
    text = "<|end|>".join(f"<|system|>{each}" for each in task.system)
    told: Analogy | None = None
    probed: Analogy | None = None
    questions, action = iter(task.user), None
    for reply in replies:
        if action is None:
            appended = f"<|end|><|user|>{next(questions)}<|end|><|assistant|>"
        else:
            appended = f"{STOP} {use_tool(action[1], action[2], task.facts)}\n"
        output, text = reply.removesuffix(STOP), text + appended
        told = seen.known.open("op", text[-MAX_PROMPT_CHARS:], told, appended)
        probed = seen.probed.open("op", text[-MAX_PROMPT_CHARS:], probed, appended)
        if is_measured:
            _foretell(seen, told, output)
            _probe(seen, probed, output)
        told.end(output)
        probed.end(output)
        text, action = text + output, ACTION.search(output)


def _foretell(seen: _Seen, analogy: Analogy, output: str) -> None:
    """As `foretelling` asks: at each word, unless what was told may still come true."""
    call, told, wrong = _call(output), None, set()
    seen.num_calls += call is not None
    for end in (0, *(match.end() for match in _WORD_END.finditer(output))):
        if told is not None and told.startswith(output[:end]):
            continue
        began_s = time.thread_time()
        proposal = analogy.propose(output[:end])
        seen.asked_s.append(time.thread_time() - began_s)
        if proposal is None or proposal.own.chance < MIN_ANALOGY_CHANCE:
            continue
        told = proposal.own.text
        if told == output and call is not None:
            seen.left.append(1 - end / len(output))
        elif told != output and _call(told) is not None:
            wrong.add(told)
    seen.num_wrong += len(wrong)


def _probe(seen: _Seen, analogy: Analogy, output: str) -> None:
    """At each place, whatever was told before."""
    line = output.find("\n")
    ends = (0, len(output) // 3, len(output) // 2, len(output) if line < 0 else line)
    for place, end in zip(PLACES, ends, strict=True):
        proposal = analogy.propose(output[:end])
        if proposal is None or proposal.own.chance < MIN_AT_PLACES:
            continue
        call = _call(proposal.own.text)
        if call is not None:
            seen.told[place].append(call == _call(output))


def _call(output: str) -> str | None:
    action = ACTION.search(output)
    return None if action is None else action[0]


def _share(num: float, of: int) -> str:
    return f"{num / of:.2f}" if of else "-"
