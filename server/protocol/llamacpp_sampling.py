"""Sampling as llama.cpp names it, and Ollama after it, in the words of OpenAI's API and ours."""

from __future__ import annotations

from ...errors import InvalidRequest


def seed_of(seed: int | None) -> int | None:
    """None: any, as a negative one asks for."""
    return None if seed is None or seed < 0 else seed


def repetition_penalty(penalty: float | None, last: int | None, field: str) -> float | None:
    """Of `repeat_penalty` over the `repeat_last_n` last tokens; `field`: the latter's name. Raises
    InvalidRequest for a window of some tokens: here it is prompt and output."""
    if last == 0 or penalty in (None, 1):
        return None
    if last is not None and last > 0:
        allowed = "-1 (prompt and output), 0 (no penalty), or left out"
        raise InvalidRequest.of(field, last, allowed)
    return penalty
