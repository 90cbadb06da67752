"""What follows a call in its program: learnt from earlier programs, to be computed while it pauses.

Behind a call a program appends text, often the same: the template's closing and the next turn's
opening, the continuation of the choice that a select has made, what a tool has said of the same
call before. So what followed is remembered twice, both as token ids up to the next call:

    what the op said, and that it was this op     all that followed the last time; of the last two
                                                  times, once there were two, what they agree in
    the op                                        what the last two times agree in

An op is a source line of a function; accounts and namespaces learn apart, as with drafts
(`../speculate`). Cost: O(tokens that followed) a call; at most MAX_TOKENS are remembered, and what
was of no use for longest goes first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

from ..schedule.draft_tree import num_same
from .branch_kv import Shown
from .engine_branch import EngineBranch

MAX_TOKENS = 1 << 20  # 4 MiB of ids
MAX_FOLLOWING = 4096  # tokens behind one call
MIN_AHEAD = 16  # tokens that are worth a step of their own (guess)
_TAIL = 16  # tokens by which the text before is known again


@dataclass(slots=True)
class _Followed:
    """What followed the last time, of which the first `num_agreed` did the time before, too; None:
    there was one time alone."""

    ids: array[int]
    num_agreed: int | None = None


class LikelyTexts:
    """What is remembered of all programs of an engine."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._followed: OrderedDict[Hashable, _Followed] = OrderedDict()
        self.num_tokens = 0

    def note(self, op: Hashable, said: array[int], ids: array[int]) -> None:
        """These followed an op that has said that; `ids` is not to be changed."""
        ids = ids[:MAX_FOLLOWING]
        for key in (op, (op, _digest(said))):
            before = self._followed.pop(key, None)
            agreed = None if before is None else num_common(before.ids, ids)
            self.num_tokens += len(ids) - (0 if before is None else len(before.ids))
            self._followed[key] = _Followed(ids, agreed)
        while self.num_tokens > self._max_tokens:
            _, dropped = self._followed.popitem(last=False)
            self.num_tokens -= len(dropped.ids)

    def find(self, op: Hashable, said: array[int]) -> array[int]:
        """What will follow; empty where nothing is known."""
        own = self._followed.get((op, _digest(said)))
        if own is not None:
            return own.ids[: own.num_agreed]
        of_op = self._followed.get(op)
        return array("i") if of_op is None else of_op.ids[: of_op.num_agreed or 0]


class Prefills(Protocol):
    """Who computes texts while the device idles (`gateway/ahead.py`)."""

    def offer(self, owner: Hashable, namespace: str, ids: array[int], num_known: int) -> None:
        """These tokens will probably be `owner`'s next prompt, or its beginning; `num_known` of
        them are its text already. Replaces what it has offered before."""

    def withdraw(self, owner: Hashable, prompt: array[int] | None) -> None:
        """`owner` has this prompt now; None: it has none."""


@dataclass(frozen=True, slots=True)
class _Behind:
    """A branch has made a call: which, what it said, and where its text ended then."""

    op: Hashable
    said: array[int]
    end: int
    tail: array[int]


class LikelyPrompts:
    """Of one program: what its branches' next prompts probably are, while they rest."""

    def __init__(
        self,
        texts: LikelyTexts,
        prefills: Prefills,
        shown: Callable[[EngineBranch, array[int]], Shown],
    ) -> None:
        """`shown`: tokens as calls have their KV."""
        self._texts = texts
        self._prefills = prefills
        self._shown = shown
        self._behind: dict[EngineBranch, _Behind] = {}
        self._offered: set[EngineBranch] = set()

    def note_call_done(self, branch: EngineBranch, op: Hashable, said: array[int]) -> None:
        """A call of this op has said this, which is part of the branch's text now. An op of which
        nothing is known (None) says nothing of what follows."""
        ids = branch.begun.ids
        if op is None:
            self._behind.pop(branch, None)
        else:
            self._behind[branch] = _Behind(op, said, len(ids), ids[-_TAIL:])

    def note_call(self, branch: EngineBranch) -> None:
        """The branch's next call begins with its text."""
        behind = self._behind.pop(branch, None)
        if behind is not None and self._is_there(branch, behind):
            self._texts.note(behind.op, behind.said, branch.begun.ids[behind.end :])
        self._withdraw(branch, branch.begun.ids)

    def settle(self, branch: EngineBranch, namespace: str) -> None:
        """The branch cannot go on: it may be, or become, known what it goes on with."""
        behind = self._behind.get(branch)
        if branch.error is not None or branch.is_ended:
            self.end(branch)
            return
        if behind is None or branch.log or not self._is_there(branch, behind):
            return
        ids = branch.begun.ids
        following = self._texts.find(behind.op, behind.said)
        num_known = len(ids) - behind.end
        if len(following) < num_known + MIN_AHEAD or following[:num_known] != ids[behind.end :]:
            return
        likely = ids + following[num_known:]
        if min(likely) >= 0 and self._shown(branch, ids).ids == ids:  # no image, nothing dropped
            self._offered.add(branch)
            self._prefills.offer(branch, namespace, likely, len(ids))

    def end(self, branch: EngineBranch) -> None:
        """The branch has no more calls."""
        self._behind.pop(branch, None)
        self._withdraw(branch, None)

    def end_all(self) -> None:
        """The program has ended."""
        for branch in [*self._offered]:
            self._withdraw(branch, None)
        self._behind.clear()

    def _withdraw(self, branch: EngineBranch, prompt: array[int] | None) -> None:
        if branch in self._offered:
            self._offered.remove(branch)
            self._prefills.withdraw(branch, prompt)

    def _is_there(self, branch: EngineBranch, behind: _Behind) -> bool:
        """Whether the text up to the call's end is still the branch's: a chat template may have
        written it anew."""
        tail = branch.begun.ids[max(0, behind.end - _TAIL) : behind.end]
        return len(branch.begun.ids) >= behind.end and tail == behind.tail


def num_common(one: array[int], other: array[int]) -> int:
    """With how many equal tokens both begin."""
    most = min(len(one), len(other))
    return most if one[:most] == other[:most] else num_same(one, other)


def _digest(ids: array[int]) -> bytes:
    return hashlib.blake2b(ids.tobytes(), digest_size=16).digest()
