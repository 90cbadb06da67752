"""How layers are divided between the processes that hold a model together (tensor parallelism),
and which of them divide a step's tokens (context parallelism).

A linear layer divided by its outputs is followed by one divided by its inputs, whose partial
results are summed over the ranks: one sum a block (Shoeybi et al. 2019, Megatron-LM). What cannot
be divided is computed by every rank as a whole, with the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ....kernels.context_share import ALL_TOKENS, PageShare, TokenShare
from ...checkpoint.config.model_config import ModelConfig
from ...checkpoint.parts import Range
from .expert_placement import ONE_GROUP, ExpertGroups

if TYPE_CHECKING:
    from torch import Tensor

    from ....kernels.ops import Communicator

# Sizes of which ranks take multiples where they can, so that numbers which share a scale stay
# together (256: llama.cpp's K formats).
_UNITS = (256, 128, 64, 32, 16, 8, 4, 2, 1)
_LEAST_UNITS = 8  # a rank; with fewer of a size, one may have an eighth more than another


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those that hold a model together: of `num_ranks` each has a part of the
    layers; `context` joins those that have the same part, and other tokens.

        rank 0    rank 1
        rank 2    rank 3     two of `--tp-size` in a row, two of `--cp-size` one below the other
    """

    rank: int = 0  # in a row
    num_ranks: int = 1
    communicator: Communicator | None = None  # None: the only one
    # Logits are gathered, so that each rank draws by itself, as a GPU's kernels do; else ranks draw
    # together, each over its share of the vocabulary.
    gathers_logits: bool = False
    # Each has a share of a step's tokens and of the KV (kernels/context_share.py); None: all are
    # here.
    context: Communicator | None = None
    # Of those of the context where there are any; their count divides that of these.
    expert_groups: ExpertGroups = ONE_GROUP

    def share(self, size: int) -> Range | None:
        """This rank's part of [0, size), in its order, about the same for all; None: all of it."""
        if self.num_ranks == 1 or size < self.num_ranks:
            return None
        unit = next(unit for unit in _UNITS if self._fits(size, unit))
        num_units = -(-size // unit)
        bounds = (num_units * rank // self.num_ranks for rank in (self.rank, self.rank + 1))
        first, end = (min(size, bound * unit) for bound in bounds)
        return first, end

    def _fits(self, size: int, unit: int) -> bool:
        is_even = size % (unit * self.num_ranks) == 0
        return unit == 1 or is_even or size >= unit * self.num_ranks * _LEAST_UNITS

    def sum(self, x: Tensor) -> Tensor:
        """x: contiguous, changed IN PLACE to the sum over the ranks."""
        if self.communicator is not None:
            self.communicator.all_reduce(x)
        return x

    @property
    def pages(self) -> PageShare | None:
        """The KV pages that are here; None: all."""
        if self.context is None:
            return None
        return PageShare(self.context.rank, self.context.num_ranks)

    def tokens(self, num_tokens: int) -> TokenShare:
        """This rank's share of a step."""
        return ALL_TOKENS if self.context is None else TokenShare(num_tokens, self.context)

    @property
    def communicators(self) -> Sequence[Communicator]:
        """Which this process has; through both it hears of all."""
        return [each for each in (self.communicator, self.context) if each is not None]

    def check(self) -> None:
        """Raises RankLost where sums came to nothing: another rank has ended."""
        for each in self.communicators:
            each.check()

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers. All call it together."""
        for each in self.communicators:
            number = int(each.all_gather(np.array(number)).min())
        return number

    def of_first(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The first rank's numbers. All call it together, with the same shape."""
        for each in self.communicators:
            numbers = each.all_gather(numbers)[0]
        return numbers

    def agree(self, flag: bool) -> bool:
        """Whether all ranks say so. All call it together."""
        return bool(self.least(flag))


ALONE = Ranks()


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The attention heads of a rank."""

    heads: Range
    kv_heads: Range  # those that its queries read; two ranks may have the same one
    is_divided: bool  # False: all of them

    @property
    def num_heads(self) -> int:
        return self.heads[1] - self.heads[0]

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads[1] - self.kv_heads[0]

    def numbers(self, size: int) -> Range:
        """Of all query heads' numbers, `size` a head, this rank's."""
        return self.heads[0] * size, self.heads[1] * size

    def kv_numbers(self, size: int) -> Range:
        """The same of KV heads."""
        return self.kv_heads[0] * size, self.kv_heads[1] * size


def head_share(config: ModelConfig, ranks: Ranks) -> HeadShare:
    """This rank's heads: all of them where they cannot be divided."""
    count, num_heads, num_kv_heads = ranks.num_ranks, config.num_heads, config.num_kv_heads
    is_whole = config.varied is not None or config.query_key_norm == "whole"
    fits_kv = config.latent is not None or not (num_kv_heads % count and count % num_kv_heads)
    if count == 1 or is_whole or num_heads % count or not fits_kv:
        return HeadShare((0, num_heads), (0, num_kv_heads), False)
    each = num_heads // count
    first = ranks.rank * each
    if config.latent is not None:
        return HeadShare((first, first + each), (0, num_kv_heads), True)
    group = num_heads // num_kv_heads  # heads that read one KV head
    return HeadShare((first, first + each), (first // group, -(-(first + each) // group)), True)
