"""`sampling_params` as SGLang's offline API has them, as the params of a gen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import InvalidRequest
from ..protocol.constraint import constraint_of
from ..protocol.ir import GenParams, logit_bias_of, texts_of
from ..protocol.native_answer import FIXED_SAMPLING
from ..protocol.numbers import RANGES, plain, token_ids_of

_NAMES = {  # theirs, and the field of GenParams
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    **{
        name: name
        for name in (
            "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
            "repetition_penalty", "ignore_eos", "seed", "prediction", "logit_bias", "stop",
            "stop_regex", "stop_token_ids",
        )
    },
}  # fmt: skip
_CONSTRAINTS = ("regex", "ebnf", "json_schema", "structural_tag")
_KNOWN = (*_NAMES, *_CONSTRAINTS, "n", *FIXED_SAMPLING)


def sampling_of(given: Mapping[str, Any], field: str, **others: Any) -> tuple[GenParams, int]:
    """The params of one prompt, with `others`, and the number of its samples. What is None is left
    open. Raises InvalidRequest that names what is at fault, which the engine does for ranges."""
    if not isinstance(given, Mapping):
        raise InvalidRequest.of(field, given, "a dict of SGLang's sampling parameters")
    asked = {name: value for name, value in given.items() if value is not None}
    for name, value in asked.items():
        if name not in _KNOWN:
            raise InvalidRequest.of(f"{field}.{name}", value, f"one of {sorted(_KNOWN)}")
        if name in FIXED_SAMPLING and value != FIXED_SAMPLING[name]:
            allowed = f"{FIXED_SAMPLING[name]!r}, or left out"
            raise InvalidRequest.of(f"{field}.{name}", value, allowed)
    num_samples = plain(asked.get("n", 1))
    RANGES["n"].require(f"{field}.n", num_samples)
    params = {_NAMES[name]: value for name, value in asked.items() if name in _NAMES}
    if "top_k" in params and plain(params["top_k"]) == -1:  # all
        del params["top_k"]
    for name in ("stop", "stop_regex"):
        params[name] = texts_of(params.get(name), name)
    if "stop_token_ids" in params:
        params["stop_token_ids"] = token_ids_of("stop_token_ids", params["stop_token_ids"])
    params["logit_bias"] = logit_bias_of(params.get("logit_bias"))
    constraint = constraint_of(**{name: asked[name] for name in _CONSTRAINTS if name in asked})
    return GenParams(**params, constraint=constraint, **others), num_samples
