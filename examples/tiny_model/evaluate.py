"""How often stemma-tiny is exactly right on held-out cases, measured through Stemma's public API.

    python evaluate.py [--samples 300] [--skill react] [--json] [--model FOLDER]

Held-out cases hold names that training never saw. A chat or an extraction is right if every
reply of the conversation is the expected one, character by character, the model's own replies
being its history. A ReAct conversation runs the real loop with a real calculator and the case's
facts, and is right if every final answer is.
"""

import argparse
import json
import math
import random
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from generate import samples
from react import NOT_FOUND, calculate
from samples import STOP, Sample

import stemma as st

SKILLS = ("react", "extract", "extract_many", "chat", "extra")
SEED = 4242
MAX_ACTIONS = 5
ACTION = re.compile(r"\nAction: (calculator|lookup)\[(.*)\]$", re.DOTALL)
ANSWER = re.compile(r"\nAnswer: (.*)", re.DOTALL)


@dataclass(frozen=True)
class Row:
    """The result of one skill; low and high are a 95% Wilson interval, in percent like exact."""

    skill: str
    cases: int
    exact: float
    low: float
    high: float
    replies: int
    replies_exact: float


@dataclass(frozen=True)
class Outcome:
    """What the model wrote in one case, beside what was expected, one entry for each question."""

    sample: Sample
    written: list[str]
    expected: list[str]


@st.function
def converse(s: st.ProgramState, sample: Sample) -> None:
    """The case as a program: its system prompt and questions, the replies generated."""
    for text in sample.messages("system"):
        s += st.system(text)
    for turn, question in enumerate(sample.messages("user")):
        s += st.user(question)
        if sample.skill == "react":
            _answer_with_tools(s, turn, sample.facts)
        else:
            s += st.assistant(st.gen(f"reply{turn}", max_tokens=200, temperature=0))


def _answer_with_tools(s: st.ProgramState, turn: int, facts: dict[str, str]) -> None:
    """One assistant turn: thought, action, observation, until there is an answer."""
    s += st.assistant_begin()
    for step in range(MAX_ACTIONS + 1):
        name = f"step{turn}.{step}"
        s += st.gen(name, max_tokens=120, stop=STOP, temperature=0)
        action = ACTION.search(s[name])
        if action is None:
            break
        s += f"{STOP} {use_tool(action[1], action[2], facts)}\n"
    s += st.assistant_end()


def use_tool(tool: str, argument: str, facts: dict[str, str]) -> str:
    return calculate(argument) if tool == "calculator" else facts.get(argument, NOT_FOUND)


def cases(skill: str, num_samples: int, seed: int = SEED) -> list[Sample]:
    stream = samples({skill: 1.0}, seed, held_out=True)
    return [next(stream) for _ in range(num_samples)]


def read(sample: Sample, state: st.ProgramState) -> Outcome:
    """Take the replies, or for react the final answers, out of the finished program."""
    turns = range(len(sample.messages("user")))
    if sample.skill != "react":
        return Outcome(sample, [state[f"reply{t}"] for t in turns], sample.messages("assistant"))
    written = []
    for turn in turns:
        steps = (f"step{turn}.{step}" for step in range(MAX_ACTIONS + 1))
        last = [state[name] for name in steps if name in state][-1]
        answer = ANSWER.search(last)
        written.append(answer[1] if answer else "")
    return Outcome(sample, written, sample.answers)


def score(skill: str, outcomes: Iterable[Outcome]) -> Row:
    outcomes = list(outcomes)
    right = sum(outcome.written == outcome.expected for outcome in outcomes)
    pairs = [pair for o in outcomes for pair in zip(o.written, o.expected, strict=True)]
    low, high = wilson(right, len(outcomes))
    replies_right = sum(written == expected for written, expected in pairs)
    return Row(
        skill,
        cases=len(outcomes),
        exact=100 * right / len(outcomes),
        low=100 * low,
        high=100 * high,
        replies=len(pairs),
        replies_exact=100 * replies_right / len(pairs),
    )


def wilson(right: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """The Wilson score interval of a share (Wilson 1927), 95% for z = 1.96."""
    share = right / total
    middle = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    return (middle - spread) / scale, (middle + spread) / scale


def show(rows: list[Row]) -> None:
    print(
        f"{'skill':<10}{'cases':>7}{'exact %':>9}  {'95% interval':<14}{'replies':>8}{'exact %':>9}"
    )
    for row in rows:
        interval = f"{row.low:.1f} to {row.high:.1f}"
        print(
            f"{row.skill:<10}{row.cases:>7}{row.exact:>9.1f}  {interval:<14}"
            f"{row.replies:>8}{row.replies_exact:>9.1f}"
        )


def show_mistakes(outcomes: list[Outcome], limit: int) -> None:
    wrong = [outcome for outcome in outcomes if outcome.written != outcome.expected]
    for outcome in random.Random(0).sample(wrong, min(limit, len(wrong))):
        questions = outcome.sample.messages("user")
        for line in zip(questions, outcome.written, outcome.expected, strict=True):
            if line[1] != line[2]:
                print(
                    "question {!r}\n written {!r}\nexpected {!r}\n".format(*line), file=sys.stderr
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=300, help="cases of each skill")
    parser.add_argument("--skill", choices=SKILLS, action="append", help="default: all")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--model", help="a model folder (default: the embedded model)")
    parser.add_argument("--mistakes", type=int, default=0, help="print so many wrong cases")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows, started = [], time.time()
    with st.Engine(args.model) as engine:
        for skill in args.skill or SKILLS:
            chosen = cases(skill, args.samples, args.seed)
            states = converse.run_batch([{"sample": case} for case in chosen], backend=engine)
            outcomes = [read(case, state) for case, state in zip(chosen, states, strict=True)]
            rows.append(score(skill, outcomes))
            show_mistakes(outcomes, args.mistakes)
    if args.json:
        result = {"seconds": time.time() - started, "rows": [asdict(row) for row in rows]}
        print(json.dumps(result, indent=2))
    else:
        show(rows)


if __name__ == "__main__":
    main()
