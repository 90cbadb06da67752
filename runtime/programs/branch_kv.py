"""Which of a branch's KV is kept: what it has compressed, and what it calls background."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...errors import InvalidRequest
from ...frontend.protocol.kv_policy import KVPolicy
from ..schedule.compression import CompressedPrefix, CompressedPrefixes


class Shown(NamedTuple):
    """A text's tokens as its KV has them: where it begins with a compressed prefix, that one's, in
    place of the first `num_replaced`; `text`: what they stand for, then."""

    ids: array[int]
    compressed: CompressedPrefix | None = None
    num_replaced: int = 0
    text: array[int] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Streamed:
    """What a stream has kept of a text's beginning, so that it need not be found again from the
    first token on."""

    policy: KVPolicy
    base: CompressedPrefix | None  # with which the branch began
    ids: array[int]
    prefix: CompressedPrefix

    def farther(self, shown: Shown, ids: array[int], policy: KVPolicy) -> Shown:
        """What it begins with, where a text begins so, under the same policy; else `shown`."""
        if policy != self.policy or shown.compressed is not self.base:
            return shown
        num_replaced = len(self.ids)
        if num_replaced >= len(ids) or ids[:num_replaced] != self.ids:
            return shown
        return Shown(self.prefix.ids + ids[num_replaced:], self.prefix, num_replaced, ids)


@dataclass(slots=True, eq=False)
class BranchKV:
    """Of one branch. What it has compressed holds as long as its text begins so: a chat template
    may write an earlier turn anew, and a branch that failed goes on from before."""

    _compressed: list[tuple[array[int], CompressedPrefix]] = field(default_factory=list)
    _background: list[tuple[int, int]] = field(default_factory=list)  # tokens of the text
    _background_start: int | None = None  # of text that is being appended
    _streamed: _Streamed | None = None  # how far a stream had come

    def copy(self) -> BranchKV:
        """For a fork."""
        compressed, background = [*self._compressed], [*self._background]
        return BranchKV(compressed, background, self._background_start, self._streamed)

    def mark(self, num_tokens: int, *, begins: bool) -> None:
        """Background begins, or ends, behind so many tokens."""
        if begins:
            self._background_start = num_tokens
        elif self._background_start is not None:
            self._background.append((self._background_start, num_tokens))
            self._background_start = None

    def shown(self, ids: array[int]) -> Shown:
        """ids: of the branch's text, or its beginning."""
        for source, prefix in reversed(self._compressed):
            if len(source) <= len(ids) and ids[: len(source)] == source:
                return Shown(prefix.ids + ids[len(source) :], prefix, len(source), ids)
        return Shown(ids)

    def compress(self, ids: array[int], policy: KVPolicy, prefixes: CompressedPrefixes) -> None:
        """Keep of all of these but the last what the policy chooses. Raises InvalidRequest."""
        before, shown = self.shown(ids), self.with_policy(ids, policy, prefixes)
        if shown.compressed is not None and shown.compressed is not before.compressed:
            self._compressed.append((ids[: shown.num_replaced], shown.compressed))

    def with_policy(
        self, ids: array[int], policy: KVPolicy | None, prefixes: CompressedPrefixes
    ) -> Shown:
        """The tokens of a call's prompt under this policy. Raises InvalidRequest."""
        shown = self.shown(ids)
        if policy is None:
            return shown
        if min(ids, default=0) < 0:
            allowed = "left out: prompts with images are kept whole"
            raise InvalidRequest.of("kv_policy", policy.kind, allowed)
        candidates = self._candidates(shown, len(shown.ids) - 1)
        base = shown.compressed
        if self._streamed is not None:
            shown = self._streamed.farther(shown, ids, policy)
        before = shown.compressed
        prefix, num_taken = prefixes.of(shown.ids[:-1], policy, before, candidates)
        if prefix is None or prefix is before:
            return shown
        num_before = 0 if before is None else before.num_slots
        num_replaced = shown.num_replaced + num_taken - num_before
        if policy.is_stream:
            self._streamed = _Streamed(policy, base, ids[:num_replaced], prefix)
        return Shown(prefix.ids + shown.ids[num_taken:], prefix, num_replaced, ids)

    def _candidates(self, shown: Shown, end: int) -> Sequence[tuple[int, int]] | None:
        """Of the tokens before `end`: those that are background; None: all are."""
        if not self._background:
            return None
        prefix, num_replaced = shown.compressed, shown.num_replaced
        shift = 0 if prefix is None else prefix.num_slots - num_replaced
        ranges = [
            (max(first, num_replaced) + shift, min(last + shift, end))
            for first, last in self._background
        ]
        return [(first, last) for first, last in ranges if first < last]


def refuse_images(shown: Shown) -> Shown:
    """Raises InvalidRequest where images follow a compressed prefix."""
    if shown.compressed is not None and min(shown.ids[shown.compressed.num_slots :], default=0) < 0:
        allowed = "left out: this branch's KV was compressed before it"
        raise InvalidRequest.of("image", "an image", allowed)
    return shown
