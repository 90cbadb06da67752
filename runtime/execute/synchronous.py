"""Steps on a CPU: each is computed when it is submitted, in the calling thread."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import torch

from ...kernels.registry import Kernels
from ...kernels.state_rows import StateRows
from ..checkpoint.config.model_config import ModelConfig
from ..memory.device_pool import DeviceKVPool
from ..memory.disk.block_file import Payload
from ..memory.state_pool import StatePool
from ..memory.transfer import KVTransfer
from ..models.forward_batch import ForwardBatch, LayerStates
from ..models.language_model import LanguageModel
from ..models.layers.ranks import ALONE, Ranks
from ..schedule.plan import NO_GUESSES, FinishedStep, StepPlan, StepResult
from .branches import flattened, folded
from .captured import CapturedForward
from .draft_model import Guesser
from .image_features import ImageFeatures, own_images
from .inputs import (
    NO_SOURCE,
    InputBuilder,
    StepInputs,
    accepted_drafts,
    plan_attentions,
    wanted_logits,
)
from .kv_selection import KVSelector
from .layer_streams import LayerStreams
from .neighbours import Neighbours
from .sampler import Sampler
from .vocabulary import vocabulary_of


class SynchronousSteps:
    """Executes plans one after the other. Owns the state of a plan that the next may refer to."""

    can_overlap = False

    def __init__(
        self,
        model: LanguageModel,
        kernels: Kernels,
        inputs: InputBuilder,
        pool: DeviceKVPool,
        transfer: KVTransfer,
        *,
        config: ModelConfig,
        num_adapter_slots: int = 0,
        states: StatePool | None = None,
        ranks: Ranks = ALONE,
        neighbours: Neighbours | None = None,
        draft_model: Guesser | None = None,
        segment_cost_tokens: int = 0,
    ) -> None:
        """states: of a model with recurrent layers, whose passes are not recorded. draft_model:
        guesses what follows a step's rows. segment_cost_tokens: see `flattened`."""
        self._ranks = ranks
        self._neighbours = neighbours
        self._vocabulary = vocabulary_of(kernels, config.vocab_size, ranks)
        self._model = model
        self._kernels = kernels
        self._inputs = inputs
        self._segment_cost_tokens = segment_cost_tokens
        self._pool = pool
        self._transfer = transfer
        self._config = config
        self._num_adapter_slots = num_adapter_slots
        self._states = states
        self._draft_model = draft_model
        self._images = None if model.vision is None else ImageFeatures(model.vision)
        self.streams: LayerStreams | None = None  # set once other engines may ask for KV
        self._selector = KVSelector(pool, config, inputs.page_table, model, kernels)
        self.forward = CapturedForward(model, None if states is not None else kernels.capture)
        self._previous = torch.zeros(len(inputs.page_table.entries), dtype=torch.int64)
        self._is_sampled = np.zeros(0, dtype=bool)
        # Of the step before, if it had drafts: the recurrence's plan and its rows.
        self._drafted: tuple[object, StateRows] | None = None

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> FinishedStep:
        if self._draft_model is not None:
            self._draft_model.settle(plan)
        started = time.perf_counter()
        payloads = self._transfer.run(plan.transfers)
        transfer_s = time.perf_counter() - started if plan.transfers else None
        errors = () if self._images is None else self._images.run(plan)
        states: tuple[Payload, ...] = ()
        if self._states is not None:
            self._accept_drafts(plan)
            states = self._states.copy(plan.state_loads)
        if not plan.rows:
            result = StepResult(plan.step_id, (), None, transfer_s, payloads, states, errors)
            return FinishedStep(result)
        started = time.perf_counter()
        table = self._inputs.page_table
        flat = flattened(plan, table, self._segment_cost_tokens)
        inputs = self._inputs.build(flat)
        inputs.check_sources(self._is_sampled)
        wanted = wanted_logits(flat, inputs.layout)
        readout = Sampler(flat, wanted, self._config.vocab_size)
        sending = None
        if plan.streams:
            assert self.streams is not None, "a plan streams KV, and there is nobody to send it to"
            sending = self.streams.begin(plan.streams)
        batch = self._batch(flat, inputs)
        if sending is not None:
            batch = replace(batch, on_layer=sending.layer_is_done)
        observation = self._selector.begin(flat.rows, inputs.layout)
        if observation is not None:
            batch = replace(batch, observed=observation)
        hidden = self.forward(batch)
        if observation is not None:
            self._selector.select(observation)
        if sending is not None and self._draft_model is None:
            sending.end()
        if self._neighbours is not None and self._neighbours.has_next:
            self._ranks.check()
            self._neighbours.send(hidden)
            return FinishedStep(StepResult(plan.step_id, (), None, transfer_s, payloads))
        hidden = batch.tokens.gather(hidden)
        if self._states is not None:
            self._states.copy(plan.state_saves)
        logits = None
        if wanted.sampled_rows:
            at = wanted.sampled_tokens
            picked = hidden if at is None else hidden[torch.from_numpy(at)]
            logits = self._model.compute_logits(picked)
        staged = {name: torch.from_numpy(array) for name, array in readout.arrays().items()}
        answers = readout.launch(
            self._vocabulary, self._model, hidden, logits, staged, self._previous
        )
        self._ranks.check()
        self._is_sampled = readout.is_sampled
        rows = readout.results({name: tensor.numpy() for name, tensor in answers.items()})
        if flat is not plan:
            rows = folded(plan, rows, table)
        guessing = NO_GUESSES
        if self._draft_model is not None:
            rows, guessing = self._draft_model.guessed(plan, rows, hidden, batch.kept)
            if sending is not None:
                sending.end()
        return FinishedStep(
            StepResult(
                plan.step_id,
                rows,
                time.perf_counter() - started,
                transfer_s,
                payloads,
                states,
                errors,
                guessing,
            )
        )

    def _batch(self, plan: StepPlan, inputs: StepInputs) -> ForwardBatch:
        layers, adapters, images = self._pool.layers, None, None
        tokens, pages, slots = (
            self._ranks.tokens(inputs.num_tokens),
            self._ranks.pages,
            inputs.slots,
        )
        if inputs.adapters is not None:
            own = tokens.take(torch.from_numpy(inputs.adapters)).numpy()
            adapters = self._kernels.plan_lora(own, self._num_adapter_slots)
        if pages is not None:
            page_size = self._pool.page_size
            slots = pages.slots(slots, page_size, spare_slot=self._pool.num_pages * page_size)
        if self._images is not None:
            images = own_images(self._images.rows(plan, inputs.layout), tokens)
        input_ids = tokens.take(torch.from_numpy(self._token_ids(inputs)))
        return ForwardBatch(
            input_ids=input_ids,
            positions=torch.from_numpy(inputs.positions),
            slot_mapping=torch.from_numpy(slots),
            kv_layers=layers,
            attention=plan_attentions(self._kernels, inputs.attention_rows, layers, self._config),
            adapters=adapters,
            states=() if self._states is None else self._states.layers,
            recurrence=self._recurrence(inputs),
            index_keys=self._pool.index_keys,
            images=images,
            tokens=tokens,
            residual=self._residual(len(input_ids)),
            kept=self._kept(plan, inputs.num_tokens),
        )

    def _kept(self, plan: StepPlan, num_tokens: int) -> LayerStates | None:
        """Room for what a head reads of the pass."""
        if self._draft_model is None or not self._draft_model.layers:
            return None
        if not any(row.is_followed for row in plan.rows):
            return None
        return LayerStates(self._draft_model.layers, num_tokens)

    def _residual(self, num_tokens: int) -> torch.Tensor | None:
        """From the stage before; None: this is the first."""
        neighbours = self._neighbours
        if neighbours is None or not neighbours.has_previous:
            return None
        return neighbours.receive(num_tokens)

    def _recurrence(self, inputs: StepInputs) -> object | None:
        if self._states is None:
            return None
        rows = inputs.state_rows
        planned = self._kernels.recurrence.plan(rows)
        self._drafted = (planned, rows) if rows.num_drafts.any() else None
        return planned

    def _accept_drafts(self, plan: StepPlan) -> None:
        drafted, self._drafted = self._drafted, None
        if plan.state_accepts:
            assert drafted is not None, "the step before had no drafts"
            accepted = torch.from_numpy(accepted_drafts(plan, drafted[1]))
            self._kernels.recurrence.accept_drafts(drafted[0], accepted)

    def _token_ids(self, inputs: StepInputs) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        if inputs.sources is not None:
            is_taken = inputs.sources != NO_SOURCE
            inputs.token_ids[is_taken] = self._previous.numpy()[inputs.sources[is_taken]]
        return inputs.token_ids
