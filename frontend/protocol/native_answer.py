"""Answers in SGLang's words: `text`, `output_ids` and `meta_info`, of a value and its meta.

`/generate` gives them over HTTP, `Engine.generate` to its caller, and programs the names of their
log probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# What `sampling_params` may say of these: the only thing that they are here.
FIXED_SAMPLING: Mapping[str, object] = {
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "no_stop_trim": False,
    "custom_params": None,
    "stream_interval": 1,
}
_SPECULATION = (
    "drafted_tokens", "accepted_tokens",
    "accepted_prediction_tokens", "rejected_prediction_tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LogprobForm:
    """Whether log probabilities were requested, and whether with each token's text."""

    is_wanted: bool
    has_text: bool

    def output(self, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """For generated tokens: (log probability, token id, text or None) of each, and of the
        likeliest beside it."""
        return {
            "output_token_logprobs": [self._triple(entry) for entry in entries],
            "output_top_logprobs": [self._tops(entry) for entry in entries],
        }

    def prompt(self, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The same for the prompt's tokens; the very first one has none."""
        return {
            "input_token_logprobs": [self._triple(entry) for entry in entries],
            "input_top_logprobs": [self._tops(entry) for entry in entries],
        }

    def of(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """All that a value's meta has."""
        if "logprobs" not in meta:
            return {}
        return self.prompt(meta.get("prompt_logprobs", ())) | self.output(meta["logprobs"])

    def _triple(self, entry: Mapping[str, Any]) -> list[Any]:
        text = entry["token"] if self.has_text else None
        return [entry["logprob"], entry.get("token_id"), text]

    def _tops(self, entry: Mapping[str, Any]) -> list[Any] | None:
        return None if entry["logprob"] is None else [self._triple(top) for top in entry["top"]]


@dataclass(slots=True)
class StreamedSample:
    """What has been streamed of one sample."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[Mapping[str, Any]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def meta(self, id: str) -> dict[str, Any]:
        """`meta_info` without log probabilities."""
        counts = {**self.counts, "completion_tokens": len(self.ids)}
        return {"id": id, "finish_reason": None, **counts}


def answer_of(id: str, text: str, meta: Mapping[str, Any], form: LogprobForm) -> dict[str, Any]:
    """The answer for a finished value."""
    told: dict[str, Any] = {
        "id": id,
        "finish_reason": finish_reason_of(meta),
        "prompt_tokens": meta["prompt_tokens"],
        "completion_tokens": meta["completion_tokens"],
        "cached_tokens": meta["cached_tokens"],
        "e2e_latency": meta["latency_s"],
    }
    told |= {name: meta[name] for name in _SPECULATION if name in meta}
    told |= form.of(meta)
    if meta.get("warnings"):
        told["warnings"] = meta["warnings"]
    return {"text": text, "output_ids": meta.get("output_ids"), "meta_info": told}


def finish_reason_of(meta: Mapping[str, Any]) -> dict[str, Any]:
    """`finish_reason` as an object of its type and what belongs to that."""
    reason = meta["finish_reason"]
    if reason == "stop":
        return {"type": reason, "matched": meta.get("matched_stop")}
    if reason == "length":
        return {"type": reason, "length": meta["completion_tokens"]}
    return {"type": reason}
