"""What a rank has of a step's tokens and of the sequences' KV where ranks divide the context
(context parallelism): the one rule for inputs, attention, pools and copies.

    tokens  0 .. num_own | num_own .. 2 * num_own | ... | T     consecutive, as many on each rank
    pages   id % num_ranks is the rank that has a page, id // num_ranks its id there

Whoever hands out pages knows nothing of it. Only what has a tensor loads torch: planning has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

    from .ops import Communicator


@dataclass(frozen=True, slots=True)
class TokenShare:
    """The tokens of a step that this rank computes: consecutive ones, the same number on all ranks.
    Where the step ends before them its last token is repeated, and the result is dropped."""

    num_tokens: int = 0  # T, of the step; not read where all are here
    communicator: Communicator | None = None  # None: all of them are here

    @property
    def num_own(self) -> int:
        """ceil(T / ranks), at least one."""
        assert self.communicator is not None, "the tokens are divided"
        return -(-self.num_tokens // self.communicator.num_ranks)

    def places(self) -> npt.NDArray[np.int64]:
        """[num_own], on the step's token axis."""
        assert self.communicator is not None, "the tokens are divided"
        first = self.communicator.rank * self.num_own
        own = np.arange(first, first + self.num_own, dtype=np.int64)
        return own.clip(max=self.num_tokens - 1)

    def take(self, x: Tensor) -> Tensor:
        """x [T, ...] -> this rank's [num_own, ...]; x itself where all are here."""
        if self.communicator is None:
            return x
        import torch

        return x[torch.from_numpy(self.places())]

    def gather(self, x: Tensor) -> Tensor:
        """x [num_own, ...] of each rank -> [T, ...]; one message. x itself where all are here."""
        if self.communicator is None:
            return x
        gathered = all_gather(self.communicator, x)
        return gathered.flatten(0, 1)[: self.num_tokens]

    def gather_together(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """`gather` of several of one dtype, in one message."""
        if self.communicator is None:
            return parts
        import torch

        together = self.gather(torch.cat([part.flatten(1) for part in parts], dim=1))
        split = torch.split(together, [part[0].numel() for part in parts], dim=1)
        return [own.reshape(-1, *part.shape[1:]) for own, part in zip(split, parts, strict=True)]


ALL_TOKENS = TokenShare()


@dataclass(frozen=True, slots=True)
class PageShare:
    """Which pages of the KV a rank has."""

    rank: int
    num_ranks: int

    def num_own(self, num_pages: int) -> int:
        """Of pages 0 to num_pages - 1, at most so many are on any rank."""
        return -(-num_pages // self.num_ranks)

    def is_own(self, pages: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Whether they are here."""
        own: npt.NDArray[np.bool_] = pages % self.num_ranks == self.rank
        return own

    def local(self, pages: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Ids within this rank's pool, of own ones; in their dtype."""
        return pages // self.num_ranks

    def slots(
        self, slots: npt.NDArray[np.int64], page_size: int, spare_slot: int
    ) -> npt.NDArray[np.int64]:
        """Slots of this rank's pool; `spare_slot` for what others have."""
        pages, offsets = np.divmod(slots, page_size)
        return np.where(self.is_own(pages), self.local(pages) * page_size + offsets, spare_slot)


def all_gather(communicator: Communicator, x: Tensor) -> Tensor:
    """x [...] on a CPU, of any dtype and the same shape on each rank -> [ranks, ...]."""
    import torch

    flat = x.contiguous().view(-1).view(torch.uint8)
    gathered = torch.from_numpy(communicator.all_gather(flat.numpy()))
    return gathered.view(x.dtype).view(-1, *x.shape)
