"""How GGUF orders the heads of the gated delta rule (Qwen3-Next, Qwen3.5). Torch-free.

Hugging Face has the value heads of a key head side by side. llama.cpp repeats keys in turn, so that
Qwen3.5's files have the first value head of every key head, then the second of each, and so on.
Qwen3-Next's queries, keys, values and gates, together for each key head, are sorted by kind.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .hyperparameters import Hyperparameters


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Numbers and sizes of heads."""

    num_keys: int
    num_values: int
    key_dim: int
    value_dim: int

    @classmethod
    def of(cls, model: Hyperparameters) -> DeltaHeads:
        """Raises ModelLoadError for heads that cannot be."""
        num_keys, num_values = model.integer("ssm.group_count"), model.integer("ssm.time_step_rank")
        size = model.integer("ssm.inner_size")
        if num_values % num_keys:
            raise model.fail("ssm.time_step_rank", f"a multiple of ssm.group_count={num_keys}")
        if size % num_values:
            raise model.fail("ssm.inner_size", f"a multiple of ssm.time_step_rank={num_values}")
        return cls(num_keys, num_values, model.integer("ssm.state_size"), size // num_values)

    @property
    def num_before_values(self) -> int:
        """Rows of queries and keys."""
        return 2 * self.num_keys * self.key_dim

    def value_places(
        self, num_rows: int, *, first: int = 0, size: int | None = None
    ) -> NDArray[np.int64]:
        """Where rows of value heads in turn belong; `first`: rows before them, which stay; `size`:
        rows of a head (default: value_dim)."""
        size = self.value_dim if size is None else size
        places = np.arange(self.num_values * size).reshape(self.num_keys, -1, size)
        in_turn = places.transpose(1, 0, 2).ravel()
        found: NDArray[np.int64] = np.concatenate((np.arange(first), first + in_turn))[:num_rows]
        return found

    def qkv_places(self, num_rows: int) -> NDArray[np.int64]:
        """Where rows of all queries, keys and values belong among those of in_proj_qkvz."""
        key_dim = self.key_dim
        return self._by_head((0, key_dim), (key_dim, key_dim), (2 * key_dim, self._share))

    def gate_places(self, num_rows: int) -> NDArray[np.int64]:
        """The same of the gates."""
        return self._by_head((2 * self.key_dim + self._share, self._share))

    @property
    def _share(self) -> int:
        """Rows of a key head's values."""
        return self.num_values // self.num_keys * self.value_dim

    def _by_head(self, *parts: tuple[int, int]) -> NDArray[np.int64]:
        """parts: the first row within a key head's, and how many."""
        heads = np.arange(self.num_keys)[:, None] * (2 * self.key_dim + 2 * self._share)
        return np.concatenate([(heads + first + np.arange(size)).ravel() for first, size in parts])
