"""What an engine has cached, told to those who ask to follow it: a router of several engines.

A follower gets all of the device's tree once, and then what has changed, once a step:

    cache   reset? (forget what was told before), changes, costs

A change is [kind, node, other, namespace, text, number of tokens], as in `radix/journal.py`. Texts
and not ids: a router has the text of a program that nobody has tokenized yet. Their bytes travel as
characters of the same number (Latin-1), since a node may end within a character. A BOS is no text.

A follower that is behind is told nothing until it has caught up, and then all anew.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable
from typing import Any

import orjson

from ...errors import ProtocolError
from ...frontend.protocol import wire
from ...radix.journal import Change, TreeJournal, snapshot_changes
from ..encoder_engine import Loaded
from .clients import EngineClient

log = logging.getLogger(__name__)

MESSAGE_BYTES = 1024 * 1024


class CacheFeed:
    """Owns the followers, and the tree's journal while there are any."""

    def __init__(self, loaded: Loaded) -> None:
        self._scheduler = loaded.engine.scheduler
        self._tree = loaded.engine.scheduler.kv_cache.tree
        self._tokenizer = loaded.tokenizer
        self._total_tokens = loaded.engine.describe()["total_tokens"]
        self._written = loaded.token_texts  # what each token id writes
        self._bytes: list[bytes] | None = None
        self._followers: dict[EngineClient, bool] = {}  # whether each knows all that was told

    def follow(self, client: EngineClient) -> None:
        """Tell this client from now on; raises what reading the tokenizer does."""
        if self._bytes is None:
            self._bytes = self._written()
        self._followers[client] = False
        if self._tree.journal is None:
            self._tree.journal = TreeJournal()

    def forget(self, client: EngineClient) -> None:
        """It has gone."""
        self._followers.pop(client, None)
        if not self._followers:
            self._tree.journal = None

    def publish(self) -> None:
        """A step was made, or planned: tell what is new."""
        journal = self._tree.journal
        if journal is None:
            return
        changes = journal.take()
        told: list[bytes] | None = None
        for client, knows_all in list(self._followers.items()):
            is_behind = client.link.unacked_bytes >= wire.RUNTIME_CREDIT_BYTES
            if is_behind:
                self._followers[client] = False
            elif not knows_all:
                self._followers[client] = True
                nodes = snapshot_changes(self._tree.nodes())
                self._tell(client, self._encoded(nodes), is_reset=True)
            elif changes:
                told = self._encoded(changes) if told is None else told
                self._tell(client, told)

    def _tell(self, client: EngineClient, changes: list[bytes], *, is_reset: bool = False) -> None:
        costs = {"total_tokens": self._total_tokens, **self._scheduler.costs.describe()}
        head = orjson.dumps({"costs": costs, "reset": is_reset})
        messages, size = [[head]], 0
        for change in changes:
            size += len(change)
            if size > MESSAGE_BYTES:
                messages.append([b"{}"])
                size = len(change)
            messages[-1].append(change)
        try:
            for message in messages:
                client.link.put_list("cache", "changes", message)
        except ProtocolError as error:  # one change is more than a message may have
            log.warning("a follower of the cache is told no more: %s", error)
            self.forget(client)

    def _encoded(self, changes: Iterable[Change]) -> list[bytes]:
        return [orjson.dumps(self._described(change)) for change in changes]

    def _described(self, change: Change) -> list[Any]:
        assert self._bytes is not None
        ids, written = change.token_ids, self._bytes
        if min(ids, default=0) < 0:  # an image's; the text of what is behind it stands for both
            ids = array("i", [token_id for token_id in ids if token_id >= 0])
        if change.namespace is not None and ids and ids[0] in self._tokenizer.bos_ids:
            text = b"".join(map(written.__getitem__, ids[1:]))
        else:
            text = b"".join(map(written.__getitem__, ids))
        namespace = None if change.namespace is None else str(change.namespace)
        num_tokens = len(change.token_ids)
        return [
            change.kind, change.node, change.other, namespace, text.decode("latin-1"), num_tokens
        ]  # fmt: skip
