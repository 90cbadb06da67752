"""The held-out cases as programs, written as a user of Stemma would.

A program says what it can use: the `choices` of a classification or of yes and no, the
`json_schema` of an extraction that names its fields. The tips of a list are expanded in parallel
branches.
"""

import json
import re
import sys
from dataclasses import dataclass
from typing import Any

from react import NOT_FOUND, calculate
from samples import STOP, Sample

import stemma as st

MAX_ACTIONS = 5
NUM_PROGRAMS = 128  # at once; an engine compiles at most 256 grammars at a time
ACTION = re.compile(r"\nAction: (calculator|lookup)\[(.*)\]$", re.DOTALL)
ANSWER = re.compile(r"\nAnswer: (.*)", re.DOTALL)


@dataclass(frozen=True)
class Outcome:
    """What the model wrote in one case, beside what was expected, one entry for each question."""

    sample: Sample
    written: list[str]
    expected: list[str]


def run(samples: list[Sample], as_program: bool, engine: st.Engine | None = None) -> list[Outcome]:
    """All samples, of one skill; `as_program` False: nothing but plain replies.
    `engine` None: on the default backend."""
    skill = samples[0].skill
    program = (AS_PROGRAM if as_program else FREELY).get(skill, converse)
    outcomes: list[Outcome] = []
    for start in range(0, len(samples), NUM_PROGRAMS):
        part = samples[start : start + NUM_PROGRAMS]
        batch: list[dict[str, Any]] = [{"sample": sample} for sample in part]
        if program is converse:
            batch = [dict(arguments, is_limited=as_program) for arguments in batch]
        states = program.run_batch(batch, backend=engine)
        outcomes += [_outcome(*case, as_program) for case in zip(part, states, strict=True)]
        print(f"{skill} {len(outcomes)}/{len(samples)}", file=sys.stderr)
    return outcomes


@st.function
def converse(s: st.ProgramState, sample: Sample, is_limited: bool) -> None:
    """Question after question, each reply generated and then part of the prompt."""
    for text in sample.messages("system"):
        s += st.system(text)
    for turn, (question, limits) in enumerate(
        zip(sample.messages("user"), sample.limits, strict=True)
    ):
        kept = limits if is_limited else {}
        s += st.user(question)
        s += st.assistant(st.gen(f"reply{turn}", max_tokens=200, temperature=0, **kept))


@st.function
def expand(s: st.ProgramState, sample: Sample) -> None:
    """The first reply, often a list, then one branch for each tip that is asked for."""
    first, *later = sample.messages("user")
    s += st.user(first)
    s += st.assistant(st.gen("reply0", max_tokens=200, temperature=0))
    forks = s.fork(len(later)) if later else []
    for turn, (fork, question) in enumerate(zip(forks, later, strict=True), 1):
        fork += st.user(question)
        fork += st.assistant(st.gen("detail", max_tokens=200, temperature=0))
        s[f"reply{turn}"] = fork["detail"]


@st.function
def state(s: st.ProgramState, sample: Sample) -> None:
    """The fact that decides is stated first, then the answer selected."""
    for turn, (question, limits) in enumerate(
        zip(sample.messages("user"), sample.limits, strict=True)
    ):
        s += st.user(question) + st.assistant_begin()
        s += st.gen(f"fact{turn}", max_tokens=100, stop="\n", temperature=0)
        s += "\n" + st.gen(f"reply{turn}", temperature=0, **limits)
        s += st.assistant_end()


@st.function
def agent(s: st.ProgramState, sample: Sample) -> None:
    """ReAct: for each question thought, action, observation, until there is an answer."""
    for text in sample.messages("system"):
        s += st.system(text)
    for turn, question in enumerate(sample.messages("user")):
        s += st.user(question) + st.assistant_begin()
        for step in range(MAX_ACTIONS + 1):
            name = f"step{turn}.{step}"
            s += st.gen(name, max_tokens=120, stop=STOP, temperature=0)
            action = ACTION.search(s[name])
            if action is None:
                break
            s += f"{STOP} {use_tool(action[1], action[2], sample.facts)}\n"
        s += st.assistant_end()


def use_tool(tool: str, argument: str, facts: dict[str, str]) -> str:
    return calculate(argument) if tool == "calculator" else facts.get(argument, NOT_FOUND)


def is_same(written: str, expected: str) -> bool:
    """The same text, or JSON of the same value."""
    if written == expected or not expected.startswith("{"):
        return written == expected
    try:
        return bool(json.loads(written) == json.loads(expected))
    except ValueError:
        return False


FREELY = {"react": agent}  # the others converse
AS_PROGRAM = {"react": agent, "tips": expand, "yes_no_stated": state}


def _outcome(sample: Sample, state: st.ProgramState, as_program: bool) -> Outcome:
    if sample.skill == "react":
        return Outcome(sample, _answers(sample, state), sample.answers)
    replies = [state[f"reply{turn}"] for turn in range(len(sample.limits))]
    expected = sample.messages("assistant")
    if as_program and sample.skill == "yes_no_stated":
        expected = [reply.rpartition("\n")[2] for reply in expected]
    return Outcome(sample, replies, expected)


def _answers(sample: Sample, state: st.ProgramState) -> list[str]:
    """The final answers; "" where there is none."""
    written = []
    for turn in range(len(sample.answers)):
        steps = (f"step{turn}.{step}" for step in range(MAX_ACTIONS + 1))
        last = [state[name] for name in steps if name in state][-1]
        answer = ANSWER.search(last)
        written.append(answer[1] if answer else "")
    return written
