"""What crosses to a device and back: aligned, in one copy, and never overwritten too early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stemma.runtime.execute.accelerator import InterpretedAccelerator
from stemma.runtime.execute.graphs import graph_sizes
from stemma.runtime.execute.staging import ALIGNMENT, ReadBack, Staging, fields_of

DTYPES = (np.int64, np.int32, np.float64, np.float32, np.bool_, np.uint8)


class LateAccelerator(InterpretedAccelerator):
    """Copies are made when somebody waits for a moment after them, as late as a device may."""

    def __init__(self) -> None:
        super().__init__()
        self.late: list[Callable[[], object]] = []
        self.num_copies = 0
        self.num_waits = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.num_copies += 1
        self.late.append(lambda: target.copy_(source))

    def event(self) -> Any:
        return LateEvent(self, self.num_copies)


class LateEvent:
    def __init__(self, accelerator: LateAccelerator, after: int) -> None:
        self.accelerator, self.after = accelerator, after

    def wait(self) -> None:
        late = self.accelerator.late
        self.accelerator.num_waits += 1
        for index in range(self.after):
            late[index]()
            late[index] = lambda: None


arrays = st.dictionaries(
    st.text("abc", min_size=1, max_size=3),
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), min_size=1, max_size=2)),
    max_size=6,
)


@given(st.lists(arrays, min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_arrays_arrive_as_they_were_each_at_an_aligned_place(
    steps: list[dict[str, Any]], random: Any
) -> None:
    accelerator = InterpretedAccelerator()
    staging = Staging(accelerator)
    for step in steps:
        written = {
            name: np.array(
                [random.randrange(2) for _ in range(int(np.prod(shape)))], dtype=dtype
            ).reshape(shape)
            for name, (dtype, shape) in step.items()
        }
        staged = staging.stage(written)
        assert [field.offset % ALIGNMENT for field in staged.fields.values()] == [0] * len(step)
        for name, array in written.items():
            assert staged[name].numpy().dtype == array.dtype
            assert np.array_equal(staged[name].numpy(), array)


def test_steps_that_begin_alike_are_laid_out_alike() -> None:
    first = {"ids": np.zeros(3, dtype=np.int64), "table": np.zeros((2, 3), dtype=np.int32)}
    more = {**first, "masks": np.zeros(7, dtype=np.uint8)}
    assert list(fields_of(more).items())[:2] == list(fields_of(first).items())


def test_a_step_is_one_copy_and_no_buffer_is_written_before_its_copy_is_done() -> None:
    accelerator = LateAccelerator()
    staging = Staging(accelerator)
    staged = [staging.stage({"ids": np.full(4, step)}) for step in range(2)]
    assert accelerator.num_copies == 2 and accelerator.num_waits == 0
    staged.append(staging.stage({"ids": np.full(4, 2)}))
    assert accelerator.num_waits == 1, "the first buffer was written while its copy was pending"
    accelerator.event().wait()
    assert [step["ids"].tolist() for step in staged] == [[step] * 4 for step in range(3)]


def test_a_buffer_that_has_to_grow_leaves_the_pending_copy_alone() -> None:
    accelerator = LateAccelerator()
    staging = Staging(accelerator, num_buffers=1)
    small = staging.stage({"ids": np.full(2, 7)})
    large = staging.stage({"ids": np.full(1000, 8)})
    accelerator.event().wait()
    assert small["ids"].tolist() == [7, 7] and large["ids"].unique().tolist() == [8]


def test_answers_are_those_at_the_time_of_the_copy_and_read_after_a_wait() -> None:
    accelerator = LateAccelerator()
    ids, finite = torch.tensor([3, 1 << 40]), torch.tensor([True, False])
    answers = ReadBack(accelerator, {"ids": ids, "finite": finite, "sums": torch.ones(2, 3)})
    assert accelerator.num_waits == 0
    read = answers.arrays()
    assert read["ids"].tolist() == [3, 1 << 40] and read["finite"].tolist() == [True, False]
    assert read["sums"].shape == (2, 3)


@pytest.mark.parametrize("max_tokens", [1, 3, 4, 5, 8, 100, 256, 257, 512, 2048, 5000])
def test_every_step_up_to_the_limit_fits_a_size_with_little_padding(max_tokens: int) -> None:
    sizes = graph_sizes(max_tokens)
    assert list(sizes) == sorted(set(sizes)) and max_tokens <= sizes[-1] < max_tokens + 8
    for num_tokens in range(1, max_tokens + 1):
        size = next(size for size in sizes if size >= num_tokens)
        assert size - num_tokens < max(8, num_tokens / 7 + 1)
    assert len(sizes) <= 43 or max_tokens > 512


def test_no_sizes_where_nothing_is_captured() -> None:
    assert graph_sizes(0) == ()
