"""Recurrent state beside the KV: which slots of the state pool requests and checkpoints have.

    tokens   0 ..... checkpoint ......... matched ....... known
    KV       |       cached, read        |    computed    |
    state    | copied |        computed, token by token    |

A running request has one live slot, which its tokens change. Its prompt is cut where others may go
on: at branches (where its KV was cached and its state was not), at places that its program knows to
be shared, and every `interval` tokens; there the live state is copied to a checkpoint of the tree.
When it ends, or is preempted, its live slot becomes a checkpoint itself.

A request begins at the last checkpoint of what it shares. Tokens between that and the end of the
cached KV are *replayed*: computed for their state, their KV is not written again.

With a host tier the pool has more slots, which are the host's; its tree has the checkpoints there.
A checkpoint that leaves the device is copied to one, as is the KV at its position. It does not come
back: who goes on from it copies it into the live slot, as from any other.

A row with drafts leaves the state behind what is no draft. Once it is known how many were right,
the live state is to move on behind those: the next plan does that first (`accepts`).

With a store (stored_prefixes.py), checkpoints are also made where its blocks end, next before the
places above and the prompt's end, and saved with what a request has computed. A state that comes
from there is made a checkpoint of the device.

Copies are collected for the next plan: `loads` are made in order before its rows, `saves` behind
them, between all tiers' slots. A slot that is given away while a copy from it is pending is written
later in that order, so nobody has to hold it. No plan is made while one is in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ....errors import OutOfPages
from ....radix.checkpoints import Checkpoint, Checkpoints
from ....radix.tree import Node, RadixTree
from ...memory.copies import SlotCopy, StateCopy, StateRestore, StateSave
from ...memory.disk.block_file import Payload
from ..request import Request
from .tiers import HostTier


@dataclass(frozen=True, slots=True)
class StateOptions:
    """Of a model with recurrent layers."""

    num_slots: int  # of the device, without slot 0: live ones and checkpoints
    interval: int  # tokens of a prompt between two checkpoints, at most
    num_host_slots: int = 0  # behind those, where there is a host tier
    block_tokens: int = 0  # where there is a store: of its blocks


class StateCopies(NamedTuple):
    """Of a plan. `accepts`: see `StepPlan`. `written`: checkpoints, on any tier, that its accepts
    and loads write; gone if the plan fails."""

    accepts: tuple[tuple[int, int], ...] = ()
    loads: tuple[StateCopy, ...] = ()
    saves: tuple[SlotCopy, ...] = ()
    written: tuple[Checkpoint, ...] = ()


NO_COPIES = StateCopies()


class StateCache:
    """Owns the pool's slots, and the copies that the next plan is to make.

    Invariant: a running request has a live slot, whose state is that of its first
    `num_computed_tokens` tokens once the pending accepts and loads are made.
    """

    def __init__(
        self,
        tree: RadixTree,
        options: StateOptions,
        host: HostTier | None = None,
        on_evict: Callable[[Checkpoint], None] | None = None,
    ) -> None:
        """`on_evict` is called with a checkpoint that is about to leave the device's tree for
        another one; it may `store` it."""
        page_size = tree.page_size
        first_of_host = 1 + options.num_slots
        self.checkpoints = tree.checkpoints = Checkpoints(range(1, first_of_host))
        self.host: Checkpoints | None = None
        if host is not None:
            of_host = range(first_of_host, first_of_host + options.num_host_slots)
            self.host = host.tree.checkpoints = Checkpoints(of_host)
        self.interval = max(1, options.interval // page_size) * page_size
        self._tree = tree
        self._host_tier = host
        self._block_tokens = options.block_tokens
        self._on_evict = on_evict
        self._accepts: dict[int, int] = {}  # by slot
        self._loads: list[StateCopy] = []
        self._saves: list[SlotCopy] = []
        self._written: list[Checkpoint] = []
        self.num_replayed_tokens = 0  # since the start: computed though their KV was cached
        self.num_stored = 0  # since the start: states copied to the host
        self.num_loaded = 0  # and gone on from there

    def begin(self, request: Request) -> int:
        """Give an attached request its live slot, with the state at which it begins; returns how
        many of its tokens need not be computed. Raises OutOfPages if there is no slot."""
        node = request.node
        assert node is not None
        found = self.checkpoints.last(node)
        if found is not None:
            self.checkpoints.use(found)
        slot = self._allocate(keep=found)
        if slot is None:  # the one that it begins with is the last: it becomes the live one
            slot = self._allocate()
        if slot is None:
            raise OutOfPages("no slot for a recurrent state is free")
        request.state_slot = slot
        done = 0 if found is None else found.position
        on_host = self._on_host(request, node.end)
        if on_host is not None and on_host.position > done:
            self._use_on_host(on_host, request)
            found, done = on_host, on_host.position
        if found is not None and found.slot != slot:
            self._loads.append((found.slot, slot))
        known = max(node.end, self._num_on_host(request))
        request.branch_at = known if known > done else 0
        self.num_replayed_tokens += node.end - done
        return done

    def best(self, request: Request) -> int:
        """Where an attached request would begin."""
        node = request.node
        assert node is not None
        found = self.checkpoints.last(node)
        here = 0 if found is None else found.position
        on_host = self._on_host(request, node.end)
        return here if on_host is None else max(here, on_host.position)

    def known(self, request: Request) -> int:
        """Where a request that is not attached would begin, on any tier."""
        root, limit = self._tree.roots.get(request.namespace), request.match_limit
        here = None
        if root is not None:
            path, end = self._tree.descend(root, request.token_ids[:limit])
            here = self.checkpoints.deepest(reversed(path), end)
        found = (here, self._on_host(request, limit))
        return max((state.position for state in found if state is not None), default=0)

    def must_wait(self, request: Request) -> bool:
        """Whether the step being computed, or planned, makes a checkpoint at which a waiting
        request would begin."""
        root = self._tree.roots.get(request.namespace)
        if root is None or not self.checkpoints.num_unproven:
            return False
        path, end = self._tree.descend(root, request.token_ids[: request.match_limit])
        found = self.checkpoints.deepest(reversed(path), end)
        return found is not None and not found.is_proven

    def cut(self, request: Request, num_tokens: int) -> int:
        """At most `num_tokens` of a request's next ones, no further than where a checkpoint is
        wanted."""
        start = request.num_scheduled_tokens
        end = min([start + num_tokens, *self._wanted(request, start)])
        return end - start

    def save(self, request: Request, end: int) -> Checkpoint | None:
        """Make a checkpoint of what a row computes of a prompt, if it ends where one is wanted and
        there is a slot for it; unproven until the step is done."""
        node, start = request.node, request.num_scheduled_tokens
        if node is None or end > request.num_published or end not in self._wanted(request, start):
            return None
        if self.checkpoints.has(node, end):
            return None
        slot = self._allocate()
        if slot is None:
            return None
        checkpoint = self.checkpoints.add(node, end, slot, is_proven=False)
        assert checkpoint is not None
        self._saves.append((request.state_slot, slot))
        return checkpoint

    def accept_drafts(self, request: Request, num_right: int) -> None:
        """Of the drafts of a running request's row the first `num_right` were right."""
        if num_right:
            self._accepts[request.state_slot] = num_right

    def keep_live(self, request: Request) -> None:
        """Make a checkpoint of where a running request stands, for others to go on from; its whole
        pages are published. No plan in flight names it."""
        node, position = request.node, request.num_computed_tokens
        if node is None or position != node.end:
            return
        slot = self._allocate()
        if slot is None:
            return
        checkpoint = self.checkpoints.add(node, position, slot)
        if checkpoint is None:
            self.checkpoints.free(slot)
            return
        self._loads.append((request.state_slot, slot))
        self._written.append(checkpoint)

    def copy_live(self, request: Request, source: Request) -> None:
        """Let a running request without a slot go on from where another one stands."""
        slot = self._allocate()
        assert slot is not None, "it has just given one back"
        request.state_slot = slot
        self._loads.append((source.state_slot, slot))

    def hand_over(self, node: Node, position: int, slot: int) -> bool:
        """Make a live slot the checkpoint at `position` on the path to `node`; whether it is."""
        targets = (copy[1] for copy in self._loads if not isinstance(copy, StateSave))
        is_loaded = all(target != slot for target in targets)
        if not (is_loaded and 0 < position <= node.end):
            return False
        checkpoint = self.checkpoints.add(node, position, slot)
        if checkpoint is not None and slot in self._accepts:
            self._written.append(checkpoint)
        return checkpoint is not None

    def store(self, checkpoint: Checkpoint, namespace: Hashable, token_ids: Sequence[int]) -> None:
        """Copy a checkpoint of the device to the host, which has the KV of the tokens before it;
        the states used least make room."""
        assert self.host is not None and self._host_tier is not None, "there is no host tier"
        position = checkpoint.position
        node = self._host_tier.tree.match(namespace, token_ids[:position]).node
        assert node.end == position, "the host has less than that"
        if node.checkpoints is not None and position in node.checkpoints:
            self.host.use(node.checkpoints[position])
            return
        slot = self.host.allocate()
        if slot is not None:
            stored = self.host.add(node, position, slot)
            assert stored is not None, "the position has none"
            self._loads.append((checkpoint.slot, slot))
            self._written.append(stored)
            self.num_stored += 1

    def restore(self, node: Node, position: int, payload: Payload) -> None:
        """Make what a store has kept the checkpoint at a position on the path to a node, if there
        is a slot."""
        slot = self._allocate()
        if slot is None:
            return
        checkpoint = self.checkpoints.add(node, position, slot)
        if checkpoint is None:
            self.checkpoints.free(slot)
            return
        self._loads.append(StateRestore(payload, slot))
        self._written.append(checkpoint)

    def save_blocks(self, saves: Iterable[StateSave]) -> None:
        """Have the next plan copy checkpoints out."""
        self._loads.extend(saves)

    @property
    def has_saves(self) -> bool:
        """Whether the next plan copies any out, which is worth a plan."""
        return any(isinstance(copy, StateSave) for copy in self._loads)

    def take_copies(self) -> StateCopies:
        """The copies of the plan that is being made."""
        if not (self._accepts or self._loads or self._saves):
            return NO_COPIES
        accepts, written = tuple(self._accepts.items()), tuple(self._written)
        copies = StateCopies(accepts, tuple(self._loads), tuple(self._saves), written)
        self._accepts.clear()
        self._loads.clear()
        self._saves.clear()
        self._written.clear()
        return copies

    def settle(self, checkpoint: Checkpoint, is_written: bool) -> None:
        """The step that was to write a checkpoint is done."""
        if is_written:
            self.checkpoints.prove(checkpoint)
        else:
            self.checkpoints.drop(checkpoint)

    def drop(self, checkpoints: Iterable[Checkpoint | None]) -> None:
        """These have not been written."""
        for checkpoint in checkpoints:
            if checkpoint is not None and checkpoint.slot in self.checkpoints.slots:
                self.checkpoints.drop(checkpoint)
            elif checkpoint is not None and self.host is not None:
                self.host.drop(checkpoint)

    def describe(self) -> dict[str, int]:
        """Slots and counts as plain data."""
        slots, host = self.checkpoints, self.host
        return {
            "num_slots": len(slots.slots),
            "num_checkpoints": len(slots),
            "num_free": slots.num_free,
            "interval_tokens": self.interval,
            "num_evicted": slots.num_evicted,
            "num_replayed_tokens": self.num_replayed_tokens,
            "num_host_slots": 0 if host is None else len(host.slots),
            "num_host_checkpoints": 0 if host is None else len(host),
            "num_stored": self.num_stored,
            "num_loaded": self.num_loaded,
        }

    def _allocate(self, keep: Checkpoint | None = None) -> int | None:
        return self.checkpoints.allocate(keep, self._on_evict)

    def _on_host(self, request: Request, limit: int) -> Checkpoint | None:
        """The last checkpoint there of at most `limit` of its tokens."""
        tier = self._host_tier
        return (
            None if tier is None else tier.last_state(request.namespace, request.token_ids, limit)
        )

    def _use_on_host(self, checkpoint: Checkpoint, request: Request) -> None:
        assert self.host is not None and self._host_tier is not None
        self._host_tier.tree.match(request.namespace, request.token_ids, checkpoint.position)
        self.host.use(checkpoint)
        self.num_loaded += 1

    def _num_on_host(self, request: Request) -> int:
        """How many of its tokens have their KV there."""
        if self._host_tier is None:
            return 0
        tree, limit = self._host_tier.tree, request.match_limit
        return tree.match_length(request.namespace, request.token_ids, limit)

    def _wanted(self, request: Request, start: int) -> list[int]:
        """Positions behind `start` and within the prompt where its state is to be kept."""
        page_size, num_prompt = self._tree.page_size, len(request.prompt)
        wanted = [request.branch_at, *request.shared_ends]
        if request.scoring is not None:
            wanted.append(request.scoring.start)
        regular = (start // self.interval + 1) * self.interval
        if num_prompt - regular >= self.interval // 2:  # a step for a few tokens is not worth it
            wanted.append(regular)
        ends = [position - position % page_size for position in wanted]
        found = [position for position in ends if start < position < num_prompt]
        if size := self._block_tokens:
            blocks = [position - position % size for position in (*wanted, num_prompt)]
            found += [position for position in blocks if position > start]
        return found
