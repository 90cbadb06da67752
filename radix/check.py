"""The invariants of tree and pool, checked from scratch; tests call it after every step.

Cost: O(all nodes and pages); it uses only the tree's fields, not what its methods compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from .checkpoints import Checkpoints
from .node import Node
from .pages import PageAllocator
from .tree import RadixTree

__all__ = ["CheckFailed", "check", "check_checkpoints"]


class CheckFailed(AssertionError):
    """An invariant of the tree or the pool is broken; the message says which and where."""


def check(
    tree: RadixTree,
    allocator: PageAllocator,
    held: Iterable[Sequence[int]] = (),
    locks: Iterable[Node] | None = None,
    leases: Iterable[tuple[Node, bool]] | None = None,
) -> None:
    """Raises CheckFailed unless free + cached + held = all pages, each with one owner, and the
    tree's locks, leases, counts, edges and use order are consistent.

    `held`: for each request its own pages, not those that it reads from the tree. `locks`: the
    currently locked nodes, one entry a lock; without it lock_ref is checked against the children's
    only. `leases`: likewise the leased nodes, each with whether the lease is a pin.
    """
    nodes = _reachable(tree)
    for node in nodes:
        _check_edge(tree, node)
        _check_children(tree, node)
    _check_counts(tree, nodes)
    _check_use_order(tree, nodes)
    if locks is not None:
        _check_refs(nodes, "lock_ref", locks)
    if leases is not None:
        leased = list(leases)
        _check_refs(nodes, "lease_ref", [node for node, _ in leased])
        _check_refs(nodes, "pin_ref", [node for node, is_pin in leased if is_pin])
    _check_owners(nodes, allocator, held)


def check_checkpoints(slots: Checkpoints, tree: RadixTree, held: Sequence[int]) -> None:
    """Raises CheckFailed unless free + checkpoints + held = all slots, each with one owner, and the
    nodes have the checkpoints that are in the use order. `held`: slots of callers."""
    found = []
    for node in tree.nodes():
        for position, checkpoint in (node.checkpoints or {}).items():
            is_filed = (checkpoint.node, checkpoint.position) == (node, position)
            _require(is_filed, f"{checkpoint} is filed in {node} at {position}")
            _require(node.start < position <= node.end, f"{checkpoint} lies outside its node")
            found.append(checkpoint)
    _require(
        {id(checkpoint) for checkpoint in found} == {id(checkpoint) for checkpoint in slots},
        "the checkpoints in use order are not those of the nodes",
    )
    num_unproven = sum(not checkpoint.is_proven for checkpoint in found)
    _require(slots.num_unproven == num_unproven, f"num_unproven is not {num_unproven}")
    owned = sorted([*slots.free_slots(), *held, *(checkpoint.slot for checkpoint in found)])
    _require(owned == list(slots.slots), f"of the slots {slots.slots} these have owners: {owned}")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise CheckFailed(message)


def _reachable(tree: RadixTree) -> list[Node]:
    """All nodes, roots included, parents first."""
    nodes: list[Node] = []
    for namespace, root in tree.roots.items():
        _require(root.is_root, f"the root of {namespace!r} has a parent: {root}")
        _require(root.namespace == namespace, f"{root} is filed under {namespace!r}")
        stack = [root]
        while stack:
            node = stack.pop()
            nodes.append(node)
            stack.extend(node.children.values())
    _require(len({id(node) for node in nodes}) == len(nodes), "a node is reachable twice")
    return nodes


def _check_edge(tree: RadixTree, node: Node) -> None:
    _require(node.is_attached, f"{node} is reachable but marked as detached")
    num_tokens, num_pages = len(node.token_ids), len(node.pages)
    _require(
        num_tokens == num_pages * tree.page_size,
        f"{node} has {num_tokens} tokens on {num_pages} pages of {tree.page_size}",
    )
    _require((num_tokens == 0) == node.is_root, f"{node} has an edge of {num_tokens} tokens")
    start = 0 if node.parent is None else node.parent.end
    _require(node.end == start + num_tokens, f"{node} ends at {node.end}, not {start + num_tokens}")
    _require(node.lock_ref >= 0, f"{node} has a negative lock_ref")


def _check_children(tree: RadixTree, node: Node) -> None:
    for key, child in node.children.items():
        first_page = child.token_ids[: tree.page_size].tobytes()
        _require(key == first_page, f"{child} is filed in {node} under other tokens than its first")
        _require(key == child.key, f"{child} is filed in {node} under another key than its own")
        _require(child.parent is node, f"{child} lies under {node} but names another parent")
        _require(child.namespace == node.namespace, f"{child} is in another namespace than {node}")
    for name in ("lock_ref", "lease_ref", "pin_ref"):
        below = sum(getattr(child, name) for child in node.children.values())
        holds = getattr(node, name) >= below
        _require(holds, f"{node} has {name} below its children's sum, {below}")
    _require(node.pin_ref <= node.lease_ref, f"{node} has more pins than leases")


def _check_counts(tree: RadixTree, nodes: list[Node]) -> None:
    inner = [node for node in nodes if not node.is_root]
    expected = {
        "num_nodes": len(inner),
        "num_pages": sum(len(node.pages) for node in inner),
        "evictable_pages": sum(len(node.pages) for node in inner if _is_free(node)),
        "leased_pages": sum(len(n.pages) for n in inner if n.lease_ref and not n.lock_ref),
        "pinned_pages": sum(len(node.pages) for node in inner if node.pin_ref),
    }
    for name, value in expected.items():
        _require(getattr(tree, name) == value, f"{name} is {getattr(tree, name)}, not {value}")


def _is_free(node: Node) -> bool:
    return node.lock_ref == 0 and node.lease_ref == 0


def _check_use_order(tree: RadixTree, nodes: list[Node]) -> None:
    ordered = list(tree.use_order)
    place = {id(node): index for index, node in enumerate(ordered)}
    free = {id(node) for node in nodes if _is_free(node) and not node.is_root}
    _require(len(place) == len(ordered), "a node stands in the use order twice")
    for node in ordered:
        _require(id(node) in free, f"{node} is in the use order but held or not in the tree")
    for node in nodes:
        if id(node) not in free:
            continue
        _require(id(node) in place, f"{node} is evictable but not in the use order")
        parent = node.parent
        if parent is not None and id(parent) in place:
            _require(
                place[id(node)] < place[id(parent)], f"{parent} would be evicted before {node}"
            )
    for older, newer in pairwise(ordered):
        _require(older.last_use <= newer.last_use, f"{older} stands before {newer}, used earlier")


def _check_refs(nodes: list[Node], name: str, held: Iterable[Node]) -> None:
    """Each node counts exactly the holds on it and below it."""
    expected = {id(node): 0 for node in nodes}
    for handle in held:
        step: Node | None = handle
        while step is not None:
            _require(id(step) in expected, f"{handle} is held but {step} is not in the tree")
            expected[id(step)] += 1
            step = step.parent
    for node in nodes:
        count = expected[id(node)]
        _require(getattr(node, name) == count, f"{node} should have {name} {count}")


def _check_owners(
    nodes: list[Node], allocator: PageAllocator, held: Iterable[Sequence[int]]
) -> None:
    owners: dict[int, str] = {}
    claims = [("the free list", allocator.free_pages())]
    claims += [(repr(node), node.pages) for node in nodes]
    for owner, pages in [*claims, *((f"request {i}", run) for i, run in enumerate(held))]:
        for page in pages:
            _require(0 <= page < allocator.num_pages, f"{owner} has page {page}: no such page")
            _require(page not in owners, f"page {page} belongs to {owners.get(page)} and {owner}")
            owners[page] = owner
    lost = allocator.num_pages - len(owners)
    if lost:
        first = next(page for page in range(allocator.num_pages) if page not in owners)
        raise CheckFailed(f"{lost} pages belong to nobody, the first of them page {first}")
