"""How often stemma-tiny is right on held-out cases, measured through Stemma's public API.

    python evaluate.py [--samples 300] [--skill react] [--json] [--model FOLDER]

Two tables. "To the character": replies are generated without any limit, the model's own replies
being its history, and a case is right if every reply is the expected one, character by character.
"As programs": the same cases as a user would write them (`programs.py`), classifications and
yes/no by `select`, behind the fact that decides where it is asked for, extractions under the JSON
schema of the fields they name and compared as values. A ReAct case runs the real loop with a real
calculator and the case's facts, and is right if every final answer is. Conversations with tools are
asked for over HTTP (`tool_programs.py`), and judged as a whole and by calls and texts.
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from generate import samples
from programs import Outcome, is_same, run
from samples import Sample
from tool_programs import parts, run_tools

import stemma as st

AS_PROGRAMS = ("react", "extract", "chat", "classify", "yes_no", "yes_no_stated", "tips")
SKILLS = (*AS_PROGRAMS, "extract_many", "copy")
WITH_TOOLS = "tools"
SEED = 4242


@dataclass(frozen=True)
class Row:
    """The result of one skill; low and high are a 95% Wilson interval, in percent like exact."""

    skill: str
    as_program: bool
    cases: int
    exact: float
    low: float
    high: float
    replies: int
    replies_exact: float


def cases(skill: str, num_samples: int, seed: int = SEED) -> list[Sample]:
    stream = samples({skill: 1.0}, seed, held_out=True)
    return [next(stream) for _ in range(num_samples)]


def score(skill: str, outcomes: list[Outcome], as_program: bool) -> Row:
    is_right = judge(as_program)
    judged = [[is_right(*pair) for pair in pairs(outcome)] for outcome in outcomes]
    replies = [right for case in judged for right in case]
    share = sum(map(all, judged)) / len(judged)
    low, high = wilson(share, len(judged))
    return Row(
        skill,
        as_program,
        cases=len(judged),
        exact=100 * share,
        low=100 * low,
        high=100 * high,
        replies=len(replies),
        replies_exact=100 * sum(replies) / len(replies),
    )


def judge(as_program: bool) -> Callable[[str, str], bool]:
    return is_same if as_program else str.__eq__


def pairs(outcome: Outcome) -> list[tuple[str, str]]:
    return list(zip(outcome.written, outcome.expected, strict=True))


def wilson(share: float, total: int, z: float = 1.96) -> tuple[float, float]:
    """The Wilson score interval of a share (Wilson 1927), 95% for z = 1.96."""
    middle = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    return max(0.0, (middle - spread) / scale), (middle + spread) / scale


def show(rows: list[Row], title: str) -> None:
    print(
        f"{title}\n{'skill':<13}{'cases':>6}{'exact %':>9}  {'95% interval':<14}"
        f"{'replies':>8}{'exact %':>9}"
    )
    for row in rows:
        interval = f"{row.low:.1f} to {row.high:.1f}"
        print(
            f"{row.skill:<13}{row.cases:>6}{row.exact:>9.1f}  {interval:<14}"
            f"{row.replies:>8}{row.replies_exact:>9.1f}"
        )


def show_mistakes(outcomes: list[Outcome], as_program: bool, limit: int) -> None:
    is_right = judge(as_program)
    wrong = [o for o in outcomes if not all(is_right(*pair) for pair in pairs(o))]
    for outcome in random.Random(0).sample(wrong, min(limit, len(wrong))):
        questions = _questions(outcome)
        for question, pair in zip(questions, pairs(outcome), strict=True):
            if not is_right(*pair):
                print(
                    f"question {question!r}\n written {pair[0]!r}\nexpected {pair[1]!r}\n",
                    file=sys.stderr,
                )


def _questions(outcome: Outcome) -> list[str]:
    """What each reply answers: the user's message or, with tools, also a result."""
    if outcome.sample.skill != WITH_TOOLS:
        return outcome.sample.messages("user")
    before, found = [], []
    for message in outcome.sample.dialogue:
        if message["role"] == "assistant":
            found.append(" ".join(before))
        before = [] if message["role"] == "assistant" else [*before, message["content"]]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--samples", type=int, default=300, help="cases of each skill")
    parser.add_argument(
        "--skill", choices=(*SKILLS, WITH_TOOLS), action="append", help="default: all"
    )
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--model", help="a model folder (default: the embedded model)")
    parser.add_argument("--quantization", default="none", help="none, int8, w8a8 or int4")
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto, int8, fp8 or int4")
    parser.add_argument("--mistakes", type=int, default=0, help="print so many wrong cases")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows, started = [], time.time()
    formats = {"quantization": args.quantization, "kv_cache_dtype": args.kv_cache_dtype}
    with st.Engine(args.model, **formats) as engine:
        for as_program, skills in ((False, SKILLS), (True, AS_PROGRAMS)):
            for skill in args.skill or skills:
                if skill not in skills:
                    continue
                outcomes = run(cases(skill, args.samples, args.seed), as_program, engine)
                rows.append(score(skill, outcomes, as_program))
                show_mistakes(outcomes, as_program, args.mistakes)
        if WITH_TOOLS in (args.skill or (WITH_TOOLS,)):
            outcomes = run_tools(cases(WITH_TOOLS, args.samples, args.seed), engine)
            rows.append(score(WITH_TOOLS, outcomes, as_program=True))
            rows.append(score("tools: calls", parts(outcomes, True), as_program=True))
            rows.append(score("tools: texts", parts(outcomes, False), as_program=True))
            show_mistakes(outcomes, True, args.mistakes)
    if args.json:
        result = {"seconds": time.time() - started, "rows": [asdict(row) for row in rows]}
        print(json.dumps(result, indent=2))
    else:
        for is_program, title in ((False, "To the character"), (True, "As programs")):
            if shown := [row for row in rows if row.as_program == is_program]:
                show(shown, title)


if __name__ == "__main__":
    main()
