"""Tasks of the embedded model's agents: what people ask, and what a pipeline asks.

People's are held-out cases of its training, of hundreds of phrasings. A pipeline has one prompt and
five templates, with other names and numbers each time.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from importlib.resources import files

from .conversations import Conversation

LOADS = ("people", "pipeline")
_NUM_CASES = 40  # of people's that are cases; the others are history
_SYSTEM = "You have two tools, calculator[expression] and lookup[subject]. Think, act, then answer."
_SYLLABLES = ("bra", "dor", "fel", "gan", "hul", "kem", "lim", "mor", "nes", "pol", "rin", "sta",
              "tur", "vel", "wim", "zar")  # fmt: skip


def agent_tasks(load: str, num_cases: int, num_before: int) -> tuple[list[Conversation], ...]:
    """Cases, and others that were carried out before, at most so many; always the same ones."""
    if load == "pipeline":
        tasks = [_pipeline_task(number) for number in range(num_cases + num_before)]
        return tasks[:num_cases], tasks[num_cases:]
    tasks = [task for task, _ in answered_tasks()]
    return tasks[: min(num_cases, _NUM_CASES)], tasks[_NUM_CASES : _NUM_CASES + num_before]


def answered_tasks() -> list[tuple[Conversation, list[str]]]:
    """People's, and what a model that is always right says."""
    text = files(__package__).joinpath("data/agents.json").read_text()
    told = json.loads(text)
    answers = [fields.pop("answers") for fields in told]
    return [(Conversation(**fields), said) for fields, said in zip(told, answers, strict=True)]


def _pipeline_task(number: int) -> Conversation:
    rng = random.Random(number)
    one, other = _name(rng), _name(rng)
    small, large = rng.randint(2, 99), rng.randint(100, 9999)
    task = Conversation("react", [_SYSTEM], [], [], {})
    found = [str(rng.randint(100, 9999)) for _ in range(2)]
    match number % 5:
        case 0:
            facts = {f"population of {one}": found[0]}
            return replace(task, user=[f"How many people live in {one}?"], facts=facts)
        case 1:
            return replace(task, user=[f"What is {small} times {large}?"])
        case 2:
            return replace(task, user=[f"How much is {large} less {small}?"])
        case 3:
            facts = {f"mayor of {one}": f"{other} {_name(rng)}"}
            return replace(task, user=[f"Who is the mayor of {one}?"], facts=facts)
        case _:
            facts = {
                f"height of Mount {name}": f for name, f in zip((one, other), found, strict=True)
            }
            question = f"How much higher is Mount {one} than Mount {other}?"
            return replace(task, user=[question], facts=facts)


def _name(rng: random.Random) -> str:
    return "".join(rng.sample(_SYLLABLES, rng.randint(2, 3))).capitalize()
