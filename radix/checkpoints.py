"""Checkpoints: which slot of a pool of states holds the state behind which prefix of the tree.

A recurrent layer has one state, which each token changes, where attention has KV of each token. So
a cached prefix is of use only as far as somebody kept a copy of the state there: a checkpoint, at a
position on a node's run. It never changes; who goes on from it copies it first, so nobody has to
hold it. It lives no longer than the KV at its position.

Source: Marconi (Pan et al., "Marconi: prefix caching for the era of hybrid LLMs", MLSys 2025,
arXiv:2411.19379), which keeps states where sequences part and where they end. Integers only: what
a state is, and where a pool lies, is not known here.

Cost: add O(1), find O(nodes and checkpoints on the path), evict O(1) beside those leased or being
written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from .node import Checkpoint, Node

__all__ = ["Checkpoint", "Checkpoints"]


class Checkpoints:
    """Owns `slots`, of a pool: each is free, a checkpoint's, or a caller's.

    Invariant: node.start < position <= node.end, and a position has at most one. The tree tells of
    its nodes' splits and ends (`RadixTree.checkpoints`).
    """

    def __init__(self, slots: range) -> None:
        self.slots = slots
        self.num_evicted = 0  # since the start, for other states
        self.num_unproven = 0
        self._free = list(reversed(slots))
        self._by_use: dict[Checkpoint, None] = {}  # least recently used first

    def __len__(self) -> int:
        return len(self._by_use)

    def __iter__(self) -> Iterator[Checkpoint]:
        """From least to most recently used."""
        return iter(self._by_use)

    @property
    def num_free(self) -> int:
        """Slots that nobody has."""
        return len(self._free)

    def free_slots(self) -> list[int]:
        """Those that nobody has."""
        return self._free[:]

    def allocate(
        self,
        keep: Checkpoint | None = None,
        on_evict: Callable[[Checkpoint], None] | None = None,
    ) -> int | None:
        """A slot for the caller: a free one, or that of the checkpoint used least recently, those
        under a lease last. None if all are callers', being written, or `keep`. `on_evict` is called
        with a checkpoint that is about to go for it, and must not change this tree."""
        if not self._free:
            victim = self._victim(keep)
            if victim is None:
                return None
            self.num_evicted += 1
            if on_evict is not None:
                on_evict(victim)
            self.drop(victim)
        return self._free.pop()

    def free(self, slot: int) -> None:
        """Take a caller's slot back."""
        self._free.append(slot)

    def add(
        self, node: Node, position: int, slot: int, *, is_proven: bool = True
    ) -> Checkpoint | None:
        """Make a caller's slot the checkpoint at a position on the path to `node`; None if there is
        one already, and the slot stays the caller's."""
        node = _holder(node, position)
        if node.checkpoints is None:
            node.checkpoints = {}
        if position in node.checkpoints:
            return None
        checkpoint = Checkpoint(node, position, slot, is_proven=is_proven)
        node.checkpoints[position] = checkpoint
        self._by_use[checkpoint] = None
        self.num_unproven += not is_proven
        return checkpoint

    def has(self, node: Node, position: int) -> bool:
        """Whether there is one at a position on the path to `node`."""
        return position in (_holder(node, position).checkpoints or ())

    def prove(self, checkpoint: Checkpoint) -> None:
        """It has been written."""
        if checkpoint.node is not None and not checkpoint.is_proven:
            checkpoint.is_proven = True
            self.num_unproven -= 1

    def deepest(self, path: Iterable[Node], limit: int) -> Checkpoint | None:
        """The last checkpoint of at most `limit` tokens on a path, given from its end upwards; it
        may be unproven."""
        for node in path:
            for position in sorted(node.checkpoints or (), reverse=True):
                if position <= limit:
                    assert node.checkpoints is not None
                    return node.checkpoints[position]
        return None

    def last(self, node: Node) -> Checkpoint | None:
        """The last proven checkpoint on the path to the end of `node`."""
        for step in _upwards(node):
            for position in sorted(step.checkpoints or (), reverse=True):
                assert step.checkpoints is not None
                if step.checkpoints[position].is_proven:
                    return step.checkpoints[position]
        return None

    def use(self, checkpoint: Checkpoint) -> None:
        """Make it the most recently used one."""
        del self._by_use[checkpoint]
        self._by_use[checkpoint] = None

    def drop(self, checkpoint: Checkpoint) -> None:
        """End a checkpoint, whose slot is then free; nothing happens if it is gone already."""
        node = checkpoint.node
        if node is not None:
            assert node.checkpoints is not None
            del node.checkpoints[checkpoint.position]
            self._end(checkpoint)

    # --- for the tree -----------------------------------------------------------------------------

    def note_split(self, lower: Node, upper: Node) -> None:
        """A node has got a new one above it."""
        held = lower.checkpoints or {}
        upper.checkpoints = {at: held.pop(at) for at in list(held) if at <= upper.end}
        for checkpoint in upper.checkpoints.values():
            checkpoint.node = upper

    def note_cut(self, leaf: Node) -> None:
        """A leaf has lost its last tokens."""
        held = leaf.checkpoints or {}
        for position in [position for position in held if position > leaf.end]:
            self._end(held.pop(position))

    def note_gone(self, node: Node) -> None:
        """A node has left the tree."""
        for checkpoint in (node.checkpoints or {}).values():
            self._end(checkpoint)
        node.checkpoints = None

    def _victim(self, keep: Checkpoint | None) -> Checkpoint | None:
        leased = None
        for checkpoint in self._by_use:
            if checkpoint is keep or not checkpoint.is_proven:
                continue
            assert checkpoint.node is not None
            if not checkpoint.node.lease_ref:
                return checkpoint
            leased = leased or checkpoint
        return leased

    def _end(self, checkpoint: Checkpoint) -> None:
        self.num_unproven -= not checkpoint.is_proven
        checkpoint.node = None
        del self._by_use[checkpoint]
        self._free.append(checkpoint.slot)


def _holder(node: Node, position: int) -> Node:
    """The node on the path to `node` whose run has the token before `position`."""
    while node.start >= position:
        assert node.parent is not None, f"position {position} is not on the path"
        node = node.parent
    assert position <= node.end, f"{node} ends before position {position}"
    return node


def _upwards(node: Node | None) -> Iterator[Node]:
    while node is not None:
        yield node
        node = node.parent
