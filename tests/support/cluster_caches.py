"""What the engines of a cluster have cached, by their own words."""

from __future__ import annotations

from typing import Any

from cluster_threads import Cluster


def texts_in(cluster: Cluster, number: int) -> set[tuple[str, bytes]]:
    """The longest texts in an engine's tree, by its own words."""
    engine = cluster.engines[number].loaded
    written, tree = engine.token_texts(), engine.engine.scheduler.kv_cache.tree
    texts = {
        (
            str(node.namespace),
            b"".join(written[i] for i in _without_bos(engine, tree.path(node)[0])),
        )
        for node in tree.nodes()
        if not node.children and not node.is_root
    }
    return {
        (namespace, text)
        for namespace, text in texts
        if text and not any(o != text and o.startswith(text) for n, o in texts if n == namespace)
    }


def _without_bos(engine: Any, ids: Any) -> Any:
    return ids[1:] if ids and ids[0] in engine.tokenizer.bos_ids else ids


def is_right(cluster: Cluster) -> bool:
    """Whether the router knows it."""
    return all(
        set(cluster.router._prefixes.cached.texts_of(number)) == texts_in(cluster, number)
        for number in cluster.engines
    )
