"""How many engines there are, and who decides which one a program runs on."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InvalidRequest
from ..flags import flag, integer, misfits
from .placement.policies import DEFAULT_PLACEMENT, PLACEMENTS

MAX_REPLICAS = 256


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Of one router. Raises InvalidRequest for values out of range."""

    replicas: int = flag(
        1, "engines of this machine, behind one address; they share its cores and memory",
        integer(1, MAX_REPLICAS), heading="Many engines", metavar="N",
    )  # fmt: skip
    placement: str = flag(DEFAULT_PLACEMENT, "which engine a program runs on", choices=PLACEMENTS)

    def __post_init__(self) -> None:
        """Check each value."""
        for misfit in misfits(self):
            raise InvalidRequest.of(*misfit)
