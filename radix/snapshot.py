"""Nodes of a radix tree as plain data, to be sent to clients and drawn."""

from __future__ import annotations

from typing import TypedDict

from .node import Node

__all__ = ["FleetNodeSnapshot", "NodeSnapshot", "TreeRow", "snapshot_of"]


class TreeRow(TypedDict):
    """What each row of a tree has; roots have no parent and no tokens."""

    id: int
    parent: int | None
    namespace: str
    num_tokens: int


class NodeSnapshot(TreeRow):
    """One node as plain data."""

    token_ids: list[int]  # its first ones
    lock_ref: int
    lease_ref: int
    pin_ref: int
    host_tokens: int  # of num_tokens, the leading ones that the host tier has too
    hits: int
    last_use: int


class FleetNodeSnapshot(TreeRow):
    """A run of text that some of several caches have, as plain data; `num_tokens`: the most that
    one of them has of it."""

    num_bytes: int
    text: str  # of its first bytes; what is no UTF-8 is replaced
    is_cut: bool  # whether `text` is not all of it
    holders: dict[str, int]  # tokens of it by holder; of a root: of all below it


def snapshot_of(node: Node, max_token_ids: int) -> NodeSnapshot:
    """The node with its first `max_token_ids` ids; without data of other tiers."""
    namespace = node.namespace if isinstance(node.namespace, str) else repr(node.namespace)
    return NodeSnapshot(
        id=node.id,
        parent=None if node.parent is None else node.parent.id,
        namespace=namespace,
        num_tokens=len(node.token_ids),
        token_ids=node.token_ids[:max_token_ids].tolist(),
        lock_ref=node.lock_ref,
        lease_ref=node.lease_ref,
        pin_ref=node.pin_ref,
        host_tokens=0,
        hits=node.hits,
        last_use=node.last_use,
    )
