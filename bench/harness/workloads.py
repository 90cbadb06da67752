"""Workloads for comparing serving engines: token ids in, token ids out, greedy, no text.

A workload is a forest of requests. A root's prompt is its `tokens`; a child's is its parent's
prompt, then its parent's output, then its own `tokens`. The JSON form is one object:

    {"name", "description", "vocab", "low", "ignore_eos", "json_schema",
     "requests": [{"id", "parent", "stage", "tokens", "max_tokens"}, ...]}

Runs under any engine's own Python: standard library only.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import InvalidRequest
from ...flags import count

LOW = 300  # ids below are special tokens and single bytes
BOS = 1  # begins every prompt, as with a tokenizer
ROTATION = 7919  # offset of ids between repeats (a prime)
DEFAULT_VOCAB = 32_000


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request; `stage` is its depth in the forest."""

    id: int
    tokens: tuple[int, ...]
    max_tokens: int
    parent: int | None = None
    stage: int = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, with parents before their children."""

    name: str
    description: str
    vocab: int
    ignore_eos: bool
    json_schema: dict[str, Any] | None
    requests: tuple[WorkItem, ...]
    low: int = LOW

    def rotated(self, repeat: int) -> Workload:
        """The same structure over other ids, so that no other repeat is cached."""
        span = self.vocab - self.low
        shift = repeat * ROTATION % span

        def moved(token: int) -> int:
            return token if token < self.low else self.low + (token - self.low + shift) % span

        items = (replace(r, tokens=tuple(map(moved, r.tokens))) for r in self.requests)
        return replace(self, requests=tuple(items))

    def children(self) -> dict[int | None, list[WorkItem]]:
        """Requests by parent; the roots under None."""
        found: dict[int | None, list[WorkItem]] = {}
        for item in self.requests:
            found.setdefault(item.parent, []).append(item)
        return found

    def stages(self) -> list[list[WorkItem]]:
        """Requests by depth: each stage needs only the outputs of those before it."""
        found: dict[int, list[WorkItem]] = {}
        for item in self.requests:
            found.setdefault(item.stage, []).append(item)
        return [found[stage] for stage in sorted(found)]

    def num_tokens(self) -> int:
        """Tokens of the longest prompt with its output: the context that a model needs."""
        length: dict[int | None, int] = {None: 0}
        for item in self.requests:
            length[item.id] = length[item.parent] + len(item.tokens) + item.max_tokens
        return max(length.values())

    def to_json(self) -> str:
        """The exchange form."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Workload:
        """Read the exchange form."""
        fields = json.loads(text)
        items = (WorkItem(**{**r, "tokens": tuple(r["tokens"])}) for r in fields["requests"])
        return cls(**{**fields, "requests": tuple(items)})


class PromptBook:
    """Prompts of a running workload: each is known once its parent's output is."""

    def __init__(self) -> None:
        self.prompts: dict[int, list[int]] = {}
        self.outputs: dict[int, list[int]] = {}

    def prompt(self, item: WorkItem) -> list[int]:
        """The whole prompt of `item`."""
        before: list[int] = []
        if item.parent is not None:
            before = self.prompts[item.parent] + self.outputs[item.parent]
        self.prompts[item.id] = before + list(item.tokens)
        return self.prompts[item.id]


# --- the definitions -----------------------------------------------------------------------------

Draw = Callable[[int], tuple[int, ...]]  # that many random ids
Scale = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class Definition:
    """How a workload is made; `number` is its index in the seeds."""

    name: str
    alias: str
    number: int
    description: str
    make: Callable[[Draw, Scale], Iterator[WorkItem]]
    json_schema: dict[str, Any] | None = None


