"""Values that are read from an answer to an earlier call."""

from __future__ import annotations

from typing import Any

from ..protocol import ir
from .calls import Outcome
from .speculation import Filled

_OWN = ("max_tokens", "min_tokens", "constraint", "logprobs", "stop_regex", "stop_token_ids",
        "deadline_s", "beam")  # fmt: skip
_SHARED = tuple(name for name in ir.SAMPLING_FIELDS if name not in (*_OWN, "stop"))


def sampling_of(op: ir.Gen) -> object:
    """What gens must agree on to be read from one answer."""
    return tuple(getattr(op.params, name) for name in _SHARED)


def is_plain(params: ir.GenParams) -> bool:
    """Whether a value can be read from an answer requested for another one: a single text that ends
    at stop strings, or with the answer."""
    return params.n in (None, 1) and all(getattr(params, name) is None for name in _OWN)


def no_call() -> dict[str, Any]:
    """Meta of a value that an earlier call's answer contained."""
    counts = ("prompt_tokens", "cached_tokens", "completion_tokens", "num_api_calls", "num_retries")
    times = ("queue_s", "time_to_first_token_s", "latency_s")
    return {"id": "", **dict.fromkeys(counts, 0), **dict.fromkeys(times, 0.0)}


def outcome_of(found: Filled, meta: dict[str, Any], *, is_whole: bool) -> Outcome:
    """`is_whole`: without a stop string the model ended it; else a limit on tokens did."""
    reason = "stop" if found.matched_stop is not None or is_whole else "length"
    meta = {**meta, "finish_reason": reason}
    if found.matched_stop is not None:
        meta["matched_stop"] = found.matched_stop
    return Outcome(found.text, found.text, meta)
