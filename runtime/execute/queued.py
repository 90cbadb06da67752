"""Steps that are queued on an accelerator: planned, copied there and launched, never waited for.

    host     | plan t | stage, launch t | plan t + 1 | stage, launch t + 1 | read t | plan t + 2 ...
    device            | copy | forward t | sample t  | copy | forward t + 1 | sample t + 1 ...
                                                ^ its tokens go back to pinned memory

A step's integers travel in one copy (staging.py). Small steps run as two recordings, forward and
sampling (graphs.py), larger ones launch by launch. What a step samples stays on the device, where
the next one finds it; `QueuedStep.result` reads what the host is to know. docs/gpu-execution.md.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...kernels.adjusted_rows import AdjustedRows
from ...kernels.ops import DevicePlan
from ...kernels.registry import Kernels
from ...kernels.sampling_rows import SamplingRows
from ...kernels.top_logprobs import top_logprobs
from ..memory.device_pool import DeviceKVPool
from ..memory.queued_transfer import QueuedKVTransfer
from ..models.registry import CausalLM
from ..sampling_params import SamplingParams
from ..step import PageUpdate, Row, StepPlan
from .accelerator import Accelerator
from .adjustments import adjusted_arrays, adjusted_rows
from .graphs import Graphs
from .inputs import ForwardBatch, StepInputBuilder, StepInputs, WantedLogits, wanted_logits
from .queued_step import QueuedStep, ReadBack
from .row_results import sampling_of
from .sampling_inputs import sampling_arrays
from .staging import Staged, Staging

log = logging.getLogger(__name__)

Arrays = dict[str, npt.NDArray[Any]]

# Of the device's staging buffer, beside the masks of a full batch: 512 tokens with their work lists
# are some 200 KB.
_STAGED_BYTES = 4 << 20
# Scored positions whose logits are in memory at once: 256 x 152k float32 is 155 MB.
_SCORED_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What bounds a step."""

    num_heads: int
    hidden_size: int
    vocab_size: int
    max_running_requests: int
    max_model_len: int
    max_graph_tokens: int


