"""The radix tree: prefixes of token ids, and the KV pages that hold them.

Source: RadixAttention, "SGLang: Efficient Execution of Structured Language Model Programs",
arXiv:2312.07104, section 3. Edges are runs of tokens, siblings differ in their first page. A
match ends at the edge of a page; where a page begins with tokens that follow it, `begun_page` finds
that, and whoever copies it has them too.

Cost: match and insert O(nodes on the path) Python steps, the runs themselves being compared and
copied as blocks of bytes; extend O(length of the new run); lock and unlock O(nodes on the path);
evict O(1) per node freed. docs/how-it-works/radix.md has the figures.

What it does not know: pages' contents, owners of pages outside it, and programs. It is not
thread-safe: one planner owns it. All code that keeps the counts true is in this class.

A call that changes the tree invalidates all unlocked handles (nodes), so lock what you matched
before you do anything else.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Container, Hashable, Sequence
from typing import NamedTuple

from .checkpoints import Checkpoints
from .journal import TreeJournal
from .node import Node, UseOrder
from .pages import Pages, as_ids
from .snapshot import NodeSnapshot, snapshot_of

__all__ = ["Inserted", "Match", "Node", "NodeSnapshot", "RadixTree"]

_TOKEN_BYTES = array("i").itemsize


class Match(NamedTuple):
    """The longest cached prefix; the path to `node` is exactly these tokens."""

    node: Node
    pages: Pages  # still the tree's: lock `node` before reading them
    num_tokens: int


class Inserted(NamedTuple):
    """The result of adding a run to the tree."""

    node: Node  # where the run ends
    num_existing: int  # leading tokens of the given run that the tree already had
    added_from: int  # path length before the first added token: remove()'s undo point
    duplicate_pages: Pages  # the caller's pages for tokens that the tree already had: still its own
    adopted_pages: Pages  # the tree's pages for those num_existing tokens, to use instead


class RadixTree:
    """Owns the cached pages: every page in it belongs to exactly one node.

    Invariant: `0 <= evictable_pages + leased_pages <= num_pages`; a node's lock_ref is at least the
    sum of its children's, so an unlocked node has only unlocked nodes below it, and likewise for
    leases: all nodes neither locked nor leased can be evicted.
    """

    def __init__(self, page_size: int = 1) -> None:
        assert page_size >= 1, f"page_size={page_size} must be at least 1"
        self.page_size = page_size
        self.roots: dict[Hashable, Node] = {}
        self.use_order = UseOrder()
        self.num_nodes = 0  # without the roots
        self.num_splits = 0  # since the start: nothing else changes the path to a locked node
        self.num_pages = 0  # pages owned by the tree
        self.evictable_pages = 0  # in nodes neither locked nor leased
        self.leased_pages = 0  # in nodes that are leased but not locked
        self.pinned_pages = 0  # in pinned nodes, locked or not
        self.clock = 0  # uses so far
        self.journal: TreeJournal | None = None  # of changes, while somebody follows them
        self.checkpoints: Checkpoints | None = None  # of a model with recurrent layers
        self.num_visits = 0  # nodes visited by all calls: tests check claimed costs by it
        self._next_id = 0

    def match(
        self, namespace: Hashable, token_ids: Sequence[int], limit: int | None = None
    ) -> Match:
        """Finds the longest cached prefix in whole pages, of at most `limit` tokens; it is a use.

        Splits the last node if the match ends inside it, so that the returned node ends where the
        match does. Locks nothing.
        """
        return self._match(self._root(namespace), token_ids, limit)

    def match_below(self, node: Node, token_ids: Sequence[int], limit: int | None = None) -> Match:
        """match() of a run below `node`, which the caller has locked, without walking to it.

        `num_tokens` and `pages` of the result are those below `node`.
        """
        assert node.is_attached and node.lock_ref > 0, f"{node} was matched below without a lock"
        return self._match(node, token_ids, limit)

    def match_length_below(self, node: Node, token_ids: Sequence[int]) -> int:
        """The number of tokens that match_below() would find; changes nothing."""
        if not node.children:
            return 0
        return self._descend(node, self._pack(token_ids))[1] - node.end

    def begun_page(
        self, node: Node, token_ids: Sequence[int], without: Container[Node] = ()
    ) -> tuple[Node, int] | None:
        """The child of `node`, which the caller has locked, whose first page shares the most
        leading tokens with a run that it does not share whole, and how many; None: none shares any.
        A use of the child, which is not one of `without`. O(log children, and those passed over),
        the first time at this node O(children log children).
        """
        assert node.is_attached and node.lock_ref > 0, f"{node} was matched below without a lock"
        if node.sorted_keys is None:
            node.sorted_keys = sorted(node.children)
        run = as_ids(token_ids[: self.page_size]).tobytes()
        # The further from a run a key is among sorted ones, the fewer leading bytes they share.
        place = bisect_left(node.sorted_keys, run)
        best: tuple[Node, int] | None = None
        for places in (range(place, len(node.sorted_keys)), range(place - 1, -1, -1)):
            for beside in places:
                self.num_visits += 1
                child = node.children[node.sorted_keys[beside]]
                if child.key[:_TOKEN_BYTES] != run[:_TOKEN_BYTES]:
                    break
                if child not in without:
                    num_tokens = _num_common(run, child.key)
                    if best is None or num_tokens > best[1]:
                        best = child, num_tokens
                    break
        if best is not None:
            self._use([best[0]])
        return best

    def add_tail(
        self, node: Node, token_ids: Sequence[int], page: int, *, owner: Hashable = None
    ) -> Node | None:
        """Caches less than a page of tokens behind `node`, which the caller has locked: they are
        found by `begun_page` alone. The page becomes the tree's, unless another one begins with
        these tokens: None. Locks nothing."""
        ids = as_ids(token_ids)
        assert 0 < len(ids) < self.page_size, f"{len(ids)} tokens are no tail"
        found = self.begun_page(node, ids)
        if found is not None and found[1] == len(ids):
            return None
        return self._put_below(node, ids, array("i", [page]), owner)

    def is_tail(self, node: Node) -> bool:
        """Whether a node has less than a page of tokens."""
        return 0 < len(node.token_ids) < self.page_size

    def descend(self, node: Node, token_ids: Sequence[int]) -> tuple[list[Node], int]:
        """The nodes below `node` that a run enters, and the path length where it leaves them, which
        may be inside the last one; changes nothing."""
        return self._descend(node, self._pack(token_ids))

    def match_length(
        self, namespace: Hashable, token_ids: Sequence[int], limit: int | None = None
    ) -> int:
        """The number of tokens that match() would find; changes nothing."""
        return self.packed_match_length(namespace, self._pack(token_ids, limit))

    def packed_match_length(self, namespace: Hashable, query: bytes) -> int:
        """match_length() of the bytes of an `array('i')`, in whole pages: for who asks many trees
        for one prompt."""
        root = self.roots.get(namespace)
        return 0 if root is None else self._descend(root, query)[1]

    def insert(
        self,
        namespace: Hashable,
        token_ids: Sequence[int],
        pages: Sequence[int],
        *,
        owner: Hashable = None,
    ) -> Inserted:
        """Caches a run from the root; `pages[i]` holds the i-th page of its tokens.

        Only whole pages are inserted: tokens after the last one, and their page, stay the caller's.
        For tokens that the tree already has it keeps its own pages; the rest of `pages` becomes the
        tree's. Locks nothing. New nodes belong to `owner`, see owners.py.
        """
        return self._add(self._root(namespace), token_ids, pages, owner, owns_lock=False)

    def extend(
        self,
        node: Node,
        token_ids: Sequence[int],
        pages: Sequence[int],
        *,
        owner: Hashable = None,
    ) -> Inserted:
        """insert() of a run below `node`, which the caller has locked, without walking to it.

        A leaf of this owner that only the caller locks grows in place (the returned node is then
        `node` and its lock covers the new tokens); otherwise an unlocked child is made. In both
        cases a caller who continues from there calls `move_lock(node, inserted.node)` next.
        """
        assert node.is_attached, f"{node} was extended after it had left the tree"
        assert node.lock_ref > 0, f"{node} was extended without being locked"
        return self._add(node, token_ids, pages, owner, owns_lock=True)

    def lock(self, node: Node) -> None:
        """Keeps the whole path to `node` from eviction until unlock()."""
        assert node.is_attached, f"{node} was locked after it had left the tree"
        step: Node | None = node
        while step is not None:
            self._lock_one(step)
            step = step.parent

    def unlock(self, node: Node) -> None:
        """Releases one lock(); counts as a use of nodes that nobody else locks."""
        self.clock += 1
        step: Node | None = node
        top = node
        while step is not None:
            assert step.lock_ref > 0, f"{step} was unlocked more often than locked"
            self.num_visits += 1
            step.lock_ref -= 1
            if step.lock_ref == 0 and step.parent is not None:
                step.last_use = self.clock
                self._set_free(step)
            top, step = step, step.parent
        self._drop_root_if_empty(top)

    def lease(self, node: Node, *, is_pin: bool = False) -> None:
        """Excludes the path to `node` from evict(), until unlease(); see leases.py."""
        assert node.is_attached, f"{node} was leased after it had left the tree"
        step: Node | None = node
        while step is not None:
            step.lease_ref += 1
            if step.lease_ref == 1 and not step.lock_ref and not step.is_root:
                self.evictable_pages -= len(step.pages)
                self.leased_pages += len(step.pages)
                self.use_order.drop(step)
            step.pin_ref += is_pin
            if is_pin and step.pin_ref == 1:
                self.pinned_pages += len(step.pages)
            step = step.parent

    def unlease(self, node: Node, *, up_to: Node | None = None, is_pin: bool = False) -> None:
        """Releases one lease(), or only the part of its path below `up_to`."""
        self.clock += 1
        step: Node | None = node
        top = node
        while step is not None and step is not up_to:
            assert step.lease_ref > 0, f"{step} was unleased more often than leased"
            step.lease_ref -= 1
            if step.lease_ref == 0 and not step.lock_ref and not step.is_root:
                step.last_use = self.clock
                self.leased_pages -= len(step.pages)
                self._set_free(step)
            step.pin_ref -= is_pin
            if is_pin and step.pin_ref == 0:
                self.pinned_pages -= len(step.pages)
            top, step = step, step.parent
        self._drop_root_if_empty(top)

    def move_lock(self, node: Node, below: Node) -> None:
        """Moves one lock from `node` down to `below`, at the cost of the nodes between."""
        while below is not node:
            self._lock_one(below)
            assert below.parent is not None, f"a lock on {node} cannot move to another path"
            below = below.parent

    def evict(self, num_pages: int, on_evict: Callable[[Node, int], None] | None = None) -> Pages:
        """Frees `num_pages` pages, or all evictable ones if they are fewer.

        Evicts least recently used leaves first, whole, and a parent once it is a leaf; of the last
        one only the tail that is still needed. Locked and leased nodes stay. The pages become the
        caller's. `on_evict` is called with each leaf before it is cut, and the number of pages it
        keeps; it must not change this tree.
        """
        freed = array("i")
        while (missing := num_pages - len(freed)) > 0 and (leaf := self.use_order.oldest):
            num_kept = len(leaf.pages) - missing
            if on_evict is not None:
                on_evict(leaf, max(num_kept, 0))
            freed.extend(self._truncate(leaf, num_kept) if num_kept > 0 else self._detach(leaf))
        return freed

    def path(self, node: Node) -> tuple[array[int], Pages]:
        """The tokens and pages from the root to the end of `node`."""
        nodes = [node]
        while nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        token_ids, pages = array("i"), array("i")
        for step in reversed(nodes):
            token_ids.extend(step.token_ids)
            pages.extend(step.pages)
        return token_ids, pages

    def split(self, node: Node, end: int) -> Node:
        """Splits a node at a page boundary inside it; returns its upper part, a new node that ends
        at `end` and is locked and leased like `node`."""
        assert end % self.page_size == 0, f"{node} cannot split at {end}: no page edge"
        return self._split(node, end)

    def remove(self, node: Node, num_kept: int | None = None) -> Pages:
        """Unpublishes what a failed step inserted: cuts `node`'s path to `num_kept` tokens.

        Everything after the cut leaves the tree, other branches below it included, and its pages
        become the caller's. By default the cut is where `node` begins; after an insert or extend
        it is `added_from`. All locks must be released first: an assertion fails, and nothing has
        changed, if something after the cut is still locked, for that lock would keep KV that was
        never written. Nodes that have already left the tree are no error, so the inserts of one
        step can be undone in any order.
        """
        kept = node.start if num_kept is None else num_kept
        assert kept >= 0 and kept % self.page_size == 0, f"cannot keep {kept} tokens: no page edge"
        while node.start > kept and node.parent is not None:
            node = node.parent
        if not node.is_attached or node.end <= kept:
            return array("i")
        assert node.lock_ref == node.lease_ref == 0, f"{node} was removed while locked or leased"
        if node.start == kept:
            return self._detach(node)
        freed = array("i")
        for child in list(node.children.values()):
            freed.extend(self._detach(child))
        freed.extend(self._truncate(node, (kept - node.start) // self.page_size))
        return freed

    def clear(self, namespace: Hashable | None = None) -> Pages:
        """Drops all nodes neither locked nor leased, in one namespace or (None) in all.

        The pages become the caller's.
        """
        roots = list(self.roots.values()) if namespace is None else [self._root(namespace)]
        freed = array("i")
        stack = roots[:]
        while stack:
            for child in list(stack.pop().children.values()):
                if child.lock_ref or child.lease_ref:
                    stack.append(child)
                else:
                    freed.extend(self._detach(child))
        for root in roots:
            self._drop_root_if_empty(root)
        return freed

    def nodes(self) -> list[Node]:
        """All nodes, roots included, parents first and depth first."""
        nodes: list[Node] = []
        stack = list(reversed(self.roots.values()))
        while stack:
            node = stack.pop()
            stack.extend(reversed(node.children.values()))
            nodes.append(node)
        return nodes

    def snapshot(self, max_token_ids: int = 64) -> list[NodeSnapshot]:
        """All nodes, parents first and depth first, each with its first `max_token_ids` ids."""
        return [snapshot_of(node, max_token_ids) for node in self.nodes()]

    def _root(self, namespace: Hashable) -> Node:
        root = self.roots.get(namespace)
        if root is None:
            root = self._make(namespace, None, b"", array("i"), array("i"))
            self.roots[namespace] = root
        return root

    def _make(
        self,
        namespace: Hashable,
        parent: Node | None,
        key: bytes,
        token_ids: array[int],
        pages: Pages,
        owner: Hashable = None,
    ) -> Node:
        self._next_id += 1
        node = Node(self._next_id, namespace, parent, key, token_ids, pages, owner)
        node.last_use = self.clock
        return node

    def _match(self, node: Node, token_ids: Sequence[int], limit: int | None) -> Match:
        """The longest cached prefix below `node`."""
        path, end = self._descend(node, self._pack(token_ids, limit))
        if not path:
            return Match(node, array("i"), 0)
        if path[-1].end > end:
            path[-1] = self._split(path[-1], end)
        self._use(path)
        pages = array("i")
        for step in path:
            step.hits += 1
            pages.extend(step.pages)
        return Match(path[-1], pages, end - node.end)

    def _pack(self, token_ids: Sequence[int], limit: int | None = None) -> bytes:
        """The bytes of the leading ids, in whole pages and at most `limit` of them."""
        ids = as_ids(token_ids)
        num_tokens = len(ids) if limit is None else max(0, min(len(ids), limit))
        num_tokens -= num_tokens % self.page_size
        return ids.tobytes() if num_tokens == len(ids) else ids[:num_tokens].tobytes()

    def _descend(self, node: Node, query: bytes) -> tuple[list[Node], int]:
        """The nodes below `node` that the query enters, and the path length where it leaves them.

        Only the last of them may be left before its end, but not before the end of its first page.
        """
        end = node.end
        path: list[Node] = []
        at = 0
        page_bytes = self.page_size * _TOKEN_BYTES
        child = node.children.get(query[:page_bytes])
        while child is not None:
            path.append(child)
            if not query.startswith(child.token_ids, at):
                end += _common_length(query, at, child.token_ids, self.page_size)
                break
            at += len(child.token_ids) * _TOKEN_BYTES
            end = child.end
            child = child.children.get(query[at : at + page_bytes])
        self.num_visits += 1 + len(path)
        return path, end

    def _split(self, node: Node, end: int) -> Node:
        """Puts a new node that ends at `end` above `node`, which stays valid as a handle.

        The new node has the same locks: each of them was on the whole path to `node` or below.
        """
        parent = node.parent
        assert parent is not None and node.start < end < node.end, f"{node} cannot split at {end}"
        cut = end - node.start
        num_pages = cut // self.page_size
        run, pages = node.token_ids[:cut], node.pages[:num_pages]
        upper = self._make(node.namespace, parent, node.key, run, pages, node.owner)
        upper.lock_ref, upper.hits, upper.last_use = node.lock_ref, node.hits, node.last_use
        upper.lease_ref, upper.pin_ref = node.lease_ref, node.pin_ref
        parent.children[node.key] = upper
        del node.token_ids[:cut]
        del node.pages[:num_pages]
        node.parent = upper
        node.key = node.token_ids[: self.page_size].tobytes()
        upper.children[node.key] = node
        self.num_nodes += 1
        self.num_splits += 1
        if node.checkpoints and self.checkpoints is not None:
            self.checkpoints.note_split(node, upper)
        if node.older is not None:
            self.use_order.put_after(upper, node)
        if self.journal is not None:
            self.journal.note_split(node, upper)
        return upper

    def _use(self, path: list[Node]) -> None:
        """Makes the nodes of a path, given from the top, the most recently used ones."""
        self.clock += 1
        for node in path:
            node.last_use = self.clock
        self.use_order.renew(path)

    def _add(
        self,
        node: Node,
        token_ids: Sequence[int],
        pages: Sequence[int],
        owner: Hashable,
        *,
        owns_lock: bool,
    ) -> Inserted:
        ids, own = as_ids(token_ids), as_ids(pages)
        query = self._pack(ids)
        num_tokens = len(query) // _TOKEN_BYTES
        num_pages = num_tokens // self.page_size
        assert len(own) >= num_pages, f"{len(own)} pages for {num_tokens} tokens"
        path, added_from = self._descend(node, query)
        if path and path[-1].end > added_from:
            path[-1] = self._split(path[-1], added_from)
        self._use(path)
        adopted = array("i")
        for step in path:
            adopted.extend(step.pages)
        num_existing = added_from - node.end
        last = path[-1] if path else node
        if num_existing < num_tokens:
            new_pages = own[len(adopted) : num_pages]
            owned_locks = 1 if owns_lock and last is node else 0
            last = self._append(last, ids[num_existing:num_tokens], new_pages, owner, owned_locks)
        duplicates = _differing(own[: len(adopted)], adopted)
        return Inserted(last, num_existing, added_from, duplicates, adopted)

    def _append(
        self, node: Node, token_ids: array[int], pages: Pages, owner: Hashable, owned_locks: int
    ) -> Node:
        """Adds a run below `node`: in place if it is a leaf of this owner with no lock except the
        caller's and no lease."""
        if (
            not node.children
            and node.parent is not None
            and node.lock_ref <= owned_locks
            and not node.lease_ref
            and node.owner is owner
        ):
            node.token_ids.extend(token_ids)
            node.pages.extend(pages)
            node.end += len(token_ids)
            self.num_pages += len(pages)
            node.last_use = self.clock
            if self.journal is not None:
                self.journal.note_growth(node, token_ids)
            self.evictable_pages += 0 if node.lock_ref else len(pages)
            return node
        return self._put_below(node, token_ids, pages, owner)

    def _put_below(self, node: Node, token_ids: array[int], pages: Pages, owner: Hashable) -> Node:
        """A new child. A tail that its first page goes on from is of no more use."""
        key = token_ids[: self.page_size].tobytes()
        child = self._make(node.namespace, node, key, token_ids, pages, owner)
        node.children[key] = child
        if node.sorted_keys is not None:
            place = bisect_left(node.sorted_keys, key)
            node.sorted_keys.insert(place, key)
            before = node.children[node.sorted_keys[place - 1]] if place else child
            if self.is_tail(before) and key.startswith(before.key) and before.older is not None:
                self.use_order.age(before)
                before.last_use = 0
        self.num_nodes += 1
        self.num_pages += len(pages)
        self.evictable_pages += len(pages)
        self.use_order.put(child, node if node.older is not None else None)
        if self.journal is not None:
            self.journal.note_new(child)
        return child

    def _set_free(self, node: Node) -> None:
        """The last lock or lease on a node is gone: it is evictable, unless the other is left."""
        if node.lease_ref:
            self.leased_pages += len(node.pages)
        else:
            self.evictable_pages += len(node.pages)
            self.use_order.put(node)

    def _lock_one(self, node: Node) -> None:
        self.num_visits += 1
        node.lock_ref += 1
        if node.lock_ref == 1 and node.parent is not None:
            if node.lease_ref:
                self.leased_pages -= len(node.pages)
            else:
                self.evictable_pages -= len(node.pages)
                self.use_order.drop(node)

    def _truncate(self, leaf: Node, num_pages: int) -> Pages:
        """Keeps the first `num_pages` pages of an unlocked leaf; returns the others."""
        self.num_visits += 1
        freed = leaf.pages[num_pages:]
        num_tokens = num_pages * self.page_size
        leaf.end -= len(leaf.token_ids) - num_tokens
        if self.journal is not None:
            self.journal.note_cut(leaf, leaf.token_ids[num_tokens:])
        del leaf.pages[num_pages:]
        del leaf.token_ids[num_tokens:]
        if leaf.checkpoints and self.checkpoints is not None:
            self.checkpoints.note_cut(leaf)
        self.num_pages -= len(freed)
        self.evictable_pages -= len(freed)
        return freed

    def _detach(self, top: Node) -> Pages:
        """Removes an unlocked node and its subtree from the tree; returns their pages."""
        parent = top.parent
        is_free = top.lock_ref == top.lease_ref == 0
        assert parent is not None and is_free, f"{top} cannot leave the tree"
        del parent.children[top.key]
        if parent.sorted_keys is not None:
            del parent.sorted_keys[bisect_left(parent.sorted_keys, top.key)]
        if self.journal is not None:
            self.journal.note_gone(top)
        nodes = [top]
        freed = array("i")
        for node in nodes:  # the list grows in the loop
            if node.children:
                nodes.extend(node.children.values())
                node.children.clear()
                node.sorted_keys = None
            freed.extend(node.pages)
            self.use_order.drop(node)
            node.is_attached = False
            if node.checkpoints and self.checkpoints is not None:
                self.checkpoints.note_gone(node)
        self.num_nodes -= len(nodes)
        self.num_visits += len(nodes)
        self.num_pages -= len(freed)
        self.evictable_pages -= len(freed)
        if not parent.children:
            self._drop_root_if_empty(parent)
        return freed

    def _drop_root_if_empty(self, node: Node) -> None:
        if (
            node.is_root
            and node.is_attached
            and not (node.children or node.lock_ref or node.lease_ref)
        ):
            node.is_attached = False
            del self.roots[node.namespace]


def _common_length(query: bytes, at: int, run: array[int], page_size: int) -> int:
    """How many tokens, in whole pages, `query` from byte `at` on shares with `run`.

    Bisects over pages: each probe compares one block, and the blocks' lengths halve.
    """
    low = 0
    high = min(len(run), (len(query) - at) // _TOKEN_BYTES) // page_size
    while low < high:
        middle = (low + high + 1) // 2
        block = run[low * page_size : middle * page_size]
        if query.startswith(block, at + low * page_size * _TOKEN_BYTES):
            low = middle
        else:
            high = middle - 1
    return low * page_size


def _num_common(one: bytes, other: bytes) -> int:
    """How many leading tokens two keys share."""
    num_common = 0
    for token, same in zip(memoryview(one).cast("i"), memoryview(other).cast("i")):
        if token != same:
            break
        num_common += 1
    return num_common


def _differing(own: Pages, adopted: Pages) -> Pages:
    """The caller's pages that are not the tree's; usually the caller took those from a match."""
    if own == adopted:
        return array("i")
    return array("i", (mine for mine, its in zip(own, adopted, strict=True) if mine != its))
