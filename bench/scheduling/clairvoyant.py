"""What a cache would hit that knows the future: Belady's choice on a tree of prefixes.

Source: Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems
Journal 5 (1966): evict what is used again last. Here a token's KV can only be used together with
that of all tokens before it, so residents are closed under prefixes; since every use of a token
uses its prefix too, the token that is used again last is always a leaf, and Belady's choice keeps
that by itself.

Calls are admitted in a given order and run at given times. A running call's tokens are locked, as
in the real cache; where those alone exceed the capacity, it is exceeded, and a call's output takes
room only when the call ends: both are in the reference's favour. Cost: O(n log n) in the tokens of
all calls; tokens, not pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush


@dataclass(frozen=True, slots=True)
class Use:
    """One call as it ran: `output` without the last token, which is never computed."""

    prompt: Sequence[int]
    output: Sequence[int]
    admitted_s: float
    ended_s: float


def num_hits(uses: Sequence[Use], num_tokens: int) -> int:
    """Prompt tokens of all calls that need no computing, with room for `num_tokens`.

    A prompt's last token is always computed: its logits are needed.
    """
    ordered = sorted(uses, key=lambda use: use.admitted_s)
    cache = _Cache(num_tokens, ordered)
    events = [(use.admitted_s, 1, index) for index, use in enumerate(ordered)]
    events += [(use.ended_s, 0, index) for index, use in enumerate(ordered)]
    hits = 0
    for _, is_admission, index in sorted(events):
        if is_admission:
            hits += cache.admit(index)
        else:
            cache.end(index)
    return hits


@dataclass(slots=True, eq=False)
class _Token:
    """One token after its prefix; `uses` are the calls that could hit it, the next one last."""

    depth: int
    children: dict[int, _Token] = field(default_factory=dict)
    uses: list[int] = field(default_factory=list)
    num_locks: int = 0
    is_resident: bool = False


class _Cache:
    """Invariant: after each event at most `capacity` tokens are resident, or only locked ones."""

    def __init__(self, capacity: int, calls: Sequence[Use]) -> None:
        self._capacity = capacity
        self._num_calls = len(calls)
        self._num_prompt = [len(call.prompt) for call in calls]
        self._num_resident = 0
        self._evictable: list[tuple[int, int, int, _Token]] = []  # may include tokens used since
        root = _Token(0)
        self._paths = [_path(root, (*call.prompt, *call.output)) for call in calls]
        for index in reversed(range(len(calls))):
            for token in self._paths[index][: self._num_prompt[index] - 1]:
                token.uses.append(index)

    def admit(self, index: int) -> int:
        """Lock and compute a call's prompt; returns how many of its tokens were resident."""
        prompt = self._paths[index][: self._num_prompt[index]]
        num_known = next((i for i, t in enumerate(prompt) if not t.is_resident), len(prompt))
        for token in prompt:
            token.num_locks += 1
            if token.uses and token.uses[-1] == index:
                token.uses.pop()
        self._put(prompt[num_known:])
        self._shrink()
        return min(num_known, len(prompt) - 1)

    def end(self, index: int) -> None:
        """A call has ended: add its output and release its locks."""
        path, num_prompt = self._paths[index], self._num_prompt[index]
        self._put(path[num_prompt:])
        for token in path[:num_prompt]:
            token.num_locks -= 1
        for token in path:
            if not token.num_locks:
                self._offer(token)
        self._shrink()

    def _put(self, tokens: Sequence[_Token]) -> None:
        for token in tokens:
            self._num_resident += not token.is_resident
            token.is_resident = True

    def _shrink(self) -> None:
        while self._num_resident > self._capacity and self._evictable:
            key, _, _, token = heappop(self._evictable)
            if token.is_resident and not token.num_locks and key == -self._next_use(token):
                token.is_resident = False
                self._num_resident -= 1

    def _offer(self, token: _Token) -> None:
        entry = (-self._next_use(token), -token.depth, id(token), token)
        heappush(self._evictable, entry)

    def _next_use(self, token: _Token) -> int:
        return token.uses[-1] if token.uses else self._num_calls


def _path(root: _Token, token_ids: Sequence[int]) -> list[_Token]:
    """The tokens of a run, from the root down; missing ones are added."""
    path, at = [], root
    for token_id in token_ids:
        child = at.children.get(token_id)
        if child is None:
            child = at.children[token_id] = _Token(at.depth + 1)
        path.append(child)
        at = child
    return path
