"""What the engine's process tells the others, which decide nothing: frames on their standard input.

The first frame is a `Place`; each one after it names a method of `ModelRunner`, with its arguments.
They carry orders out one after the other, and answer by what they exchange in steps alone.
"""

from __future__ import annotations

import pickle
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from ...piped_process import framed
from ..memory.copies import BlockRestore, StateRestore, TierCopy
from ..memory.disk.block_file import Payload
from ..schedule.plan import ImageSource, PageUpdate, Row, StepPlan
from ..schedule.sampling_params import SamplingParams
from .places import Place

_SENT_BEFORE = 0  # in place of sampling parameters
# From so many bytes on, those of a prompt: to deflate them takes a thousandth of its step.
_LARGE = 4096
_DEFLATED = 0x78  # how zlib begins, and a pickle does not
_NOTHING = np.empty(0, dtype=np.uint8)

Order = tuple[Any, ...]
"""A method's name, then its arguments."""

EXECUTE = "execute"  # whose argument is written by a `PlanWriter`


def frame(message: Place | Order, *, deflates: bool = True) -> bytes:
    """As it is written to a rank, which is a process of this package: pickled. deflates: what is
    large; KV would only take time."""
    payload = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    is_deflated = deflates and len(payload) >= _LARGE
    return framed(zlib.compress(payload, 1) if is_deflated else payload)


def message_of(payload: bytes) -> Any:
    """What `frame` was given."""
    return pickle.loads(zlib.decompress(payload) if payload[0] == _DEFLATED else payload)


def write_all(stream: IO[bytes], data: bytes) -> None:
    """To a stream without a buffer, which writes a part when a signal comes, or more than 2 GB."""
    left = memoryview(data)
    while left:
        left = left[stream.write(left) :]


@dataclass(frozen=True, slots=True)
class _ReadImage:
    """An `ImageSource` as it can be sent."""

    grid: tuple[int, int]
    values: npt.NDArray[np.float32] | None
    error: str  # where its bytes were no image after all

    @classmethod
    def of(cls, source: ImageSource) -> _ReadImage:
        try:
            return cls(source.grid, source.patches(), "")
        except Exception as error:
            return cls(source.grid, None, str(error))

    def patches(self) -> npt.NDArray[np.float32]:
        """See `ImageSource`."""
        if self.values is None:
            raise ValueError(self.error)
        return self.values


def num_blocks(plan: StepPlan) -> int:
    """That it copies into pages."""
    return sum(isinstance(each, BlockRestore) for each in plan.transfers)


def with_blocks(plan: StepPlan, payloads: Sequence[Payload]) -> StepPlan:
    """The plan with these in place of the blocks that it copies into pages."""
    if not payloads:
        return plan
    left = iter(payloads)
    transfers: tuple[TierCopy, ...] = tuple(
        each._replace(payload=next(left)) if isinstance(each, BlockRestore) else each
        for each in plan.transfers
    )
    return replace(plan, transfers=transfers)


class PlanWriter:
    """Plans as they are sent, one after the other, to readers that get all of them.

    What a step repeats is left out: the sampling parameters of a request are sent once, with the
    first of its rows, and known by its row of the page table from then on.
    """

    def __init__(self) -> None:
        self._sent: dict[int, SamplingParams] = {}  # by table row

    def frame(self, plan: StepPlan) -> bytes:
        """The order to execute it, without blocks: these cross in the step."""
        (common,) = self.frames(plan, [[_NOTHING] * num_blocks(plan)])
        return common

    def frames(self, plan: StepPlan, blocks: Sequence[Sequence[Payload]]) -> list[bytes]:
        """The order to execute it, one for each list of what is said of the blocks that it copies
        into pages."""
        rows = [self._written(row) for row in plan.rows]
        encodes = tuple(
            part if part.source is None else replace(part, source=_ReadImage.of(part.source))
            for part in plan.encodes
        )
        sent = replace(plan, rows=(), encodes=encodes)
        has_states = any(isinstance(each, StateRestore) for each in plan.state_loads)
        return [
            frame(
                (EXECUTE, with_blocks(sent, own), rows),
                deflates=not has_states and not any(each.size for each in own),
            )
            for own in blocks
        ]

    def _written(self, row: Row) -> tuple[Any, ...]:
        update, sampling = row.page_update, row.sampling
        if update is not None:
            pages = array("i", update.pages).tobytes()
            row = row._replace(page_update=(update.first, pages))  # type: ignore[arg-type]
        if sampling is not None:
            if self._sent.get(row.table_row) is sampling:
                row = row._replace(sampling=_SENT_BEFORE)  # type: ignore[arg-type]
            else:
                self._sent[row.table_row] = sampling
        return tuple(row)


class PlanReader:
    """The other side of a `PlanWriter`."""

    def __init__(self) -> None:
        self._known: dict[int, SamplingParams] = {}

    def plan(self, plan: StepPlan, rows: Sequence[tuple[Any, ...]]) -> StepPlan:
        """From the arguments of the order."""
        return replace(plan, rows=tuple(self._row(values) for values in rows))

    def _row(self, values: tuple[Any, ...]) -> Row:
        row = Row._make(values)
        if row.page_update is not None:
            first, written = row.page_update
            pages = array("i")
            pages.frombytes(written)  # type: ignore[arg-type]
            row = row._replace(page_update=PageUpdate(first, pages))
        sampling: object = row.sampling
        if sampling == _SENT_BEFORE:
            return row._replace(sampling=self._known[row.table_row])
        if row.sampling is not None:
            self._known[row.table_row] = row.sampling
        return row
