"""The result of one `watch` call: steps, tree, pool, queue and counters as they are now.

Everything is bounded, and the tree and the pool are read at MAX_REFRESHES_A_SECOND at most, however
many clients watch: a call costs the loop a few milliseconds at most (docs/serve/watch.md).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

from ....errors import InvalidProgram
from ....radix.node import Node
from ...engine import Engine
from .pool_map import pool_map
from .queue_view import queue_view
from .tree_view import MAX_NODES, Decode, TreeView, UseTimes

WATCHED_S = 10.0  # after the last call, recording stops
MAX_REFRESHES_A_SECOND = 4.0
MAX_LEASES = 256


class Observer:
    """Owns the views of one engine, and lives as long. Used by the engine's thread only."""

    def __init__(
        self,
        engine: Engine,
        decode: Decode,
        *,
        refreshes_a_second: float = MAX_REFRESHES_A_SECOND,
    ) -> None:
        """`decode`: token ids to text, special tokens by name."""
        self._refresh_s = 1.0 / refreshes_a_second
        self._engine = engine
        self._kv = engine.scheduler.kv_cache
        self._uses = UseTimes()
        self._decode = decode
        self._tree = TreeView(self._kv, decode, self._uses)
        self._pool: dict[str, Any] = {}
        self._num_looks = 0
        self._is_pool_stale = True
        self._told_state: tuple[float, ...] = ()
        self._run = secrets.token_hex(8)  # names this engine: readers notice a restart
        self._asked_s = self._refreshed_s = float("-inf")

    def tick(self) -> None:
        """Called about once a second, also while nobody watches: note when prefixes were used, and
        stop recording if there was no call for a while."""
        now_s = time.perf_counter()
        self._uses.note(self._kv.tree.clock, now_s)
        if self._engine.step_log.is_on and now_s - self._asked_s > WATCHED_S:
            self._engine.step_log.stop()
            self._tree = TreeView(self._kv, self._decode, self._uses)
            self._run = secrets.token_hex(8)  # versions start again
            self._refreshed_s, self._told_state = float("-inf"), ()
            self._pool, self._num_looks = {}, 0

    def watch(
        self, run: str | None = None, step: int = 0, tree: int | None = None, pool: int = 0
    ) -> dict[str, Any]:
        """The changes since an earlier result, given its `run`, its last step's id, and its tree's
        and pool's versions. Without them, or if they are another run's: everything.

        Raises InvalidProgram for versions that are not numbers.
        """
        for name, value in (("step", step), ("tree", 0 if tree is None else tree), ("pool", pool)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise InvalidProgram.of(name, value, "an integer")
        now_s = self._asked_s = time.perf_counter()
        self._engine.step_log.is_on = True
        if run != self._run:
            step, tree, pool = 0, None, 0
        if now_s - self._refreshed_s >= self._refresh_s:
            self._refresh(now_s)
        return {
            "run": self._run,
            "now_s": now_s,
            "engine": self._engine.describe(),
            "evicted_tokens": self._kv.num_evicted_tokens,
            "queue": queue_view(self._engine.scheduler, now_s),
            "steps": self._engine.step_log.since(step),
            "tree": self._tree.since(tree),
            "pool": self._pool if self._pool["version"] != pool else None,
            "leases": self._leases(now_s),
        }

    def _refresh(self, now_s: float) -> None:
        self._uses.note(self._kv.tree.clock, now_s)
        self._refreshed_s = now_s
        state = self._state()
        has_changed = state != self._told_state
        self._told_state = state
        if has_changed or self._tree.has_unread:
            self._tree.refresh(self._held(), now_s)
            self._is_pool_stale = True
        self._num_looks += 1
        # The pool at half the rate, unless nothing changes any more.
        if self._is_pool_stale and (self._num_looks % 2 or not has_changed):
            self._look_at_pool()

    def _look_at_pool(self) -> None:
        self._is_pool_stale = False
        pool = pool_map(self._kv, self._tree.shown.values(), self._engine.scheduler.running)
        if pool["cells"] != self._pool.get("cells"):
            self._pool = {"version": self._num_looks, **pool}

    def _state(self) -> tuple[float, ...]:
        """If equal before and after, nothing that is drawn of tree and pool has changed."""
        tree, scheduler = self._kv.tree, self._engine.scheduler
        return (
            tree.clock, tree.num_nodes, tree.num_pages, tree.evictable_pages, tree.leased_pages,
            tree.pinned_pages, len(self._kv.leases), self._kv.leases.num_broken,
            self._kv.allocator.num_free, self._kv.num_evicted_tokens, scheduler.stats.num_steps,
            0 if self._kv.host is None else self._kv.host.tree.clock,
        )  # fmt: skip

    def _held(self) -> Iterator[Node]:
        """The nodes that are locked or leased, up to the number that can be shown."""
        for request in self._engine.scheduler.running:
            if request.node is not None:
                yield request.node
        for lease in islice(self._kv.leases, MAX_NODES):
            if lease.node is not None:
                yield lease.node

    def _leases(self, now_s: float) -> list[dict[str, Any]]:
        return [
            {
                "node": lease.node.id,
                "is_pin": lease.is_pin,
                "due_s": round(lease.due_s - now_s, 1),
                "ttl_s": round(lease.expires_s - now_s, 1),
                "priority": lease.priority,
                "tokens": lease.num_kept_tokens,
            }
            for lease in islice(self._kv.leases, MAX_LEASES)
            if lease.node is not None
        ]
