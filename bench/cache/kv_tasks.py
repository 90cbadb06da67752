"""Questions behind texts that are no use to them, whose answers are known: what `kv-policies` asks.

The embedded model was trained on short texts, and answers nothing that adds up what several of
them say; so there is no task of that kind, and none is longer than it can read.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

RECORD_SIZE = 4  # keys
_NAMES = (
    "amber", "anvil", "basil", "bronze", "cedar", "copper", "dagger", "delta", "ember", "falcon",
    "flint", "garnet", "grove", "harbor", "hazel", "indigo", "iris", "jade", "jasper", "karst",
    "kettle", "lantern", "linen", "maple", "marble", "nectar", "nickel", "onyx", "opal", "pearl",
    "quartz", "raven", "sable", "topaz", "umber", "velvet", "willow", "xenon", "yarrow", "zinc",
)  # fmt: skip
_CITIES = (
    "Bern", "Dresden", "Ghent", "Graz", "Lyon", "Malmo", "Memphis", "Oslo", "Porto", "Split",
    "Turin", "Venice",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A text among others, and questions about it, one after the other."""

    before: str
    own: str
    after: str
    questions: tuple[str, ...]
    answers: tuple[str, ...]
    limits: dict[str, Any] = field(default_factory=dict)  # of each answer
    max_tokens: int = 24

    def is_right(self, index: int, reply: str) -> bool:
        """Whether a reply is that answer: of JSON, the same value."""
        if not self.limits:
            return reply.strip() == self.answers[index]
        try:
            return bool(json.loads(reply) == json.loads(self.answers[index]))
        except ValueError:
            return False


def extractions(num: int, num_others: int) -> list[Case]:
    """Texts from which JSON is to be extracted, each behind those of others; at most 200."""
    written = files(__package__).joinpath("../speculation/data/extractions.json").read_text()
    told = json.loads(written)
    rng = random.Random(7)
    texts = [fields["user"][0].partition("\n")[0] for fields in told]
    return [
        Case(
            "\n".join(rng.sample(texts[:index] + texts[index + 1 :], num_others)) + "\n",
            "",
            "",
            (fields["user"][0],),
            (fields["answers"][0],),
            fields["limits"][0],
            160,
        )
        for index, fields in enumerate(told[:num])
    ]


def needles(num: int, num_others: int, num_questions: int = 1) -> list[Case]:
    """Records of names and values, one of which is asked for, wherever it is among the others."""
    rng = random.Random(7)
    return [_needle(rng, num_others, num_questions) for _ in range(num)]


def _needle(rng: random.Random, num_others: int, num_questions: int) -> Case:
    num_records = min(num_others + 1, len(_NAMES) // RECORD_SIZE)
    names = rng.sample(_NAMES, num_records * RECORD_SIZE)
    values = [rng.choice((str(rng.randrange(10, 999)), rng.choice(_CITIES))) for _ in names]
    pairs = list(zip(names, values, strict=True))
    records = [pairs[at : at + RECORD_SIZE] for at in range(0, len(pairs), RECORD_SIZE)]
    lines = [". ".join(f"{name}: {value}" for name, value in each) + "\n" for each in records]
    own = rng.randrange(num_records)
    asked = rng.sample(records[own], num_questions)
    return Case(
        "".join(lines[:own]),
        lines[own],
        "".join(lines[own + 1 :]),
        tuple(f"What is {name}?" for name, _ in asked),
        tuple(value for _, value in asked),
    )


TASKS: dict[str, Callable[[int, int], list[Case]]] = {
    "extract": extractions,
    "needle": needles,
    "keys": lambda num, num_others: needles(num, num_others, 3),
}
