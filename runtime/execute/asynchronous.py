"""Steps on an accelerator: `submit` queues a step and returns, `result` waits for its outputs.

    host     plan t | lay out, stage, launch | ...plan t+1 ...| read t | ...
    device            copy in | forward, logits, sample | copy out | next step
    beside it         copies between tiers of step t+1 ...

docs/how-it-works/gpu-execution.md draws two steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ...kernels.registry import Kernels
from ...kernels.state_rows import StateRows
from ..memory.asynchronous_transfer import AsynchronousCopies, AsynchronousKVTransfer
from ..memory.copies import TierCopy
from ..memory.state_pool import StatePool
from ..models.language_model import LanguageModel
from ..schedule.plan import StepPlan, StepResult
from .accelerator import Accelerator, Event
from .graphs import GraphForward, PreparedForward
from .inputs import InputBuilder, accepted_drafts, page_updates, wanted_logits
from .layer_streams import LayerByLayer, LayerWaits
from .neighbours import Neighbours
from .sampler import NO_DRAWS, Sampler
from .staging import NUM_BUFFERS, ReadBack, Staging
from .vocabulary import WholeVocabulary


class AsynchronousSteps:
    """Executes plans in their order. `submit` waits for the device only to capture a graph."""

    can_overlap = True

    def __init__(
        self,
        model: LanguageModel,
        kernels: Kernels,
        inputs: InputBuilder,
        forward: GraphForward,
        transfer: AsynchronousKVTransfer,
        waits: LayerWaits,
        accelerator: Accelerator,
        *,
        vocab_size: int,
        states: StatePool | None = None,
        neighbours: Neighbours | None = None,
        num_buffers: int = NUM_BUFFERS,
    ) -> None:
        """states: of a model with recurrent layers. num_buffers: of staging, for so many
        steps that wait to be begun."""
        self._neighbours = neighbours
        self.forward = forward
        self._model = model
        self._kernels = kernels
        self._vocabulary = WholeVocabulary(kernels)
        self._inputs = inputs
        self._transfer = transfer
        self._waits = waits
        self._accelerator = accelerator
        self._vocab_size = vocab_size
        self._staging = Staging(accelerator, num_buffers)
        self._is_sampled = np.zeros(0, dtype=bool)
        self._states = states
        self._drafted: StateRows | None = None  # of the step before, if it had drafts

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> AsynchronousStep:
        with self._accelerator.queue():
            timed = self._copy(plan.transfers) if plan.transfers else None
            copies = None if timed is None else timed.copies
            queued = self._compute(plan, copies) if plan.rows else None
            if copies is not None and queued is None:
                self._accelerator.hold_for(copies.pool_is_done)
        return AsynchronousStep(plan, timed, queued)

    def _copy(self, transfers: Sequence[TierCopy]) -> TimedCopies:
        """Queue copies beside the steps that are being computed, none of which writes what they
        read or uses what they write."""
        with self._accelerator.copying():
            begun = self._accelerator.event()
            copies = self._transfer.run(transfers)
            return TimedCopies(copies, begun, self._accelerator.event())

    def _awaited(
        self, copies: AsynchronousCopies, prepared: PreparedForward
    ) -> LayerByLayer | None:
        """Let the step wait until the pool is as it needs it: before its layers, or, None, where
        they are one launch, before all."""
        if prepared.padded_tokens is None:
            return self._waits.begin(copies)
        self._accelerator.hold_for(copies.pool_is_done)
        return None

    def _compute(
        self, plan: StepPlan, copies: AsynchronousCopies | None
    ) -> AsynchronousRows | PassedRows:
        inputs = self._inputs.build(plan)
        inputs.check_sources(self._is_sampled)
        wanted = wanted_logits(plan, inputs.layout)
        readout = Sampler(plan, wanted, self._vocab_size)
        draws = NO_DRAWS if readout.changes_logits else readout.draws()
        prepared = self.forward.prepare(inputs, wanted, draws)
        updates = page_updates(plan.rows)
        # NOTE: the forward pass's arrays come first, so that a graph finds them at fixed offsets.
        arrays = {**prepared.arrays, "page_updates": updates}
        arrays |= readout.arrays(prepared.is_drawn)
        if plan.state_accepts:
            assert self._drafted is not None, "the step before had no drafts"
            arrays["accepted"] = accepted_drafts(plan, self._drafted)
        self._drafted = inputs.state_rows if inputs.state_rows.num_drafts.any() else None
        awaited = None if copies is None else self._awaited(copies, prepared)
        begun = self._accelerator.event()
        staged = self._staging.stage(arrays)
        # Not in the graph: the number of page updates varies with the cached prefix, and so does
        # which states move or are copied.
        if len(updates):
            self._kernels.update_pages(self.forward.page_table, staged["page_updates"])
        if plan.state_accepts:
            self._kernels.recurrence.accept_drafts(self.forward.drafted, staged["accepted"])
        if self._states is not None:
            self._states.copy(plan.state_loads)
        # Nor are messages, whose rows are not padded.
        neighbours, residual = self._neighbours, None
        if neighbours is not None and neighbours.has_previous:
            residual = neighbours.receive(inputs.num_tokens)
        on_layer = None if awaited is None else awaited.layer_is_done
        hidden, logits, drawn = self.forward(prepared, staged, residual, on_layer)
        if neighbours is not None and neighbours.has_next:
            neighbours.send(hidden[: inputs.num_tokens])
            return PassedRows(self._accelerator.event())
        if self._states is not None:
            self._states.copy(plan.state_saves)
        answers = readout.launch(
            self._vocabulary, self._model, hidden, logits, staged, self.forward.previous, drawn
        )
        self._is_sampled = readout.is_sampled
        return AsynchronousRows(readout, ReadBack(self._accelerator, answers), begun)


class AsynchronousRows:
    """The rows of a step that is being computed."""

    def __init__(self, readout: Sampler, read_back: ReadBack, begun: Event) -> None:
        self._readout = readout
        self._read_back = read_back
        self._begun = begun

    def result(self, plan: StepPlan) -> StepResult:
        """Wait for the rows' results."""
        rows = self._readout.results(self._read_back.arrays())
        duration_s = self._read_back.done.seconds_since(self._begun)
        return StepResult(plan.step_id, rows, duration_s)


class PassedRows:
    """The rows of a step of which the stages behind compute the rest."""

    def __init__(self, done: Event) -> None:
        self._done = done

    def result(self, plan: StepPlan) -> StepResult:
        """Wait for this stage's part."""
        self._done.wait()
        return StepResult(plan.step_id, ())


class TimedCopies(NamedTuple):
    """A step's copies, with the points before and after."""

    copies: AsynchronousCopies
    begun: Event
    done: Event


class AsynchronousStep:
    """A pending step, see `step.PendingStep`."""

    def __init__(
        self,
        plan: StepPlan,
        copies: TimedCopies | None,
        queued: AsynchronousRows | PassedRows | None,
    ) -> None:
        self._plan = plan
        self._copies = copies
        self._queued = queued

    def result(self) -> StepResult:
        """Wait for the device."""
        plan = self._plan
        result = StepResult(plan.step_id, ()) if self._queued is None else self._queued.result(plan)
        if (copied := self._copies) is None:
            return result
        copied.done.wait()
        return StepResult(
            plan.step_id,
            result.rows,
            result.duration_s,
            transfer_s=copied.done.seconds_since(copied.begun),
            payloads=copied.copies.payloads(),
        )
