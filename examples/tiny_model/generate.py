"""The sample generator: an endless seeded stream of samples of all skills, and a CLI to look at it.

python generate.py --skill chat --samples 3
"""

import argparse
import random
from collections.abc import Callable, Iterator

from chat import chat_sample, chat_summary_sample
from classify import classify_sample
from copying import copy_sample
from extract import extract_many_sample, extract_sample, extract_whole_sample
from react import react_sample
from samples import Sample
from tips import tips_sample
from tools import tools_many_sample, tools_sample
from world import World
from yes_no import (
    yes_no_many_sample,
    yes_no_pairs_sample,
    yes_no_sample,
    yes_no_short_sample,
    yes_no_stated_sample,
)

SKILLS: dict[str, Callable[[World], Sample]] = {
    "react": react_sample,
    "react_many": lambda world: react_sample(world, min_questions=3, max_questions=4),
    "extract": extract_sample,
    "extract_many": extract_many_sample,
    "extract_whole": extract_whole_sample,
    "chat": chat_sample,
    "chat_summary": chat_summary_sample,
    "classify": classify_sample,
    "classify_many": lambda world: classify_sample(world, max_texts=8),
    "yes_no": yes_no_sample,
    "yes_no_stated": yes_no_stated_sample,
    "yes_no_short": yes_no_short_sample,
    "yes_no_many": yes_no_many_sample,
    "yes_no_pairs": yes_no_pairs_sample,
    "tips": tips_sample,
    "copy": copy_sample,
    "tools": tools_sample,
    "tools_many": tools_many_sample,
}
MIX = {
    "react": 0.05,
    "react_many": 0.05,
    "extract": 0.17,
    "extract_many": 0.12,
    "extract_whole": 0.04,
    "chat": 0.15,
    "chat_summary": 0.03,
    "classify": 0.02,
    "classify_many": 0.02,
    "yes_no": 0.06,
    "yes_no_stated": 0.16,
    "yes_no_short": 0.01,
    "yes_no_many": 0.03,
    "yes_no_pairs": 0.03,
    "tips": 0.07,
    "copy": 0.02,
    "tools": 0.5,
    "tools_many": 0.25,
}
WARMUP_MIX = {"copy": 0.25, "react": 0.16, "extract_many": 0.34, "chat": 0.25}


def samples(mix: dict[str, float], seed: int, held_out: bool = False) -> Iterator[Sample]:
    """Samples of the skills in `mix`, drawn by weight; the same seed gives the same samples."""
    rng = random.Random(f"{seed}-{held_out}")
    world = World(rng, held_out)
    while True:
        skill = rng.choices(list(mix), weights=list(mix.values()))[0]
        yield SKILLS[skill](world)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--skill", choices=SKILLS, help="one skill (default: the training mix)")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held-out", action="store_true", help="names that training never sees")
    args = parser.parse_args()
    stream = samples({args.skill: 1.0} if args.skill else MIX, args.seed, args.held_out)
    for _ in range(args.samples):
        print(next(stream).render(), end="\n\n")


if __name__ == "__main__":
    main()
