"""What the servers with OpenAI's HTTP API support beyond OpenAI itself.

A program's feature that an endpoint lacks is refused before anything is sent; never left out.
Fields as in the servers' own documentation: OpenAI's API reference, vLLM's and SGLang's pages on
their OpenAI-compatible servers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...errors import InvalidRequest

_SAMPLING = ("top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos")
_ALL_KINDS = ("regex", "choices", "json_schema", "json_object", "ebnf", "structural_tag")
_CONTINUE = {"add_generation_prompt": False, "continue_final_message": True}


@dataclass(frozen=True, slots=True)
class Flavor:
    """One kind of server."""

    name: str
    extras: frozenset[str] = frozenset()  # fields of GenParams that OpenAI lacks
    constraints: frozenset[str] = frozenset({"json_schema", "json_object"})  # kinds
    continuation: Mapping[str, bool] | None = None  # body fields to continue the assistant's open
    # message; None: a chat endpoint can only begin a new one
    has_both: bool = False  # whether both the chat and the completions endpoint serve a model
    max_stops: int | None = None  # stop strings per call; None: any number
    can_score: bool = True  # whether completions report log probabilities of their prompt (`echo`)
    streams_logprobs: bool = True
    takes_hints: bool = False  # whether it has /kv_hints, see docs/how-it-works/leases.md


FLAVORS = {
    flavor.name: flavor
    for flavor in (
        Flavor("openai", max_stops=4),
        Flavor(
            "stemma",
            frozenset((*_SAMPLING, "jump_forward", "lora_path")),
            frozenset(_ALL_KINDS),
            continuation={},
            has_both=True,
            can_score=False,
            streams_logprobs=False,
            takes_hints=True,
        ),
        Flavor("vllm", frozenset(_SAMPLING), frozenset(_ALL_KINDS), _CONTINUE, has_both=True),
        Flavor(
            "sglang",
            frozenset((*_SAMPLING, "lora_path")),
            frozenset(_ALL_KINDS),
            _CONTINUE,
            has_both=True,
        ),
    )
}


def flavor_of(name: str) -> Flavor:
    """Raises InvalidRequest for an unknown name."""
    if name not in FLAVORS:
        raise InvalidRequest.of("flavor", name, f"one of {tuple(FLAVORS)}")
    return FLAVORS[name]