class QueuedSteps:
    """Queues plans one after the other. Borrows the model and the pool; owns the page table on the
    device, and what steps leave there for the next.

    Invariant: everything is queued on one stream, so a step finds what the one before has written.
    """

    can_overlap = True

    def __init__(
        self,
        model: CausalLM,
        kernels: Kernels,
        pool: DeviceKVPool,
        transfer: QueuedKVTransfer,
        accelerator: Accelerator,
        sizes: StepSizes,
    ) -> None:
        """pool: with a spare page, which padding writes to."""
        self._model = model
        self._kernels = kernels
        self._pool = pool
        self._kv_layers = pool.layers
        self._spare_slot = pool.num_pages * pool.page_size
        self._transfer = transfer
        self._accelerator = accelerator
        self._sizes = sizes
        self._inputs = StepInputBuilder(
            page_size=pool.page_size,
            max_running_requests=sizes.max_running_requests,
            max_model_len=sizes.max_model_len,
        )
        self.graphs = Graphs(accelerator, sizes.max_graph_tokens)
        max_rows, device = sizes.max_running_requests, accelerator.device
        mask_bytes = max_rows * (-(-sizes.vocab_size // 32)) * 4
        self._staging = Staging(accelerator, _STAGED_BYTES + mask_bytes)
        entries = self._inputs.page_table.entries
        self._page_table = torch.zeros(entries.shape, dtype=torch.int32, device=device)
        dtype = pool.layers[0].dtype
        num_hidden = self.graphs.sizes[-1] if self.graphs.sizes else 0
        self._hidden = torch.zeros(num_hidden, sizes.hidden_size, dtype=dtype, device=device)
        # By row of the plan before; what padding samples goes to the last place.
        self._previous = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        # Token ids, then whether each is a choice among finite logits.
        self._sampled = torch.zeros(2, max_rows, dtype=torch.int64, device=device)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> QueuedStep:
        """Queue the plan's copies between tiers and its computation."""
        with self._accelerator.queue():
            began = self._accelerator.event()
            copies = self._transfer.run(plan.transfers)
            moved = self._accelerator.event() if plan.transfers else began
            read_back = ReadBack(self._accelerator)
            wanted = self._queue_rows(plan, read_back) if plan.rows else None
            ended = self._accelerator.event()
        return QueuedStep(plan, wanted, copies, read_back, began, moved, ended)

    @property
    def is_interpreted(self) -> bool:
        """Whether kernels run in Triton's interpreter, where recording saves nothing."""
        return self._accelerator.is_interpreted

    def record_all(self) -> None:
        """Record every size of step that the pool and the batch allow.

        NOTE: writes to page 0 on; call it before any page is in use.
        """
        started = time.perf_counter()
        page_size, max_rows = self._pool.page_size, self._sizes.max_running_requests
        for size in self.graphs.sizes:
            if size <= min(max_rows, self._pool.num_pages):
                rows = tuple(_idle_row(row, row, 1) for row in range(size))
            elif size <= min(self._sizes.max_model_len, self._pool.num_pages * page_size):
                rows = (_idle_row(0, 0, size, -(-size // page_size)),)
            else:
                break
            self.submit(StepPlan(0, rows)).result()
        seconds = time.perf_counter() - started
        log.info("recorded %d CUDA graphs in %.1f s", len(self.graphs), seconds)

    def _queue_rows(self, plan: StepPlan, read_back: ReadBack) -> WantedLogits:
        inputs = self._inputs.build(plan)
        wanted = wanted_logits(plan, inputs.layout)
        rows = [plan.rows[index] for index in wanted.sampled_rows]
        padded = self.graphs.padded(inputs.layout.num_tokens)
        attention = self._kernels.plan_attention(
            inputs.attention, self._kv_layers[0], self._sizes.num_heads, padded_tokens=padded
        )
        arrays = self._sampling_arrays(rows, wanted)
        arrays |= self._token_arrays(inputs, padded)
        if isinstance(attention, DevicePlan):
            arrays |= {f"attention.{name}": array for name, array in attention.arrays.items()}
        can_record = isinstance(attention, DevicePlan) and self._staging.fits(arrays)
        arrays |= _page_arrays(plan.rows)
        arrays |= self._special_arrays(plan, rows, wanted)
        staged = self._staging.stage(arrays)

        if "page_updates" in arrays:
            self._kernels.update_pages(self._page_table, staged["page_updates"])
        if padded is not None and can_record:
            self.graphs.run(
                ("forward", padded), lambda: self._forward_into(padded, staged, attention)
            )
            hidden = self._hidden[: inputs.layout.num_tokens]
        else:
            hidden = self._forward(staged, attention)
            padded = None
        self._score(wanted, staged, hidden, read_back)
        for index, first, end in wanted.pooled:
            read_back.add(f"pooled.{index}", hidden[first:end].sum(dim=0, dtype=torch.float64))
        if rows:
            self._sample(rows, wanted, staged, hidden, padded, read_back)
        return wanted

    # --- what is copied ---------------------------------------------------------------------------

    def _sampling_arrays(self, rows: Sequence[Row], wanted: WantedLogits) -> Arrays:
        """For as many rows as there may be, so that all steps have these at the same places."""
        arrays: Arrays = {
            f"sampling.{name}": array
            for name, array in sampling_arrays(
                [sampling_of(row) for row in rows], wanted.sampled_positions
            ).items()
        }
        arrays["sampled_tokens"] = wanted.sampled_tokens
        max_rows = self._sizes.max_running_requests
        arrays = {name: _padded(array, max_rows, 0) for name, array in arrays.items()}
        sampled_rows = np.array(wanted.sampled_rows, dtype=np.int64)
        return {**arrays, "sampled_rows": _padded(sampled_rows, max_rows, max_rows)}

    def _token_arrays(self, inputs: StepInputs, padded: int | None) -> Arrays:
        num_tokens = inputs.layout.num_tokens
        sources = np.full(num_tokens, -1, dtype=np.int64)
        if inputs.sources:
            sources[list(inputs.sources)] = list(inputs.sources.values())
        size = num_tokens if padded is None else padded
        return {
            "token_ids": _padded(inputs.input_ids, size, 0),
            "sources": _padded(sources, size, -1),
            "positions": _padded(inputs.positions, size, 0),
            "slots": _padded(inputs.slots, size, self._spare_slot),
        }

    def _special_arrays(self, plan: StepPlan, rows: Sequence[Row], wanted: WantedLogits) -> Arrays:
        """Of rows that want more than a sampled token."""
        arrays: Arrays = {}
        adjusted = adjusted_rows(rows)
        if adjusted:
            of_rows = adjusted_arrays(adjusted, self._sizes.vocab_size)
            arrays |= {f"adjusted.{name}": array for name, array in of_rows.items()}
        if plan.masks is not None:
            masked = [place for place, row in enumerate(rows) if row.mask is not None]
            arrays["masked_rows"] = np.array(masked, dtype=np.int64)
            order = [rows[place].mask for place in masked]
            arrays["masks"] = plan.masks[order].view(np.int32)
        told = [place for place, row in enumerate(rows) if sampling_of(row).logprobs is not None]
        if told:
            arrays["told_rows"] = np.array(told, dtype=np.int64)
        if wanted.scored_rows:
            arrays["scored_tokens"] = wanted.scored_tokens
            arrays["target_ids"] = wanted.target_ids
        return arrays

    # --- what is computed -------------------------------------------------------------------------

    def _forward(self, staged: Staged, attention: object) -> Tensor:
        """-> hidden [T or padded, hidden_size]."""
        if isinstance(attention, DevicePlan):
            attention = attention.bind(staged.group("attention."), self._page_table)
        input_ids = self._kernels.take_inputs(
            staged["token_ids"], staged["sources"], self._previous
        )
        batch = ForwardBatch(
            input_ids=input_ids,
            positions=staged["positions"],
            slot_mapping=staged["slots"],
            kv_layers=self._kv_layers,
            attention=attention,
        )
        return self._model.forward(batch.input_ids, batch.positions, batch)

    def _forward_into(self, padded: int, staged: Staged, attention: object) -> None:
        self._hidden[:padded].copy_(self._forward(staged, attention))

    def _sample(
        self,
        rows: Sequence[Row],
        wanted: WantedLogits,
        staged: Staged,
        hidden: Tensor,
        padded: int | None,
        read_back: ReadBack,
    ) -> None:
        num_rows, size = len(rows), self.graphs.padded(len(rows))
        is_plain = not any(_is_special(row) for row in rows)
        if is_plain and padded is not None and size is not None:
            size = min(size, self._sizes.max_running_requests)
            self.graphs.run(
                ("sample", size),
                lambda: self._draw(self._logits(self._hidden, staged, size), staged),
            )
        else:
            logits = self._logits(hidden, staged, num_rows)
            told = self._told_before(staged, logits)
            self._adjust(staged, logits)
            self._draw(logits, staged)
            self._tell(rows, staged, told, read_back)
        read_back.add("sampled", self._sampled)

    def _logits(self, hidden: Tensor, staged: Staged, num_rows: int) -> Tensor:
        """[num_rows, vocab_size] of the first rows that sample."""
        return self._model.compute_logits(hidden[staged["sampled_tokens"][:num_rows]])

    def _draw(self, logits: Tensor, staged: Staged) -> None:
        """Sample, and leave the tokens for the next step and for the read-back."""
        num_rows = len(logits)
        rows = {name: array[:num_rows] for name, array in staged.group("sampling.").items()}
        token_ids, is_finite = self._kernels.sample(logits, SamplingRows(**rows))
        self._previous.index_copy_(0, staged["sampled_rows"][:num_rows], token_ids)
        self._sampled[0, :num_rows].copy_(token_ids)
        self._sampled[1, :num_rows].copy_(is_finite)

    def _adjust(self, staged: Staged, logits: Tensor) -> None:
        """Penalties, bias and masks, in place."""
        if "adjusted.place" in staged.fields:
            rows = AdjustedRows(**staged.group("adjusted."))
            self._kernels.adjust_logits(logits, rows, self._previous)
        if "masks" in staged.fields:
            self._kernels.apply_token_mask(logits, staged["masked_rows"], staged["masks"])

    def _told_before(self, staged: Staged, logits: Tensor) -> Tensor | None:
        """What the model itself says, of the rows that want logprobs: a copy of their logits."""
        return logits[staged["told_rows"]] if "told_rows" in staged.fields else None

    def _tell(
        self, rows: Sequence[Row], staged: Staged, logits: Tensor | None, read_back: ReadBack
    ) -> None:
        if logits is None:
            return
        chosen = self._sampled[0][staged["told_rows"]]
        read_back.add("logprobs", self._kernels.token_logprobs(logits, chosen))
        counts = [sampling_of(row).logprobs or 0 for row in rows]
        self._top(logits, max(counts), "top", read_back)

    def _score(
        self, wanted: WantedLogits, staged: Staged, hidden: Tensor, read_back: ReadBack
    ) -> None:
        """Log-probabilities of the targets, part by part."""
        for first in range(0, len(wanted.scored_tokens), _SCORED_AT_ONCE):
            part = slice(first, first + _SCORED_AT_ONCE)
            logits = self._model.compute_logits(hidden[staged["scored_tokens"][part]])
            targets = staged["target_ids"][part]
            name = f"scores.{first // _SCORED_AT_ONCE}"
            read_back.add(f"{name}.logprobs", self._kernels.token_logprobs(logits, targets))
            read_back.add(f"{name}.best", logits.argmax(dim=-1))
            self._top(logits, max(wanted.num_tops[part]), f"{name}.top", read_back)

    def _top(self, logits: Tensor, count: int, name: str, read_back: ReadBack) -> None:
        if count:
            token_ids, logprobs = top_logprobs(logits, min(count, logits.shape[-1]))
            read_back.add(f"{name}_ids", token_ids)
            read_back.add(f"{name}_logprobs", logprobs)


def _idle_row(table_row: int, page: int, num_tokens: int, num_pages: int = 1) -> Row:
    """A row from the start of its sequence on, in pages from `page` on."""
    pages = PageUpdate(0, tuple(range(page, page + num_pages)))
    greedy = SamplingParams(temperature=0.0)
    return Row(table_row, table_row, 0, (0,) * num_tokens, pages, sampling=greedy)


def _is_special(row: Row) -> bool:
    """Whether a row that samples wants more than its token."""
    has_logprobs = sampling_of(row).logprobs is not None
    return row.adjustment is not None or row.mask is not None or has_logprobs


def _page_arrays(rows: Sequence[Row]) -> Arrays:
    """[U, 3] int32: table row, column, page."""
    updates = [(row.table_row, row.page_update) for row in rows if row.page_update is not None]
    if not updates:
        return {}
    lengths = [len(update.pages) for _, update in updates]
    table = np.empty((sum(lengths), 3), dtype=np.int32)
    end = 0
    for (table_row, update), length in zip(updates, lengths, strict=True):
        part = table[end : end + length]
        end += length
        part[:, 0] = table_row
        part[:, 1] = np.arange(update.first, update.first + length)
        part[:, 2] = update.pages
    return {"page_updates": table}


def _padded(array: npt.NDArray[Any], size: int, value: int) -> npt.NDArray[Any]:
    """[size], behind its end filled with `value`."""
    if len(array) == size:
        return array
    padded = np.full(size, value, dtype=array.dtype)
    padded[: len(array)] = array
    return padded
