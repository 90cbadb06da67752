"""Log probabilities of the end of an echoed prompt: how likely a model finds one choice."""

from __future__ import annotations

from itertools import accumulate

from ...errors import EngineError
from .replies import Answer


def choice_logprobs(answer: Answer, text: str, choice: str) -> tuple[float, ...]:
    """Log probabilities of the tokens of `choice`, which ends the prompt `text`; a token that also
    has characters before it counts.

    Aligned from the end by the tokens' own texts: not every server reports offsets, and a first
    token without text shifts them. Raises EngineError where that does not work.
    """
    entries = answer.logprobs or []
    num_generated = 1 if len(answer.text) > len(text) else 0
    for dropped in (num_generated, 1):
        prompt_entries = entries[: len(entries) - dropped]
        lengths = accumulate(len(entry["token"]) for entry in reversed(prompt_entries))
        num = next((n for n, length in enumerate(lengths, 1) if length >= len(choice)), 0)
        tail = prompt_entries[len(prompt_entries) - num :]
        logprobs = tuple(entry["logprob"] for entry in tail)
        is_aligned = num and "".join(entry["token"] for entry in tail).endswith(choice)
        if is_aligned and all(isinstance(logprob, int | float) for logprob in logprobs):
            return logprobs
    raise EngineError(
        f"choices: the endpoint gives no log probabilities for the tokens of {choice!r} "
        "(completions with echo and logprobs); use a gen with a constraint instead"
    )
