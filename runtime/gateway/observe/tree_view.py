"""The radix tree for a picture: bounded, with texts, and sent as changes.

A view shows the nodes in use and leased, then the most recently used; the rest are counted at their
parents. What is on the host tier and not on the device forms nodes of its own, with negative ids.
Each refresh compares every shown node with its last reported state, so a reader that names its
version is sent only the changes. Text is decoded once for each node, and for a bounded number of
nodes a refresh.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from ....radix.node import Node
from ....radix.recent import recent_nodes
from ....radix.residency import ColderRun, residency
from ...schedule.cache.kv_cache import KVCacheManager

MAX_TIMES = 4096  # at most one a second while nobody watches: more than an hour


class UseTimes:
    """Owns (uses so far, seconds) pairs, both rising; the oldest are dropped."""

    def __init__(self) -> None:
        self._uses: list[int] = []
        self._times_s: list[float] = []

    def note(self, num_uses: int, now_s: float) -> None:
        """Record that `num_uses` uses were made by `now_s`."""
        if self._uses and self._uses[-1] == num_uses:
            return
        self._uses.append(num_uses)
        self._times_s.append(now_s)
        if len(self._uses) > 2 * MAX_TIMES:
            del self._uses[:-MAX_TIMES]
            del self._times_s[:-MAX_TIMES]

    def when_s(self, use: int) -> float | None:
        """When a use was made, or a little later; None if that is not recorded yet."""
        index = bisect_left(self._uses, use)
        return self._times_s[index] if index < len(self._times_s) else None


MAX_NODES = 2000
MAX_HOST_NODES = 400
MAX_TEXT_TOKENS = 32
MAX_DECODED = 96  # nodes a refresh
MAX_REMOVED = 8192

Decode = Callable[[Sequence[int]], str]


class NodeRow(NamedTuple):
    """One node as it is sent: a plain tuple in this order, since one is made for each node of
    each refresh. Counts are tokens unless noted otherwise."""

    id: int  # negative: on the host only
    parent: int | None
    root: int
    start: int  # the length of the path above it
    num_tokens: int
    lock_ref: int
    lease_ref: int
    pin_ref: int
    on_host: int  # of num_tokens, the leading ones
    hits: int
    used_s: float | None  # by the engine's clock; None: used for the last time, evicted first
    num_hidden: int  # children that are not shown
    owner: str | None  # the only program that has used it


_Row = tuple[Any, ...]  # the fields of a NodeRow
_ROOT, _START, _NUM_TOKENS = map(NodeRow._fields.index, ("root", "start", "num_tokens"))


class _Text(NamedTuple):
    start: int
    num_tokens: int
    text: str


class TreeView:
    """Owns the last reported state of the tree.

    Invariant: a node's version is that of the refresh that last changed its row or its text, and
    versions only rise.
    """

    def __init__(self, kv_cache: KVCacheManager, decode: Decode, uses: UseTimes) -> None:
        self.version = 0
        self.shown: dict[int, Node] = {}  # on the device, without roots
        self._kv = kv_cache
        self._decode = decode
        self._uses = uses
        self._rows: dict[int, _Row] = {}
        self._texts: dict[int, _Text] = {}
        self._versions: dict[int, int] = {}
        self._unread: dict[int, Node] = {}  # whose text has to be decoded
        self._removed: deque[tuple[int, int, bool]] = deque()  # version, id, whether it is gone
        self._told_from = 0  # removals up to this version are forgotten
        self._roots: dict[int, str] = {}

    @property
    def has_unread(self) -> bool:
        """Whether another refresh would decode texts though nothing has changed."""
        return bool(self._unread)

    def refresh(self, held: Iterable[Node], now_s: float) -> None:
        """Read the tree again; `held`: the nodes that are locked or leased.

        Cost: O(MAX_NODES), whatever the size of the tree.
        """
        tree = self._kv.tree
        nodes = recent_nodes(tree, held, MAX_NODES)
        colder = self._colder_runs()
        self.version += 1
        before, self._rows = self._rows, {}
        shown, self.shown = self.shown, {node.id: node for node in nodes if not node.is_root}
        self._roots = {node.id: _name(node.namespace) for node in nodes if node.is_root}
        self._tell_device_rows(nodes, colder[0], now_s, before)
        self._tell_host_rows(colder[1], now_s, before)
        for number in before.keys() - self._rows.keys():
            is_gone = number < 0 or (number in shown and not shown[number].is_attached)
            self._removed.append((self.version, number, is_gone))
            self._versions.pop(number, None)
            self._texts.pop(number, None)
            self._unread.pop(number, None)
        while len(self._removed) > MAX_REMOVED:
            self._told_from = self._removed.popleft()[0]
        self._decode_some()

    def since(self, version: int | None) -> dict[str, Any]:
        """The changes after `version`; everything if it is None or too old."""
        is_whole = version is None or version < self._told_from or version > self.version
        newest = -1 if version is None or is_whole else version
        changed = [number for number, when in self._versions.items() if when > newest]
        removed = [] if is_whole else [item[1:] for item in self._removed if item[0] > newest]
        return {
            "version": self.version,
            "is_whole": is_whole,
            "nodes": [self._rows[number] for number in changed],
            "texts": {
                str(number): self._texts[number].text for number in changed if number in self._texts
            },
            "removed": removed,
            "roots": {str(number): name for number, name in self._roots.items()},
            "num_nodes": self._kv.tree.num_nodes,
            "num_hidden": self._kv.tree.num_nodes - len(self.shown),
        }

    def _colder_runs(self) -> tuple[dict[int, int], list[ColderRun]]:
        host = self._kv.host
        if host is None:
            return {}, []
        leased = [lease.node for lease in host.leases if lease.node is not None]
        return residency(self._kv.tree, recent_nodes(host.tree, leased, MAX_HOST_NODES))

    def _tell_device_rows(
        self,
        nodes: list[Node],
        num_on_host: dict[int, int],
        now_s: float,
        before: dict[int, _Row],
    ) -> None:
        has_all = len(self.shown) == self._kv.tree.num_nodes
        num_shown: Counter[int] = Counter()
        if not has_all:
            num_shown.update(node.parent.id for node in nodes if node.parent is not None)
        rows, versions, version = self._rows, self._versions, self.version
        used_s: dict[int, float | None] = {}
        roots: dict[int, int] = {}
        for node in nodes:  # parents come first
            number, parent, use = node.id, node.parent, node.last_use
            roots[number] = number if parent is None else roots[parent.id]
            if use not in used_s:
                used_s[use] = self._used_s(use, now_s)
            num_tokens = len(node.token_ids)
            row = (
                number,
                None if parent is None else parent.id,
                roots[number],
                node.end - num_tokens,
                num_tokens,
                node.lock_ref,
                node.lease_ref,
                node.pin_ref,
                num_on_host.get(number, 0) if num_on_host else 0,
                node.hits,
                used_s[use],
                0 if has_all else len(node.children) - num_shown[number],
                None if node.owner is None else getattr(node.owner, "label", None),
            )
            old = before.get(number)
            if old is not None and row == old:
                rows[number] = old
                continue
            rows[number] = row
            versions[number] = version
            if parent is not None and (
                old is None or row[_START : _NUM_TOKENS + 1] != old[_START : _NUM_TOKENS + 1]
            ):
                self._unread[number] = node

    def _tell_host_rows(self, runs: list[ColderRun], now_s: float, before: dict[int, _Row]) -> None:
        host = self._kv.host
        shown = {run.node.id: run for run in runs}
        for node, num_tokens, above in runs:
            assert host is not None and node.parent is not None
            parent = -node.parent.id if above is None else above.id
            if above is not None and above.id not in self._rows:
                continue  # below a node that is not shown
            if above is None and parent not in self._rows:
                continue
            number = -node.id
            row = NodeRow(
                number,
                parent,
                self._rows[parent][_ROOT],
                node.end - num_tokens,
                num_tokens,
                0,
                node.lease_ref,
                0,
                num_tokens,
                node.hits,
                None,
                sum(child.id not in shown for child in node.children.values()),
                None,
            )
            self._rows[number] = tuple(row)
            if before.get(number) != row:
                self._versions[number] = self.version
                self._unread[number] = node

    def _used_s(self, use: int, now_s: float) -> float | None:
        if not use:
            return None
        when_s = self._uses.when_s(use)
        return round(now_s if when_s is None else when_s, 1)

    def _decode_some(self) -> None:
        """Decode texts of new nodes, and of those whose first tokens may have changed."""
        for number in list(islice(self._unread, MAX_DECODED)):
            node, row = self._unread.pop(number), self._rows.get(number)
            if row is None:
                continue
            first = row[_START] - node.start
            num_tokens = min(row[_NUM_TOKENS], MAX_TEXT_TOKENS)
            known = self._texts.get(number)
            if known is None or (known.start, known.num_tokens) != (row[_START], num_tokens):
                text = self._decode(node.token_ids[first : first + num_tokens])
                self._texts[number] = _Text(row[_START], num_tokens, text)
                self._versions[number] = self.version


def _name(namespace: object) -> str:
    return namespace if isinstance(namespace, str) else repr(namespace)
