"""Which waiting requests may have a slot for their adapter on the device, in a round of admission.

Those without an adapter, and those whose adapter is on the device, always; the others while a slot
is free or may be filled anew. So what waits for a slot is known by its adapter alone, and is not
looked at request by request.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ..request import Request
from .adapter_slots import AdapterSlots

Group = str | None
"""The requests of one adapter, by its revision; None: those without."""


def group_of(request: Request) -> Group:
    """Which group a request is of."""
    return None if request.adapter is None else request.adapter.revision


class AdapterAdmission:
    """Invariant: within a round it closes for a group at most once, and opens for none."""

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
