"""The invariants of tree and pool, checked from scratch; tests call it after every step.

Cost: O(all nodes and pages); it uses only the tree's fields, not what its methods compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, pairwise

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
            if not is_filed:
                raise CheckFailed(f"{checkpoint} is filed in {node} at {position}")
            if not node.start < position <= node.end:
                raise CheckFailed(f"{checkpoint} lies outside its node")
            found.append(checkpoint)
    if {id(checkpoint) for checkpoint in found} != {id(checkpoint) for checkpoint in slots}:
        raise CheckFailed("the checkpoints in use order are not those of the nodes")
    num_unproven = sum(not checkpoint.is_proven for checkpoint in found)
    if slots.num_unproven != num_unproven:
        raise CheckFailed(f"num_unproven is not {num_unproven}")
    owned = sorted([*slots.free_slots(), *held, *(checkpoint.slot for checkpoint in found)])
    if owned != list(slots.slots):
        raise CheckFailed(f"of the slots {slots.slots} these have owners: {owned}")


def _reachable(tree: RadixTree) -> list[Node]:
    """All nodes, roots included, parents first."""
    nodes: list[Node] = []
    for namespace, root in tree.roots.items():
        if not root.is_root:
            raise CheckFailed(f"the root of {namespace!r} has a parent: {root}")
        if root.namespace != namespace:
            raise CheckFailed(f"{root} is filed under {namespace!r}")
        stack = [root]
        while stack:
            node = stack.pop()
            nodes.append(node)
            stack.extend(node.children.values())
    if len({id(node) for node in nodes}) != len(nodes):
        raise CheckFailed("a node is reachable twice")
    return nodes


def _check_edge(tree: RadixTree, node: Node) -> None:
    if not node.is_attached:
        raise CheckFailed(f"{node} is reachable but marked as detached")
    num_tokens, num_pages = len(node.token_ids), len(node.pages)
    is_tail = num_tokens < tree.page_size and num_pages == 1 and not node.children
    if num_tokens != num_pages * tree.page_size and not is_tail:
        raise CheckFailed(
            f"{node} has {num_tokens} tokens on {num_pages} pages of {tree.page_size}"
        )
    if (num_tokens == 0) != node.is_root:
        raise CheckFailed(f"{node} has an edge of {num_tokens} tokens")
    start = 0 if node.parent is None else node.parent.end
    if node.end != start + num_tokens:
        raise CheckFailed(f"{node} ends at {node.end}, not {start + num_tokens}")
    if node.lock_ref < 0:
        raise CheckFailed(f"{node} has a negative lock_ref")


def _check_children(tree: RadixTree, node: Node) -> None:
    if node.sorted_keys is not None and node.sorted_keys != sorted(node.children):
        raise CheckFailed(f"the sorted keys of {node} are not its children's")
    for key, child in node.children.items():
        first_page = child.token_ids[: tree.page_size].tobytes()
        if key != first_page:
            raise CheckFailed(f"{child} is filed in {node} under other tokens than its first")
        if key != child.key:
            raise CheckFailed(f"{child} is filed in {node} under another key than its own")
        if child.parent is not node:
            raise CheckFailed(f"{child} lies under {node} but names another parent")
        if child.namespace != node.namespace:
            raise CheckFailed(f"{child} is in another namespace than {node}")
    for name in ("lock_ref", "lease_ref", "pin_ref"):
        below = sum(getattr(child, name) for child in node.children.values())
        if getattr(node, name) < below:
            raise CheckFailed(f"{node} has {name} below its children's sum, {below}")
    if node.pin_ref > node.lease_ref:
        raise CheckFailed(f"{node} has more pins than leases")


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
        if getattr(tree, name) != value:
            raise CheckFailed(f"{name} is {getattr(tree, name)}, not {value}")


def _is_free(node: Node) -> bool:
    return node.lock_ref == 0 and node.lease_ref == 0


def _check_use_order(tree: RadixTree, nodes: list[Node]) -> None:
    ordered = list(tree.use_order)
    place = {id(node): index for index, node in enumerate(ordered)}
    free = {id(node) for node in nodes if _is_free(node) and not node.is_root}
    if len(place) != len(ordered):
        raise CheckFailed("a node stands in the use order twice")
    for node in ordered:
        if id(node) not in free:
            raise CheckFailed(f"{node} is in the use order but held or not in the tree")
    for node in nodes:
        if id(node) not in free:
            continue
        if id(node) not in place:
            raise CheckFailed(f"{node} is evictable but not in the use order")
        parent = node.parent
        if parent is not None and place[id(node)] >= place.get(id(parent), len(place)):
            raise CheckFailed(f"{parent} would be evicted before {node}")
    for older, newer in pairwise(ordered):
        if older.last_use > newer.last_use:
            raise CheckFailed(f"{older} stands before {newer}, used earlier")


def _check_refs(nodes: list[Node], name: str, held: Iterable[Node]) -> None:
    """Each node counts exactly the holds on it and below it."""
    expected = {id(node): 0 for node in nodes}
    for handle in held:
        step: Node | None = handle
        while step is not None:
            if id(step) not in expected:
                raise CheckFailed(f"{handle} is held but {step} is not in the tree")
            expected[id(step)] += 1
            step = step.parent
    for node in nodes:
        count = expected[id(node)]
        if getattr(node, name) != count:
            raise CheckFailed(f"{node} should have {name} {count}")


def _check_owners(
    nodes: list[Node], allocator: PageAllocator, held: Iterable[Sequence[int]]
) -> None:
    held = list(held)
    runs = [allocator.free_pages(), *(node.pages for node in nodes), *held]
    if sorted(chain.from_iterable(runs)) == list(range(allocator.num_pages)):
        return  # what follows finds out who is wrong, which takes longer
    owners: dict[int, str] = {}
    claims = [("the free list", allocator.free_pages())]
    claims += [(repr(node), node.pages) for node in nodes]
    for owner, pages in [*claims, *((f"request {i}", run) for i, run in enumerate(held))]:
        for page in pages:
            if not 0 <= page < allocator.num_pages:
                raise CheckFailed(f"{owner} has page {page}: no such page")
            if page in owners:
                raise CheckFailed(f"page {page} belongs to {owners.get(page)} and {owner}")
            owners[page] = owner
    lost = allocator.num_pages - len(owners)
    if lost:
        first = next(page for page in range(allocator.num_pages) if page not in owners)
        raise CheckFailed(f"{lost} pages belong to nobody, the first of them page {first}")
