"""What each replica has of the texts that programs begin with, as far as a router knows.

A replica says what its cache has, exact up to one step (`cache_mirror.py`). What was placed there
and has not been planned yet counts, too, until something comes back; of a replica that says
nothing, and of adapters, whose namespaces are the engine's, what was sent counts.
"""

from __future__ import annotations

from typing import Any

from ..radix.fleet import FleetTree
from .cache_mirror import CacheMirror
from .placement.policies import Newcomer
from .replica import Replica, RoutedProgram

MAX_TREE_BYTES = 256 * 1024 * 1024


class KnownPrefixes:
    """Owns the trees of texts, with the replicas that have them."""

    def __init__(self) -> None:
        self.cached = FleetTree[int]()
        self.mirrors: dict[int, CacheMirror] = {}
        self._sent = FleetTree[int]()
        self._on_the_way = FleetTree[int]()  # of what was sent, what nothing has come back for

    # --- replicas -------------------------------------------------------------------------------

    def add(self, number: int) -> None:
        """A replica of this number, of which nothing is known."""
        self.mirrors[number] = CacheMirror(self.cached, number)

    def remove(self, number: int) -> None:
        """It has left."""
        del self.mirrors[number]

    def lose(self, number: int) -> None:
        """It begins anew, with nothing."""
        self._sent.forget(number)
        self.mirrors[number].reset()

    def take(self, replica: Replica, changes: list[Any]) -> None:
        """A replica's own words of its cache, and of what its work costs."""
        mirror = self.mirrors[replica.number]
        mirror.take(changes)
        replica.prompt_token_s = mirror.costs.get("prompt_token_s", replica.prompt_token_s)
        replica.row_tokens = mirror.costs.get("added_row_tokens", replica.row_tokens)
        replica.total_tokens = mirror.costs.get("total_tokens", replica.total_tokens)

    # --- programs -------------------------------------------------------------------------------

    def match(self, program: RoutedProgram, text: bytes) -> dict[int, float]:
        """How many tokens of this beginning of a program each replica has, by their numbers."""
        namespace, adapter = _namespace_of(program.create)
        if adapter:
            return self._sent.match((namespace, adapter), text)
        cached = self.cached.match(namespace, text)
        for number, num_tokens in self._on_the_way.match(namespace, text).items():
            cached[number] = max(num_tokens, cached.get(number, 0.0))
        unknown = [n for n, mirror in self.mirrors.items() if not mirror.is_known]
        if unknown:
            sent = self._sent.match((namespace, adapter), text)
            cached |= {number: sent[number] for number in unknown if number in sent}
        return cached

    def send(self, program: RoutedProgram, newcomer: Newcomer, number: int) -> None:
        """A program is sent to the replica of this number."""
        text, num_tokens = newcomer.text, newcomer.num_tokens
        namespace, adapter = _namespace_of(program.create)
        if adapter or not self.mirrors[number].is_known:
            self._sent.insert((namespace, adapter), text, number, num_tokens)
            self._sent.shrink(MAX_TREE_BYTES)
        if text and not adapter:
            root = self._on_the_way.root(namespace)
            end = self._on_the_way.cover_below(root, text, number, num_tokens)
            program.sent = end, len(text), number

    def arrive(self, program: RoutedProgram) -> None:
        """A program's beginning is on its way no more."""
        if program.sent is not None:
            self._on_the_way.uncover_above(*program.sent)
        program.sent = None


def _namespace_of(create: dict[str, Any]) -> tuple[str, str]:
    return str(create.get("namespace") or ""), str(create.get("lora_path") or "")
