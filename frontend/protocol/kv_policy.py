"""Which tokens of a prompt's KV a call keeps: the rest is dropped before its output begins.

Never asked for by default: outputs then differ from those with all KV.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from math import ceil
from typing import Any, Literal, get_args

from ...errors import InvalidProgram
from .numbers import MAX_INT, Range

PolicyKind = Literal["snapkv", "streaming"]

MAX_WINDOW = 64  # queries that are observed at once
_SHARE = Range(0, 1, is_above=True)
_TOKENS = Range(1, MAX_INT, is_whole=True)
_RANGES = {
    "window": Range(1, MAX_WINDOW, is_whole=True),
    "pool": Range(1, 63, is_whole=True),
    "sinks": Range(0, 1024, is_whole=True),
}


@dataclass(frozen=True, slots=True)
class KVPolicy:
    """How many tokens are kept of a prompt, and which.

    "snapkv" (Li et al. 2024, arXiv:2404.14469): those that the prompt's last `window` tokens attend
    to most, for each KV head its own, and that window. A token's weight is the largest among the
    `pool` tokens around it. "streaming" (Xiao et al. 2023, arXiv:2309.17453): the first `sinks`
    tokens, and the last ones.

    Raises InvalidProgram.
    """

    kind: PolicyKind
    keep: float  # below 1: a share of the prompt; else tokens
    window: int = 32
    pool: int = 7
    sinks: int = 4

    def __post_init__(self) -> None:
        if self.kind not in get_args(PolicyKind):
            allowed = f"one of {list(get_args(PolicyKind))}"
            raise InvalidProgram.of("kv_policy.kind", self.kind, allowed)
        if not (_SHARE if isinstance(self.keep, float) else _TOKENS).holds(self.keep):
            allowed = "a share in (0, 1] with a decimal point, or a number of tokens >= 1"
            raise InvalidProgram.of("kv_policy.keep", self.keep, allowed)
        for name, allowed_range in _RANGES.items():
            value = allowed_range.checked(f"kv_policy.{name}", getattr(self, name))
            object.__setattr__(self, name, value)
        if self.pool % 2 == 0:
            raise InvalidProgram.of("kv_policy.pool", self.pool, "an odd number of tokens")

    @property
    def num_observed(self) -> int:
        """Of the last tokens of a prompt: whose queries are looked at."""
        return self.window if self.kind == "snapkv" else 1

    def num_kept(self, num_tokens: int) -> int:
        """Of a prompt of so many tokens; no fewer than are kept in any case."""
        wanted = ceil(self.keep * num_tokens) if isinstance(self.keep, float) else self.keep
        return max(wanted, self.window if self.kind == "snapkv" else self.sinks + 1)

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, given: object) -> KVPolicy:
        """Raises InvalidProgram."""
        names = {f.name for f in fields(cls)}
        if not isinstance(given, dict) or not {"kind", "keep"} <= set(given) <= names:
            allowed = f"an object of kind and keep, with any of {sorted(names - {'kind', 'keep'})}"
            raise InvalidProgram.of("kv_policy", given, allowed)
        return cls(**given)


def snapkv(keep: float, *, window: int = 32, pool: int = 7) -> KVPolicy:
    """See `KVPolicy`. keep: a share of the prompt in (0, 1], or a number of tokens."""
    return KVPolicy("snapkv", keep, window=window, pool=pool)


def streaming(keep: float, *, sinks: int = 4) -> KVPolicy:
    """See `KVPolicy`. keep: a share of the prompt in (0, 1], or a number of tokens, the first
    `sinks` among them."""
    return KVPolicy("streaming", keep, sinks=sinks)