def make_workload(
    name: str, *, vocab: int = DEFAULT_VOCAB, seed: int = 0, scale: float = 1.0
) -> Workload:
    """The workload of this name or alias ("W1", "fanout"); `scale` multiplies the number of
    requests, conversations or trees, but for W4, D1, D32 and P1. Raises InvalidRequest."""
    known = definition(name)
    if vocab <= LOW:
        raise InvalidRequest.of("vocab", vocab, f"more than {LOW} tokens")
    numbers = random.Random(seed * 1000 + known.number)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(numbers.randrange(LOW, vocab) for _ in range(count))

    items = tuple(known.make(draw, lambda count: max(1, round(count * scale))))
    schema = known.json_schema
    return Workload(known.name, known.description, vocab, schema is None, schema, items)


def definition(name: str) -> Definition:
    """By name or alias. Raises InvalidRequest."""
    for known in DEFINITIONS:
        if name.lower() in (known.name.lower(), known.alias):
            return known
    names = ", ".join(f"{known.name} ({known.alias})" for known in DEFINITIONS)
    raise InvalidRequest.of("work", name, f"one of {names}")


def _fanout(num: int, common: int, own: int, max_tokens: int) -> Callable[..., Iterator[WorkItem]]:
    def make(draw: Draw, scale: Scale) -> Iterator[WorkItem]:
        prefix = (BOS, *draw(common - 1))
        for i in range(scale(num)):
            yield WorkItem(i, prefix + draw(own), max_tokens)

    return make


def _unshared(num: int, length: int, max_tokens: int) -> Callable[..., Iterator[WorkItem]]:
    def make(draw: Draw, scale: Scale) -> Iterator[WorkItem]:
        for i in range(scale(num)):
            yield WorkItem(i, (BOS, *draw(length - 1)), max_tokens)

    return make


def _probe(num: int, length: int, max_tokens: int) -> Callable[..., Iterator[WorkItem]]:
    """Measures a step's time at a given batch: never scaled."""

    def make(draw: Draw, scale: Scale) -> Iterator[WorkItem]:
        return _unshared(num, length, max_tokens)(draw, lambda count: count)

    return make


def _chat(draw: Draw, scale: Scale) -> Iterator[WorkItem]:
    num = scale(8)
    for turn in range(6):
        for i in range(num):
            tokens = draw(64) if turn else (BOS, *draw(63))
            parent = (turn - 1) * num + i if turn else None
            yield WorkItem(turn * num + i, tokens, 32, parent, turn)


def _tree(draw: Draw, scale: Scale) -> Iterator[WorkItem]:
    yield WorkItem(0, (BOS, *draw(511)), 32)
    level, next_id = [0], 1
    for depth in (1, 2, 3):
        children = []
        for parent in level:
            for _ in range(4):
                yield WorkItem(next_id, draw(16), 32, parent, depth)
                children.append(next_id)
                next_id += 1
        level = children


def _uneven_groups(draw: Draw, scale: Scale) -> Iterator[WorkItem]:
    """Of 1 to 12 requests each behind 32 to 1,500 common tokens."""
    between = _sizes(1)
    next_id = 0
    for _ in range(scale(12)):
        prefix = (BOS, *draw(between(32, 1500) - 1))
        for _ in range(between(1, 12)):
            yield WorkItem(next_id, prefix + draw(between(4, 64)), between(8, 64))
            next_id += 1


def _uneven_chats(draw: Draw, scale: Scale) -> Iterator[WorkItem]:
    """Of 1 to 8 turns."""
    between = _sizes(2)
    next_id = 0
    for _ in range(scale(16)):
        parent = None
        for turn in range(between(1, 8)):
            tokens = draw(between(8, 200)) if turn else (BOS, *draw(between(8, 400)))
            yield WorkItem(next_id, tokens, between(8, 64), parent, turn)
            parent, next_id = next_id, next_id + 1


def _uneven_prompts(draw: Draw, scale: Scale) -> Iterator[WorkItem]:
    between = _sizes(3)
    for i in range(scale(48)):
        yield WorkItem(i, (BOS, *draw(between(16, 1500) - 1)), between(16, 96))


