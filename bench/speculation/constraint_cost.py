"""What a constraint costs the model: extraction with and without, and the log-probability lost.

The embedded model's extractions (held out of its training), greedy: each reply unconstrained, under
its schema, with flexible whitespace, with the properties in alphabetical order instead of the order
asked for, and with these in any order.

    valid_pct          replies that are JSON of the schema
    fields_right_pct   fields of the right answers that are there with the right value
    right_pct          replies that are right as a whole
    lost_per_token     mean of -log(what the model gave to all that was allowed), in nats
    lost_per_reply     the same, summed over a reply
    redirected_pct     tokens where the model's likeliest was not allowed
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ...constrained.validation import validation_errors
from ...flags import count
from ...frontend.backend import Engine
from ...frontend.client.backend import Backend
from ...frontend.dsl.expr import assistant, system, user
from ...frontend.dsl.function import function
from ...frontend.dsl.generation import gen
from ...frontend.dsl.state import ProgramState
from ...runtime.checkpoint.location import EMBEDDED_MODEL
from ..harness.report import write_report
from .conversations import Conversation, extractions

Options = dict[str, Any]
Reply = tuple[dict[str, Any], str, str]  # the schema, the right answer, what was said


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench constraint-cost`."""
    add = parser.add_argument
    add("--model", type=Path, default=EMBEDDED_MODEL, help="checkpoint folder")
    add("--cases", type=count, default=100, help="conversations (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    with Engine(args.model) as engine:
        rows = [_row(engine, name, options, args.cases) for name, options in VARIANTS.items()]
    write_report("constraint_cost", rows, args)
    return 0


def _alphabetical(schema: dict[str, Any]) -> dict[str, Any]:
    listed = schema.get("properties", {})
    return {**schema, "properties": {name: listed[name] for name in sorted(listed)}}


VARIANTS: dict[str, Callable[[dict[str, Any]], Options]] = {
    "free": lambda _: {},
    "schema": lambda schema: {"json_schema": schema},
    "flexible": lambda schema: {"json_schema": schema, "whitespace": "flexible"},
    "alphabetical": lambda schema: {"json_schema": _alphabetical(schema)},
    "any order": lambda schema: {
        "json_schema": _alphabetical(schema),
        "property_order": "any" if len(schema.get("properties", ())) <= 6 else "schema",
    },
}


@function
def _converse(
    s: ProgramState, case: Conversation, options: Callable[[dict[str, Any]], Options]
) -> None:
    for text in case.system:
        s += system(text)
    for turn, (question, limits) in enumerate(zip(case.user, case.limits, strict=True)):
        under = options(limits["json_schema"]) if "json_schema" in limits else limits
        reply = gen(f"reply{turn}", max_tokens=case.max_tokens, temperature=0, logprobs=0, **under)
        s += user(question) + assistant(reply)


def _row(
    backend: Backend, name: str, options: Callable[[dict[str, Any]], Options], num_cases: int
) -> dict[str, Any]:
    cases = extractions(num_cases)
    arguments = [{"case": case.conversation, "options": options} for case in cases]
    states: list[ProgramState] = _converse.run_batch(arguments, backend=backend)
    replies: list[Reply] = []
    costs = []
    for case, state in zip(cases, states, strict=True):
        for turn, (limits, answer) in enumerate(
            zip(case.conversation.limits, case.answers, strict=True)
        ):
            if "json_schema" in limits:
                replies.append((limits["json_schema"], answer, state[f"reply{turn}"]))
                meta = state.get_meta_info(f"reply{turn}")
                costs.append(meta.get("constraint_cost", _NOTHING))
    fields = [is_right for reply in replies for is_right in _fields(reply)]
    num_tokens, lost = (sum(cost[n] for cost in costs) for n in ("num_tokens", "logprob_lost"))
    num_redirected = sum(cost["num_redirected"] for cost in costs)
    return {
        "constraint": name,
        "replies": len(replies),
        "valid_pct": _percent([_is_valid(reply) for reply in replies]),
        "fields_right_pct": _percent(fields),
        "right_pct": _percent([_value(said) == _value(answer) for _, answer, said in replies]),
        "lost_per_token": round(lost / num_tokens, 4) if num_tokens else None,
        "lost_per_reply": round(lost / len(replies), 3) if num_tokens else None,
        "redirected_pct": round(100 * num_redirected / num_tokens, 2) if num_tokens else None,
    }


_NOTHING = {"num_tokens": 0, "logprob_lost": 0.0, "num_redirected": 0}


def _is_valid(reply: Reply) -> bool:
    schema, _, said = reply
    return not validation_errors(json.dumps(schema), said)


def _fields(reply: Reply) -> Iterator[bool]:
    _, answer, said = reply
    wanted, found = _value(answer), _value(said)
    if not isinstance(wanted, dict):
        return
    for name, value in wanted.items():
        yield isinstance(found, dict) and name in found and found[name] == value


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _percent(found: list[bool]) -> float:
    return round(100 * sum(found) / max(1, len(found)), 1)
