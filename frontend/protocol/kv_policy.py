"""Which tokens of a prompt's KV a call keeps: the rest is dropped before its output begins.

Never asked for by default: outputs then differ from those with all KV.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from math import ceil
from typing import Any, Literal, get_args

from ...errors import InvalidProgram
from .numbers import MAX_INT, Range

PolicyKind = Literal["snapkv", "h2o", "streaming", "window"]

ALL_KV = "none"  # an engine's policy, on a command line: nothing is dropped, nor given up
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
    `pool` tokens around it. Positions stay what they were.

    "h2o" (Zhang et al. 2023, arXiv:2306.14048): those to which all of the prompt's tokens attend
    most, each by its softmax over those up to its own, for each KV head its own, and the last
    `window`. All of the prompt is computed for it, also what is cached; what is generated behind is
    kept whole. Tokens that a policy has kept a part of before have no queries.

    "streaming" (Xiao et al. 2023, arXiv:2309.17453): the first `sinks` tokens and the last ones,
    `keep` in all: whenever half as many more have come, the oldest of these are dropped, before
    anything behind is computed. Positions are those among the tokens that are kept, so that a text
    may be longer than the model's context, and KV is bounded by one and a half times `keep`.

    "window": as "streaming", of a model whose layers all see windows of at most `keep` tokens, and
    positions stay what they were: outputs are those with all KV. Engines ask for it by themselves.

    Raises InvalidProgram.
    """

    kind: PolicyKind
    keep: float  # a float: a share of the prompt in (0, 1]; an integer: tokens
    window: int = 32
    pool: int = 7
    sinks: int = 4

    def __post_init__(self) -> None:
        if self.kind not in get_args(PolicyKind):
            allowed = f"one of {list(get_args(PolicyKind))}"
            raise InvalidProgram.of("kv_policy.kind", self.kind, allowed)
        is_share = isinstance(self.keep, float)
        if not (_SHARE if is_share else _TOKENS).holds(self.keep):
            allowed = "a share in (0, 1] with a decimal point, or a number of tokens >= 1"
            raise InvalidProgram.of("kv_policy.keep", self.keep, allowed)
        for name, allowed_range in _RANGES.items():
            if name == "window" and self.kind == "h2o":  # none of them is observed at once
                allowed_range = _TOKENS
            value = allowed_range.checked(f"kv_policy.{name}", getattr(self, name))
            object.__setattr__(self, name, value)
        if self.pool % 2 == 0:
            raise InvalidProgram.of("kv_policy.pool", self.pool, "an odd number of tokens")
        if self.is_stream and (is_share or self.keep <= self.sinks):
            allowed = f"an integer, tokens, above the {self.sinks} of sinks"
            raise InvalidProgram.of("kv_policy.keep", self.keep, allowed)

    def __str__(self) -> str:
        """As `from_text` reads it; what else was given follows."""
        text = f"{self.kind}:{self.keep}"
        first = KVPolicy(self.kind, self.keep)
        for name in _RANGES:
            if getattr(self, name) != getattr(first, name):
                text += f" {name}={getattr(self, name)}"
        return text

    @property
    def num_observed(self) -> int:
        """Of the last tokens of a prompt: whose queries are looked at, in one chunk."""
        return self.window if self.kind == "snapkv" else 1

    @property
    def num_pooled(self) -> int:
        """Tokens around each one, the largest of whose attention is its own."""
        return self.pool if self.kind == "snapkv" else 1

    @property
    def is_stream(self) -> bool:
        """Whether the last tokens are kept, of a text however long, also while it is generated."""
        return self.kind in ("streaming", "window")

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is dropped."""
        return isinstance(self.keep, float) and self.keep == 1.0

    @property
    def num_dropped_at_once(self) -> int:
        """By one that `is_stream`."""
        return max(1, int(self.keep) // 2)

    def num_kept(self, num_tokens: int) -> int:
        """By one that looks at attention, of so many tokens that may be dropped; no fewer than are
        kept in any case."""
        wanted = ceil(self.keep * num_tokens) if isinstance(self.keep, float) else self.keep
        return max(wanted, self.window)

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

    @classmethod
    def from_text(cls, text: str) -> KVPolicy:
        """Of a command line: "snapkv:0.25" or "streaming:1024", kind and keep. Raises
        InvalidProgram."""
        kind, _, keep = text.partition(":")
        try:
            number = float(keep) if "." in keep else int(keep)
        except ValueError:
            allowed = "KIND:KEEP as snapkv:0.25 (a share) or streaming:1024 (tokens)"
            raise InvalidProgram.of("kv_policy", text, allowed) from None
        return cls(kind, number)  # type: ignore[arg-type]


WHOLE = KVPolicy("snapkv", 1.0)  # all is kept


def snapkv(keep: float, *, window: int = 32, pool: int = 7) -> KVPolicy:
    """See `KVPolicy`. keep: a share of the prompt in (0, 1], or a number of tokens."""
    return KVPolicy("snapkv", keep, window=window, pool=pool)


def h2o(keep: float, *, recent: int = 32) -> KVPolicy:
    """See `KVPolicy`. keep: a share of the prompt in (0, 1], or a number of tokens; the `recent`
    last ones are among them."""
    return KVPolicy("h2o", keep, window=recent)


def streaming(keep: int, *, sinks: int = 4) -> KVPolicy:
    """See `KVPolicy`. keep: a number of tokens, the first `sinks` among them."""
    return KVPolicy("streaming", keep, sinks=sinks)
