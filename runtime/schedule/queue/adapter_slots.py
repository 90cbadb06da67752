"""Which adapters are on the device, and which waiting requests may have a slot for theirs.

The device has a fixed number of slots; the least recently used one is filled anew first (as S-LoRA
and Punica serve more adapters than memory holds). A slot is filled from the host's memory when a
request that needs the adapter is admitted, between two steps.

In a round of admission, requests without an adapter, and those whose adapter is on the device, may
always be admitted; the others while a slot is free or may be filled anew. So what waits for a slot
is known by its adapter alone, and is not looked at request by request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from ...checkpoint.lora.adapter import Adapter
from ..request import Request

LoadAdapter = Callable[[int, Adapter], None]
"""Fill a slot, numbered from 1, on the device."""

Group = str | None
"""The requests of one adapter, by its revision; None: those without."""


class AdapterSlots:
    """Owns the slots 1 to `num_slots`; slot 0 in a plan means no adapter.

    Invariant: a slot that running requests use keeps its adapter, and an adapter has one slot at
    most. Adapters are told apart by what they are, not by their names.
    """

    def __init__(self, num_slots: int, load: LoadAdapter) -> None:
        self._load = load
        self._free = list(range(num_slots, 0, -1))
        self._slots: OrderedDict[str, int] = OrderedDict()  # by revision, the last used one last
        self._num_users: dict[str, int] = {}  # running requests, by revision
        self.num_slots = num_slots
        self.num_loads = 0
        self.num_evictions = 0

    @property
    def on_device(self) -> Collection[str]:
        """The revisions of the adapters that have a slot."""
        return self._slots.keys()

    @property
    def has_free(self) -> bool:
        """Whether there is a slot for an adapter that has none."""
        return bool(self._free) or len(self._num_users) < len(self._slots)

    def has_room(self, revision: str) -> bool:
        """Whether `acquire` would find a slot for the adapter of this revision."""
        return revision in self._slots or self.has_free

    def acquire(self, adapter: Adapter) -> int:
        """The adapter's slot for one more running request, filled where it was not on the
        device."""
        revision = adapter.revision
        if revision not in self._slots:
            self._fill(adapter)
        self._slots.move_to_end(revision)
        self._num_users[revision] = self._num_users.get(revision, 0) + 1
        return self._slots[revision]

    def release(self, adapter: Adapter) -> None:
        """A running request has ended or was preempted; its adapter stays while there is room."""
        revision = adapter.revision
        self._num_users[revision] -= 1
        if not self._num_users[revision]:
            del self._num_users[revision]

    def _fill(self, adapter: Adapter) -> None:
        if not self._free:
            unused = next(r for r in self._slots if r not in self._num_users)
            self._free.append(self._slots.pop(unused))
            self.num_evictions += 1
        slot = self._free[-1]
        self._load(slot, adapter)
        self.num_loads += 1
        self._slots[adapter.revision] = self._free.pop()

    def check(self, running: Sequence[Adapter]) -> None:
        """Raises when slots or users do not add up (tests)."""
        slots = sorted([*self._slots.values(), *self._free])
        assert slots == list(range(1, self.num_slots + 1)), (
            f"a slot is lost or owned twice: {slots}"
        )
        users: dict[str, int] = {}
        for adapter in running:
            users[adapter.revision] = users.get(adapter.revision, 0) + 1
        assert users == self._num_users, f"{self._num_users} users, {users} are running"
        assert not users.keys() - self._slots.keys(), "an adapter in use is not on the device"

    def describe(self) -> dict[str, Any]:
        """Counters as plain data."""
        return {
            "num_slots": self.num_slots,
            "num_on_device": len(self._slots),
            "num_in_use": len(self._num_users),
            "num_loads": self.num_loads,
            "num_evictions": self.num_evictions,
        }


class AdapterAdmission:
    """Which requests may have a slot in a round of admission.

    Invariant: within a round it closes for a group at most once, and opens for none."""

    def __init__(self, slots: AdapterSlots | None = None) -> None:
        """`slots` None: no request has an adapter."""
        self._slots = slots
        self._is_held = False

    def begin_round(self) -> None:
        """A new one."""
        self._is_held = False

    def hold(self) -> None:
        """One that nobody may overtake waits for a slot: no other is taken until running requests
        have freed one."""
        self._is_held = True

    def admits(self, group: Group) -> bool:
        """Whether a request of this group would have a slot, or needs none."""
        if group is None:
            return True
        assert self._slots is not None, "an adapter where none are served"
        return not self._is_held and self._slots.has_room(group)

    def among(self, groups: Collection[Group]) -> Iterator[Group]:
        """Those that are let in. Where no slot is free it costs as much as there are slots, however
        many groups there are."""
        if None in groups:
            yield None
        if self._slots is None or self._is_held:
            return
        if self._slots.has_free:
            yield from (group for group in groups if group is not None)
        else:
            yield from (group for group in self._slots.on_device if group in groups)


def group_of(request: Request) -> Group:
    """Which group a request is of."""
    return None if request.adapter is None else request.adapter.revision
