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

A row with drafts leaves the state behind what is no draft. Once it is known how many were right,
the live state is to move on behind those: the next plan does that first (`accepts`).

Copies are collected for the next plan: `loads` are made in order before its rows, `saves` behind
them. A slot that is given away while a copy from it is pending is written later in that order, so
nobody has to hold it. No plan is made while one is in flight.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ....errors import OutOfPages
from ....radix.checkpoints import Checkpoint, Checkpoints
from ....radix.tree import Node, RadixTree
from ..request import Request

SlotCopy = tuple[int, int]  # from, to


@dataclass(frozen=True, slots=True)
class StateOptions:
    """Of a model with recurrent layers."""

    num_slots: int  # of the pool, without slot 0: live ones and checkpoints
    interval: int  # tokens of a prompt between two checkpoints, at most


class StateCopies(NamedTuple):
    """Of a plan. `accepts`: see `StepPlan`. `written`: checkpoints that its accepts and loads
    write; gone if the plan fails."""

    accepts: tuple[tuple[int, int], ...] = ()
    loads: tuple[SlotCopy, ...] = ()
    saves: tuple[SlotCopy, ...] = ()
    written: tuple[Checkpoint, ...] = ()


NO_COPIES = StateCopies()


class StateCache:
    """Owns the pool's slots, and the copies that the next plan is to make.

    Invariant: a running request has a live slot, whose state is that of its first
    `num_computed_tokens` tokens once the pending accepts and loads are made.
    """

    def __init__(self, tree: RadixTree, options: StateOptions) -> None:
        page_size = tree.page_size
        self.checkpoints = tree.checkpoints = Checkpoints(options.num_slots)
        self.interval = max(1, options.interval // page_size) * page_size
        self._tree = tree
        self._accepts: dict[int, int] = {}  # by slot
        self._loads: list[SlotCopy] = []
        self._saves: list[SlotCopy] = []
        self._written: list[Checkpoint] = []
        self.num_replayed_tokens = 0  # since the start: computed though their KV was cached

    def begin(self, request: Request) -> int:
        """How many tokens of an attached request need not be computed."""
        node = request.node
        assert node is not None
        found = self.checkpoints.use(node)
        request.checkpoint = found
        done = 0 if found is None else found.position
        request.branch_at = node.end if node.end > done else 0
        return done

    def must_wait(self, request: Request) -> bool:
        """Whether the step being computed, or planned, makes a checkpoint at which a waiting
        request would begin."""
        root = self._tree.roots.get(request.namespace)
        if root is None or not self.checkpoints.num_unproven:
            return False
        path, end = self._tree.descend(root, request.token_ids[: request.match_limit])
        found = self.checkpoints.deepest(reversed(path), end)
        return found is not None and not found.is_proven

    def take_slot(self, request: Request) -> None:
        """Give an attached request its live slot, with the state at which it begins. Raises
        OutOfPages if there is none."""
        begin = request.checkpoint
        assert begin is None or begin.node is not None, "it was given up since it was found"
        slot = self.checkpoints.allocate(begin)
        if slot is None and begin is not None:  # no other is left: it becomes the live one
            self.checkpoints.drop(begin)
            slot = self.checkpoints.allocate()
        if slot is None:
            raise OutOfPages("no slot for a recurrent state is free")
        request.state_slot, request.checkpoint = slot, None
        if begin is not None and begin.slot != slot:
            self._loads.append((begin.slot, slot))
        self.num_replayed_tokens += request.num_published - request.num_computed_tokens

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
        slot = self.checkpoints.allocate()
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
        slot = self.checkpoints.allocate()
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
        slot = self.checkpoints.allocate()
        assert slot is not None, "it has just given one back"
        request.state_slot = slot
        self._loads.append((source.state_slot, slot))

    def hand_over(self, node: Node, position: int, slot: int) -> bool:
        """Make a live slot the checkpoint at `position` on the path to `node`; whether it is."""
        is_loaded = all(target != slot for _, target in self._loads)
        if not (is_loaded and 0 < position <= node.end):
            return False
        checkpoint = self.checkpoints.add(node, position, slot)
        if checkpoint is not None and slot in self._accepts:
            self._written.append(checkpoint)
        return checkpoint is not None

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
            if checkpoint is not None:
                self.checkpoints.drop(checkpoint)

    def describe(self) -> dict[str, int]:
        """Slots and counts as plain data."""
        slots = self.checkpoints
        return {
            "num_slots": slots.num_slots,
            "num_checkpoints": len(slots),
            "num_free": slots.num_free,
            "interval_tokens": self.interval,
            "num_evicted": slots.num_evicted,
            "num_replayed_tokens": self.num_replayed_tokens,
        }

    def _wanted(self, request: Request, start: int) -> list[int]:
        """Positions behind `start` and within the prompt where its state is to be kept."""
        page_size, num_prompt = self._tree.page_size, len(request.prompt)
        wanted = [request.branch_at, *request.shared_ends]
        if request.scoring is not None:
            wanted.append(request.scoring.start)
        regular = (start // self.interval + 1) * self.interval
        if num_prompt - regular >= self.interval // 2:  # a step for a few tokens is not worth it
            wanted.append(regular)
        wanted = [position - position % page_size for position in wanted]
        return [position for position in wanted if start < position < num_prompt]
