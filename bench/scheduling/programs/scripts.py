"""What the programs of the benchmark do, as data: the same calls and pauses for every engine.

A script is turns. In a turn a tool runs, its answer is appended and a call generates; or several
calls run in parallel, each on a branch of its own that the script does not go on from. Lengths and
pauses depend on the seed alone; `repeat` draws other token ids for the same structure, so nothing
of one repeat is in a cache of the next.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ...harness.workloads import BOS, LOW


@dataclass(frozen=True, slots=True)
class Turn:
    """A tool that takes `pause_s`, where its author expects `expected_s`; then a call for each of
    `parts` (the tokens that it appends), generating `num_output` tokens."""

    parts: tuple[tuple[int, ...], ...]
    num_output: int
    pause_s: float = 0.0
    expected_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Script:
    """A program that starts `start_s` after the first one."""

    kind: str
    turns: tuple[Turn, ...]
    start_s: float = 0.0

    @property
    def num_calls(self) -> int:
        """All its calls."""
        return sum(len(turn.parts) for turn in self.turns)

    @property
    def num_tokens(self) -> int:
        """Distinct tokens of all its contexts."""
        return sum(len(part) + turn.num_output for turn in self.turns for part in turn.parts)

    @property
    def max_context(self) -> int:
        """Tokens of its longest prompt with the output."""
        length = longest = 0
        for turn in self.turns:
            ends = [length + len(part) + turn.num_output for part in turn.parts]
            longest = max(longest, *ends)
            length = ends[0] if len(ends) == 1 else length
        return longest


@dataclass(frozen=True, slots=True)
class Work:
    """Scripts that begin with the same `num_common` tokens."""

    name: str
    description: str
    num_common: int
    scripts: tuple[Script, ...]

    @property
    def working_set(self) -> int:
        """Distinct tokens of all contexts: the contents of a cache that never evicts."""
        own = sum(script.num_tokens - self.num_common for script in self.scripts)
        return self.num_common + own


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool whose calls take `least_s` to `most_s`, uniformly; its author expects the middle."""

    least_s: float
    most_s: float

    @property
    def expected_s(self) -> float:
        return (self.least_s + self.most_s) / 2


@dataclass(frozen=True, slots=True)
class ReactSizes:
    """Sizes of the ReAct agents. `num_common`: instructions and tool descriptions, `num_task`: an
    agent's own task, `num_observed`: a tool's result, `num_output`: a thought with its action."""

    num_agents: int = 64
    num_turns: int = 6
    num_common: int = 256
    num_task: int = 96
    num_observed: int = 48
    num_output: int = 16
    tools: tuple[Tool, ...] = (Tool(0.2, 0.6), Tool(0.6, 1.5), Tool(1.5, 3.0))


@dataclass(frozen=True, slots=True)
class MixedSizes:
    """Sizes of short and long programs: a short one has a call or two, a long one a plan and then
    many parallel calls, each on its own passage. All arrive within `within_s`."""

    num_short: int = 48
    num_long: int = 6
    num_common: int = 128
    num_short_task: int = 64
    num_short_output: int = 16
    num_long_task: int = 128
    num_passages: int = 19
    num_passage: int = 224
    num_long_output: int = 24
    within_s: float = 10.0


QUICK_REACT = ReactSizes(8, 3, 48, 48, 24, 8, (Tool(0.02, 0.06), Tool(0.06, 0.15), Tool(0.15, 0.3)))
QUICK_MIXED = MixedSizes(6, 1, 16, 24, 6, 32, 5, 48, 8, 0.2)


def react(sizes: ReactSizes, *, vocab: int, seed: int = 0, repeat: int = 0) -> Work:
    """Agents that all start at once: a task, then turns of a tool's result and a thought."""
    shape, ids = random.Random(f"react {seed}"), _Ids(f"react {seed} {repeat}", vocab)
    common = (BOS, *ids.draw(sizes.num_common - 1))
    scripts = []
    for _ in range(sizes.num_agents):
        turns = [Turn((common + ids.draw(sizes.num_task),), sizes.num_output)]
        for _ in range(sizes.num_turns - 1):
            tool = shape.choice(sizes.tools)
            pause_s = shape.uniform(tool.least_s, tool.most_s)
            observed = ids.draw(sizes.num_observed)
            turns.append(Turn((observed,), sizes.num_output, pause_s, tool.expected_s))
        scripts.append(Script("react", tuple(turns)))
    description = f"{sizes.num_agents} agents of {sizes.num_turns} turns, tools between"
    return Work("react", description, sizes.num_common, tuple(scripts))


def mixed(sizes: MixedSizes, *, vocab: int, seed: int = 0, repeat: int = 0) -> Work:
    """Short and long programs in random order, arriving evenly over `within_s`."""
    shape, ids = random.Random(f"mixed {seed}"), _Ids(f"mixed {seed} {repeat}", vocab)
    common = (BOS, *ids.draw(sizes.num_common - 1))
    kinds = ["short"] * sizes.num_short + ["long"] * sizes.num_long
    shape.shuffle(kinds)
    starts = sorted(shape.uniform(0.0, sizes.within_s) for _ in kinds)
    scripts = []
    for kind, start_s in zip(kinds, starts, strict=True):
        turns = _long(sizes, common, ids) if kind == "long" else _short(sizes, common, ids, shape)
        scripts.append(Script(kind, turns, start_s - starts[0]))
    description = f"{sizes.num_short} short and {sizes.num_long} long programs"
    return Work("mixed", description, sizes.num_common, tuple(scripts))


def _short(
    sizes: MixedSizes, common: tuple[int, ...], ids: _Ids, shape: random.Random
) -> tuple[Turn, ...]:
    first = Turn((common + ids.draw(sizes.num_short_task),), sizes.num_short_output)
    if shape.random() < 0.5:
        return (first,)
    return (first, Turn((ids.draw(sizes.num_short_task),), sizes.num_short_output))


def _long(sizes: MixedSizes, common: tuple[int, ...], ids: _Ids) -> tuple[Turn, ...]:
    plan = Turn((common + ids.draw(sizes.num_long_task),), sizes.num_long_output)
    passages = tuple(ids.draw(sizes.num_passage) for _ in range(sizes.num_passages))
    return (plan, Turn(passages, sizes.num_long_output))


class _Ids:
    """Seeded token ids, none of them special."""

    def __init__(self, seed: str, vocab: int) -> None:
        self._numbers = random.Random(seed)
        self._ids: Sequence[int] = range(LOW, vocab)

    def draw(self, count: int) -> tuple[int, ...]:
        return tuple(self._numbers.choices(self._ids, k=count))