def _uneven_trees(draw: Draw, scale: Scale) -> Iterator[WorkItem]:
    """Branches of 0 to 5 children, up to four levels deep."""
    between = _sizes(4)
    next_id = 0
    for _ in range(scale(3)):
        level = [WorkItem(next_id, (BOS, *draw(between(64, 800))), 24)]
        next_id += 1
        yield level[0]
        for depth in range(1, 5):
            parents = [item for item in level for _ in range(between(1, 6) - 1)]
            level = []
            for parent in parents[:64]:
                tokens, length = draw(between(4, 80)), between(8, 48)
                level.append(WorkItem(next_id, tokens, length, parent.id, depth))
                next_id += 1
            yield from level


def _sizes(seed: int) -> Callable[[int, int], int]:
    """Numbers between two others, as likely to be half as twice as large: few are. The same for
    every vocabulary."""
    numbers = random.Random(seed)

    def between(least: int, most: int) -> int:
        share: float = (most / least) ** numbers.random()
        return round(least * share)

    return between


_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "title": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "score": {"type": "integer", "minimum": 0, "maximum": 9999},
        "status": {"type": "string", "enum": ["active", "inactive", "pending", "deleted"]},
        "comment": {"type": "string", "maxLength": 32},
    },
    "required": ["name", "title", "age", "score", "status", "comment"],
    "additionalProperties": False,
}

# fmt: off
DEFINITIONS = (
    Definition("W1", "fanout", 1, "64 x (1,024 common + 32 own), 32 out",
               _fanout(64, 1024, 32, 32)),
    Definition("W2", "chat", 2, "8 conversations x 6 turns, 64 in and 32 out a turn", _chat),
    Definition("W3", "unshared", 3, "32 x 256 own, 64 out", _unshared(32, 256, 64)),
    Definition("W4", "tree", 4, "root of 512, 3 levels of 4 each, 16 in and 32 out a node", _tree),
    Definition("W5", "json", 5, "32 x 128 own under a 6-field JSON schema, up to 128 out",
               _unshared(32, 128, 128), _SCHEMA),
    Definition("W6", "deep-fanout", 9, "96 x (3,072 common + 16 own), 64 out",
               _fanout(96, 3072, 16, 64)),
    Definition("D1", "decode", 6, "decode step: 1 x 16 own, 128 out", _probe(1, 16, 128)),
    Definition("D32", "decode-32", 7, "decode step: 32 x 16 own, 128 out", _probe(32, 16, 128)),
    Definition("P1", "prefill", 8, "prefill: 1 x 2,048 own, 1 out", _probe(1, 2048, 1)),
    Definition("U1", "uneven-groups", 10, "12 groups of 1 to 12 behind 32 to 1,500 common tokens",
               _uneven_groups),
    Definition("U2", "uneven-chats", 11, "16 conversations of 1 to 8 turns", _uneven_chats),
    Definition("U3", "uneven-prompts", 12, "48 of 16 to 1,500 own, 16 to 96 out", _uneven_prompts),
    Definition("U4", "uneven-trees", 13, "3 trees of 0 to 5 children a node", _uneven_trees),
)
# fmt: on


# --- `stemma bench workloads` --------------------------------------------------------------------


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench workloads`."""
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FOLDER", help="write NAME.json there")
    add("--work", help="comma-separated names (default: all)")
    add("--vocab", type=count, default=DEFAULT_VOCAB, help="of the model (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--scale", type=float, default=1.0, help="multiplies the number of requests")


def run(args: argparse.Namespace) -> int:
    """Write the files."""
    args.out.mkdir(parents=True, exist_ok=True)
    for name in names_of(args.work, [known.name for known in DEFINITIONS]):
        made = make_workload(name, vocab=args.vocab, seed=args.seed, scale=args.scale)
        path = args.out / f"{made.name}.json"
        path.write_text(made.to_json())
        print(f"{path}: {made.description} ({len(made.requests)} requests)")
    return 0


def names_of(given: str | None, default: Sequence[str]) -> list[str]:
    """Names from a comma-separated flag, without spaces and repeats. Raises InvalidRequest."""
    names = [name.strip() for name in given.split(",") if name.strip()] if given else default
    return list(dict.fromkeys(definition(name).name for name in names))
