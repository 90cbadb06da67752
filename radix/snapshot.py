"""Nodes of a radix tree as plain data, to be sent to clients and drawn."""

from __future__ import annotations

from typing import TypedDict

from .node import Node

__all__ = ["NodeSnapshot", "snapshot_of"]


class NodeSnapshot(TypedDict):
    """One node as plain data; roots have no parent and no tokens."""

    id: int
    parent: int | None
    namespace: str
    num_tokens: int
    token_ids: list[int]  # its first ones
    lock_ref: int
    lease_ref: int
    pin_ref: int
    host_tokens: int  # of num_tokens, the leading ones that the host tier has too
    hits: int
    last_use: int


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
