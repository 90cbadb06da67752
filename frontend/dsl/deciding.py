"""Selects that a method of the author's decides.

A fork scores the choices; the branch goes on with the chosen one alone. That costs one short call
more than a select by name, whose prompt is cached.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from ...errors import InvalidProgram
from ..client.program import Pending
from .choices_method import TokenLogprobs
from .expr import SelectExpr
from .forks import Forks
from .waits import Fork, Steps
from .writing import BranchWriter


def decision_steps(state: BranchWriter, fork: Fork, asked: SelectExpr, source: str | None) -> Steps:
    """Append the choice that the method decides on; yields what is to be waited for. Raises what
    the method raises, and InvalidProgram for a decision that is none."""
    assert asked.decide is not None
    decide = asked.decide
    needs_more = bool(getattr(decide, "requires_unconditional_logprobs", False))
    by_name = _METHODS[needs_more]
    scores = yield from _scores(fork(), asked, by_name, source)
    made = decide(**_arguments(asked.choices, scores, needs_more=needs_more))
    chosen = getattr(made, "decision", None)
    if chosen not in asked.choices:
        allowed = f"an object whose decision is one of {asked.choices}"
        raise InvalidProgram.of("choices_method", made, allowed)
    state._append(SelectExpr(asked.name, (chosen,), by_name, asked.lora_path), source)
    appended = state._pieces[-1]
    assert isinstance(appended, Pending)
    name = getattr(decide, "__name__", type(decide).__name__)
    appended.more_meta = {
        "choices_method": name,
        **{key: scores[key] for key in _SCORES if key in scores},
        **(getattr(made, "meta_info", None) or {}),
    }


def _scores(
    scoring: Forks[Any], asked: SelectExpr, method: str, source: str | None
) -> Generator[Pending, None, dict[str, Any]]:
    """The meta of a select of all choices in a branch that nothing reads otherwise."""
    scoring[0]._append(SelectExpr("", asked.choices, method, asked.lora_path), source)
    pending = scoring[0]._pieces[-1]
    yield pending
    if "choice_token_logprobs" not in pending.meta:
        raise InvalidProgram(
            "choices_method: this endpoint tells no log probabilities of choices, so only methods "
            "by name decide there; use a runtime over ZeroMQ",
            "choices_method",
        )
    return dict(pending.meta)


def _arguments(
    choices: Sequence[str], scores: Mapping[str, Any], *, needs_more: bool
) -> dict[str, Any]:
    logprobs = scores["choice_token_logprobs"]
    ids = scores.get("choice_token_ids") or [[None] * len(each) for each in logprobs]
    arguments: dict[str, Any] = {
        "choices": list(choices),
        "normalized_prompt_logprobs": list(scores["choice_logprobs"]),
        "input_token_logprobs": _triples(logprobs, ids),
        "output_token_logprobs": [[] for _ in choices],
        "unconditional_token_logprobs": None,
    }
    if needs_more:
        unconditional = scores["choice_unconditional_logprobs"]
        arguments["unconditional_token_logprobs"] = _triples(unconditional, ids)
    return arguments


def _triples(
    logprobs: Sequence[Sequence[float]], ids: Sequence[Sequence[int | None]]
) -> list[TokenLogprobs]:
    return [
        [(logprob, token_id, None) for logprob, token_id in zip(*each, strict=True)]
        for each in zip(logprobs, ids, strict=True)
    ]


_METHODS = {False: "token_length_normalized", True: "unconditional_likelihood_normalized"}
_SCORES = ("choice_logprobs", "choice_token_logprobs", "choice_token_ids")
