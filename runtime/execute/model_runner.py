"""The device half of one engine: loads the model, sizes its KV pool, and executes step plans.

Decides nothing: the plan says which rows run, with which pages. A CPU (synchronous.py) and an
accelerator (asynchronous.py) execute steps differently; the code that they share is here.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ...errors import InvalidRequest
from ...frontend.client.progress import ByteProgress
from ...kernels.divided_attention import with_divided_attention
from ...kernels.kv_cache_dtype import KVCacheDtype
from ...kernels.native.bindings import why_not_native
from ...kernels.registry import KernelMode, Kernels, select_kernels
from ...kernels.triton.availability import is_interpreted
from ..checkpoint.config.model_config import ModelConfig
from ..checkpoint.draft_checkpoint import Draft
from ..checkpoint.formats import require_kv_cache_dtype
from ..checkpoint.loader import LoadFormat, open_weights
from ..checkpoint.lora.adapter import Adapter, AdapterModule, ModuleShape
from ..checkpoint.quantized.quantizing import Quantization
from ..checkpoint.weight_source import WeightSource
from ..config import DEFAULT_GRAPH_MAX_TOKENS, PrefillAttention
from ..memory.asynchronous_transfer import AsynchronousKVTransfer
from ..memory.copies import PageFork, TierCopy, Transfer
from ..memory.device_pool import DeviceKVPool
from ..memory.divided_transfer import DividedKVTransfer
from ..memory.host_pool import HostKVPool, PinnedKVPool
from ..memory.kv_layout import KVLayout
from ..memory.sizing import num_host_state_slots, num_pages_for, num_state_slots, step_bytes
from ..memory.state_layout import StateLayout
from ..memory.state_pool import StatePool
from ..memory.transfer import KVTransfer
from ..memory.whole_kv import HeadPlaces, KVMessages, StagePieces, WholeKV
from ..models.language_model import LanguageModel, build_model
from ..models.layers.adapter_tables import AdapterTables
from ..models.layers.build import ModelBuild
from ..models.layers.expert_loads import ExpertLoads
from ..models.layers.ranks import ALONE, Ranks, head_share
from ..models.layers.stage import ALL_LAYERS, Stage, config_of_stage
from ..schedule.plan import (
    MAX_BRANCH_TOKENS,
    Adjustment,
    PageUpdate,
    PendingStep,
    Row,
    StepPlan,
    StepResult,
)
from ..schedule.sampling_params import SamplingParams
from .accelerator import Accelerator, accelerator_for
from .asynchronous import AsynchronousSteps
from .drafts import Drafts
from .dtype_name import dtype_name
from .graphs import GraphForward, graph_sizes
from .inputs import InputBuilder
from .layer_streams import KVSink, LayerStreams, LayerWaits
from .neighbours import Neighbours
from .prefill import with_prefill
from .staging import NUM_BUFFERS
from .synchronous import SynchronousSteps

GraphProgress = Callable[[int, int], None]  # (graphs captured so far, graphs in all)

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
_GREEDY = SamplingParams(temperature=0.0)
_PENALISED = SamplingParams(repetition_penalty=1.1, logprobs=1)


class ModelRunner:
    """One device's half of the runtime; lives as long as its engine. Not thread-safe.

    Plans come one after the other; `from_previous` in a plan refers to the plan before.
    """

    def __init__(
        self,
        model_folder: str | Path,
        model_config: ModelConfig,
        *,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str = "cpu",
        num_pages: int | None = None,
        max_total_tokens: int | None = None,
        mem_fraction: float | None = None,
        page_size: int = 1,
        num_host_pages: int = 0,
        max_running_requests: int = 64,
        max_model_len: int | None = None,
        max_step_tokens: int = 2048,
        graph_max_tokens: int = DEFAULT_GRAPH_MAX_TOKENS,
        kernels: KernelMode | Kernels = "auto",
        prefill_attention: PrefillAttention = "auto",
        load_format: LoadFormat = "auto",
        kv_cache_dtype: KVCacheDtype = "auto",
        quantization: Quantization | Literal["none"] = "none",
        on_progress: ByteProgress | None = None,
        num_adapter_slots: int = 0,
        max_adapter_rank: int = 0,
        num_state_checkpoints: int | None = None,
        ranks: Ranks = ALONE,
        stage: Stage = ALL_LAYERS,
        neighbours: Neighbours | None = None,
        kv_messages: KVMessages | None = None,
        draft: Draft | None = None,
    ) -> None:
        """Loads the weights, allocates tables for `num_adapter_slots` adapters (0: none served),
        then KV memory: `num_pages`, or `max_total_tokens`, or `mem_fraction` of the memory then
        free. Steps of up to `graph_max_tokens` tokens are captured on a GPU. A model with
        recurrent layers also gets states for all running requests and `num_state_checkpoints`.
        ranks: with others, this runner holds a part of the KV, and of the weights or all of these,
        and all run the same plans; only rank 0's results are whole. stage: with others,
        model_config is that of its layers, and `neighbours` exchanges with the processes that have
        those before and behind. draft: guesses what follows, on a CPU.

        Raises:
            ModelLoadError: the checkpoint cannot be loaded.
            InvalidRequest: an argument out of range, no such device, or no room for the KV of one
                sequence.
        """
        self.ranks = ranks
        self._stage = stage
        self._neighbours = neighbours
        self._whole_config = model_config
        self.expert_loads: ExpertLoads | None = None  # None: the model has no experts
        share = head_share(model_config, ranks)
        self.config = model_config = replace(
            model_config, num_heads=share.num_heads, num_kv_heads=share.num_kv_heads
        )
        self.score_head: torch.Tensor | None = None  # [labels, size] float64 of a classifier
        self.accelerator = _accelerator_of(str(device))
        self.dtype = resolve_dtype(dtype, str(device))
        self.device = torch.device("cpu") if self.accelerator is None else self.accelerator.device
        self._drafts = None if draft is None else Drafts(draft, model_config)
        name = dtype_name(self.dtype)
        self.kv_layout = KVLayout.of(model_config, name, kv_cache_dtype)
        # Of all processes' heads and layers, as stores and other engines know it.
        whole = stage.model or self._whole_config
        self.whole_kv_layout = KVLayout.of(whole, name, kv_cache_dtype)
        self.stage_pieces: StagePieces | None = None  # None: there is one stage
        if stage.num_stages > 1:
            of_stages = [config_of_stage(whole, run) for run in stage.runs]
            layouts = [KVLayout.of(each, name, kv_cache_dtype) for each in of_stages]
            self.stage_pieces = StagePieces.of(self.whole_kv_layout, layouts)
        if self._drafts is not None and self._drafts.config is not None:
            of_draft = KVLayout.of(self._drafts.config, name, kv_cache_dtype)
            self.kv_layout = self.whole_kv_layout = self.kv_layout.with_draft(of_draft)
        self.page_size = page_size
        self._whole_kv = self._whole_kv_of(kv_messages)
        self.max_model_len = _checked_model_len(max_model_len, model_config)
        self.kernels: Kernels = (
            kernels if isinstance(kernels, Kernels) else select_kernels(self.dtype, device, kernels)
        )
        if ranks.context is not None:
            _require_divisible(model_config, device=str(device), num_adapters=num_adapter_slots)
            self.kernels = with_divided_attention(self.kernels, ranks.context)
        sizes = graph_sizes(min(graph_max_tokens, max_step_tokens))
        if self.accelerator is not None:
            self.kernels = with_prefill(
                self.kernels,
                prefill_attention,
                model_config,
                self.accelerator,
                dtype=self.dtype,
                kv_cache_dtype=kv_cache_dtype,
                page_size=page_size,
                max_step_tokens=max_step_tokens,
                graph_max_tokens=max(sizes, default=0),
                ranks=ranks,
            )
        self.state_layout = StateLayout.of(model_config, dtype_name(self.dtype))
        known = self.kernels.kv_cache_dtypes
        require_kv_cache_dtype(kv_cache_dtype, known, dtype_name(self.dtype), str(device))
        self.segment_cost_tokens = (
            self.kernels.segment_cost_tokens
            if model_config.latent is None
            else self.kernels.latent_segment_cost_tokens
        )
        self._max_step_tokens = max_step_tokens
        self._inputs = InputBuilder(
            page_size=page_size,
            max_running_requests=max_running_requests,
            max_model_len=self.max_model_len,
            num_spare=0 if draft is None else max(MAX_BRANCH_TOKENS, max_running_requests),
        )
        self._adapters: AdapterTables | None = None
        if num_adapter_slots:
            self._adapters = AdapterTables(
                num_adapter_slots,
                max_adapter_rank,
                kernels=self.kernels,
                dtype=self.dtype,
                device=self.device,
                allocate=_pageable if self.accelerator is None else self.accelerator.pinned,
            )
        if self.accelerator is None:
            self._load(Path(model_folder), load_format, quantization, on_progress)
        else:
            with self.accelerator.queue():
                self._load(Path(model_folder), load_format, quantization, on_progress)
        if num_pages is None:
            num_pages = num_pages_for(
                self.kv_layout,
                page_size=page_size,
                max_running_requests=max_running_requests,
                max_model_len=self.max_model_len,
                max_total_tokens=max_total_tokens,
                mem_fraction=mem_fraction,
                available_bytes=self._available_bytes(max_step_tokens, max_running_requests),
                is_gpu=self._is_gpu,
                states=self.state_layout,
                num_shares=1 if ranks.context is None else ranks.context.num_ranks,
            )
        num_pages = ranks.least(num_pages)
        if neighbours is not None:
            num_pages = neighbours.least(num_pages)
        self.num_pages = num_pages  # ids from 0 on that may be handed out
        if ranks.pages is not None:
            num_pages = ranks.pages.num_own(num_pages)
            num_host_pages = ranks.pages.num_own(num_host_pages)
        num_slots = num_host_slots = 0
        if self.state_layout is not None:
            num_slots = num_state_slots(
                self.state_layout,
                max_running_requests=max_running_requests,
                num_checkpoints=num_state_checkpoints,
                kv_bytes=num_pages * page_size * self.kv_layout.bytes_per_token,
            )
            host_kv_bytes = num_host_pages * page_size * self.kv_layout.bytes_per_token
            num_host_slots = num_host_state_slots(self.state_layout, host_kv_bytes)
        if self.accelerator is None:
            self.states = self._states_of(num_slots, num_host_slots)
            self.steps: SynchronousSteps | AsynchronousSteps = self._in_order(
                num_pages, num_host_pages
            )
        else:
            with self.accelerator.queue():
                self.states = self._states_of(num_slots, num_host_slots)
                self.steps = self._queued(self.accelerator, num_pages, num_host_pages, sizes)

    @property
    def can_overlap(self) -> bool:
        """Whether `submit` may return before the step has been computed, and the next plan refer
        to what it draws: the first of several stages does not learn that."""
        return self.steps.can_overlap and self._neighbours is None

    def submit(self, plan: StepPlan) -> PendingStep:
        """Make the plan's copies between tiers, then compute its tokens, store their KV, and
        sample, score and sum hidden states for the rows that request it.

        A row whose logits or sums are not finite gets `error`; other rows are not affected.
        """
        return self.steps.submit(plan)

    def describe_experts(self) -> dict[str, Any]:
        """See `ExpertLoads`; {} without experts. Waits for the device."""
        if self.expert_loads is None:
            return {}
        with nullcontext() if self.accelerator is None else self.accelerator.queue():
            return self.expert_loads.describe()

    def stream_to(self, sink: KVSink | None) -> None:
        """From now on plans may stream KV there. On a CPU. sink: None in processes other than the
        engine's."""
        assert isinstance(self.steps, SynchronousSteps), "KV is streamed from a CPU"
        numbers = None
        if self.stage_pieces is not None:
            number = [first for first, _ in self._stage.runs].index(self._stage.first_layer)
            numbers = self.stage_pieces.numbers[number]
        self.steps.streams = LayerStreams(self.pool, self.config, sink, self._whole_kv, numbers)

    @property
    def adapter_modules(self) -> Mapping[str, ModuleShape]:
        """The model's linear layers that take adapters."""
        return {} if self._adapters is None else self._adapters.modules

    def prepare_adapter(self, modules: Sequence[AdapterModule]) -> object:
        """An adapter's tensors as its slot takes them; may be called by any thread."""
        assert self._adapters is not None, "this runner has no slots"
        with torch.inference_mode():
            return self._adapters.prepare(modules)

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Fill a slot, numbered from 1; steps submitted before still use its old contents."""
        self.load_adapter_weights(slot, adapter.weights)

    def load_adapter_weights(self, slot: int, weights: object) -> None:
        """`load_adapter` of what `prepare_adapter` gave."""
        assert self._adapters is not None, "this runner has no slots"
        with torch.inference_mode():
            if self.accelerator is None:
                self._adapters.load(slot, weights)
                return
            with self.accelerator.queue():
                self._adapters.load(slot, weights)

    def execute(self, plan: StepPlan) -> StepResult:
        """Submit a step and wait for its result."""
        return self.submit(plan).result()

    def warm_up(self, on_graph: GraphProgress | None = None) -> None:
        """Run a short prompt and two decode steps, so that the first request pays no set-up; where
        kernels are compiled, also a step with the rarely used kernels; on a GPU also the largest
        step, whose memory is then known to suffice, and capture a graph of every size.

        NOTE: writes to pages from 0 on; call it before any page is in use.
        """
        most = min(self.max_model_len, self.num_pages * self.page_size) - 2
        length = min(16, self._max_step_tokens, most)
        if length < 1:
            return
        pages = tuple(range(-(-(length + 2) // self.page_size)))
        prompt = Row(0, 0, 0, (0,) * length, PageUpdate(0, pages), sampling=_GREEDY)
        self.execute(StepPlan(0, (prompt,)))
        source = 0 if self.can_overlap else None
        for step in range(2):
            row = Row(0, 0, length + step, (0,), from_previous=source, sampling=_GREEDY)
            self.execute(StepPlan(1 + step, (row,)))
        if not isinstance(self.steps, AsynchronousSteps):
            return
        self.execute(self._rare_step())
        if self._is_gpu:
            largest = self._prompts_of(self._max_step_tokens, min(1, self._num_adapter_slots))
            if largest is not None:
                self.execute(largest)
            self._capture(self.steps.forward, on_graph)

    def _rare_step(self) -> StepPlan:
        """One token with every adjustment of logits, and a page copied on the device, and to the
        host and back."""
        adjustment = Adjustment(array("i"), array("i", [0]), array("d", [0.0]), array("i"))
        row = Row(0, 0, 0, (0,), sampling=_PENALISED, adjustments=(adjustment,), mask=0)
        masks = np.full((1, -(-self.config.vocab_size // 32)), 0xFFFFFFFF, dtype=np.uint32)
        page = array("i", [0])
        copies: list[TierCopy] = [PageFork(page, page)]
        if self.host_pool is not None:
            copies += [Transfer("store", page, page), Transfer("load", page, page)]
        return StepPlan(0, (row,), masks=masks, transfers=tuple(copies))

    def _capture(self, forward: GraphForward, on_graph: GraphProgress | None) -> None:
        """Largest first, so that the others reuse its memory; each size also with adapters, if they
        are served, and small ones also as decode steps."""
        kinds = (0, 1) if self._num_adapter_slots else (0,)
        wanted = [
            (make, size, adapter)
            for size in reversed(forward.sizes)
            for adapter in kinds
            for make in (self._prompts_of, self._decodes_of)
            if make == self._prompts_of or forward.has_light(size)
        ]
        for done, (make, size, adapter) in enumerate(wanted, 1):
            plan = make(size, adapter)
            if plan is None:
                continue  # no step of this size fits the pool
            self.execute(plan)
            if on_graph is not None:
                on_graph(done, len(wanted))

    def _decodes_of(self, size: int, adapter: int) -> StepPlan | None:
        """As many rows of a token each as are padded to this size, for a light graph; None if they
        do not fit."""
        num_rows = min(size, len(self._inputs.page_table.entries))
        rows = (
            Row(row, row, 0, (0,), PageUpdate(0, (row,)), sampling=_GREEDY, adapter=adapter)
            for row in range(num_rows)
        )
        return StepPlan(0, tuple(rows)) if num_rows <= self.num_pages else None

    def _prompts_of(self, num_tokens: int, adapter: int = 0) -> StepPlan | None:
        """As few prompts as possible with this many tokens in all; None if they do not fit."""
        rows: list[Row] = []
        first_page = 0
        while num_tokens > 0:
            length = min(num_tokens, self.max_model_len)
            num_pages = -(-length // self.page_size)
            pages = tuple(range(first_page, first_page + num_pages))
            first_page, num_tokens = first_page + num_pages, num_tokens - length
            place = len(rows)
            row = Row(place, place, 0, (0,) * length, PageUpdate(0, pages), sampling=_GREEDY)
            rows.append(row._replace(adapter=adapter))
        fits = first_page <= self.num_pages and len(rows) <= len(self._inputs.page_table.entries)
        return StepPlan(0, tuple(rows)) if fits else None

    @property
    def _is_gpu(self) -> bool:
        return self.accelerator is not None and not self.accelerator.is_interpreted

    def _available_bytes(self, max_step_tokens: int, max_running_requests: int) -> int | None:
        """Memory for KV on a GPU, after a step's own tensors; None: a CPU's rule applies."""
        if self.accelerator is None or not self._is_gpu:
            return None
        reserve = step_bytes(
            self.config,
            dtype_bytes=self.dtype.itemsize,
            num_tokens=max_step_tokens,
            num_rows=max_running_requests,
        )
        return max(0, self.accelerator.available_bytes() - reserve)

    def _in_order(self, num_pages: int, num_host_pages: int) -> SynchronousSteps:
        has_spare = self.states is not None or self.ranks.pages is not None
        self.pool = self._pool_of(num_pages, num_spare_pages=int(has_spare))
        # NOTE: of divided KV too: the page behind all others is on each rank none or a spare one.
        self._inputs.spare_slot = self.num_pages * self.page_size if has_spare else None
        host_pool = HostKVPool(self.pool, num_host_pages) if num_host_pages else None
        self.host_pool: HostKVPool | PinnedKVPool | None = host_pool
        return SynchronousSteps(
            self.model,
            self.kernels,
            self._inputs,
            self.pool,
            self._transfer_of(host_pool),
            config=self.config,
            num_adapter_slots=self._num_adapter_slots,
            states=self.states,
            ranks=self.ranks,
            neighbours=self._neighbours,
            draft_model=None
            if self._drafts is None
            else self._drafts.on(self.pool, self.kernels, self._inputs, self.config),
            segment_cost_tokens=self.segment_cost_tokens,
        )

    def _transfer_of(self, host_pool: HostKVPool | None) -> KVTransfer:
        context, pages = self.ranks.context, self.ranks.pages
        if context is not None and pages is not None:
            gather = context.all_gather
            return DividedKVTransfer(self.pool, host_pool, pages, gather, self._whole_kv)
        return KVTransfer(self.pool, host_pool, self._whole_kv)

    def _whole_kv_of(self, messages: KVMessages | None) -> WholeKV | None:
        """None: this process has all of the KV."""
        ranks, heads, tokens = self.ranks, None, None
        if ranks.communicator is not None:
            shares = [
                head_share(self._whole_config, replace(ranks, rank=rank))
                for rank in range(ranks.num_ranks)
            ]
            kv_heads = [share.kv_heads for share in shares]
            heads = HeadPlaces.of(ranks.communicator, kv_heads, self._whole_config.num_kv_heads)
        if ranks.context is not None and ranks.pages is not None:
            tokens = ranks.context, ranks.pages
        if heads is None and tokens is None and self._stage.num_stages == 1:
            return None
        return WholeKV(self.page_size, heads, tokens, messages, self.stage_pieces)

    def _queued(
        self,
        accelerator: Accelerator,
        num_pages: int,
        num_host_pages: int,
        sizes: tuple[int, ...],
    ) -> AsynchronousSteps:
        self.pool = self._pool_of(num_pages, num_spare_pages=1)
        self._inputs.spare_slot = num_pages * self.page_size
        host_pool = PinnedKVPool(self.pool, num_host_pages) if num_host_pages else None
        self.host_pool = host_pool
        accelerator.event().wait()  # for the pool's zeros: copies do not wait for steps
        entries = self._inputs.page_table.entries
        forward = GraphForward(
            self.model,
            self.kernels,
            self.pool,
            accelerator,
            table_shape=(entries.shape[0], entries.shape[1]),
            config=self.config,
            dtype=self.dtype,
            sizes=sizes,
            num_adapter_slots=self._num_adapter_slots,
            states=self.states,
            stage=self._stage,
        )
        return AsynchronousSteps(
            self.model,
            self.kernels,
            self._inputs,
            forward,
            AsynchronousKVTransfer(self.pool, host_pool, self.kernels.make_page_copy, accelerator),
            LayerWaits(self.kv_layout, self.config, accelerator),
            accelerator,
            vocab_size=self.config.vocab_size,
            states=self.states,
            neighbours=self._neighbours,
            num_buffers=max(NUM_BUFFERS, self._stage.num_stages),
        )

    @property
    def _num_adapter_slots(self) -> int:
        return 0 if self._adapters is None else self._adapters.num_slots

    def _states_of(self, num_slots: int, num_host_slots: int) -> StatePool | None:
        """None: the model has no recurrent layers."""
        layout = self.state_layout
        if layout is None:
            return None
        return StatePool(layout, num_slots, self.device, num_host_slots=num_host_slots)

    def _pool_of(self, num_pages: int, num_spare_pages: int = 0) -> DeviceKVPool:
        return DeviceKVPool(
            self.kv_layout,
            num_pages=num_pages,
            page_size=self.page_size,
            device=self.device,
            num_spare_pages=num_spare_pages,
        )

    def _load(
        self,
        folder: Path,
        load_format: LoadFormat,
        quantization: Quantization | Literal["none"],
        on_progress: ByteProgress | None,
    ) -> None:
        with open_weights(
            folder, load_format, quantization, self.dtype, self.device, on_progress
        ) as source:
            self.model = self._build(source)
        draft = None if self._drafts is None else self._drafts.checkpoint
        if self._drafts is not None and draft is not None:
            with open_weights(
                draft.folder, load_format, draft.quantization, self.dtype, self.device, on_progress
            ) as source:
                self._drafts.load(
                    ModelBuild(
                        draft.config or self._whole_config,
                        source,
                        self.kernels,
                        self.dtype,
                        self.device,
                        self.max_model_len,
                    ),
                    self.model,
                )
                source.finish()

    def _build(self, source: WeightSource) -> LanguageModel:
        if self._whole_config.experts is not None:
            self.expert_loads = ExpertLoads(
                self._whole_config.experts,
                self.device,
                self.ranks.expert_groups,
                self._stage.first_layer,
            )
        build = ModelBuild(
            self._whole_config,
            source,
            self.kernels,
            self.dtype,
            self.device,
            self.max_model_len,
            self._adapters,
            self.ranks,
            self._stage,
            self.expert_loads,
        )
        if self._drafts is not None:
            build = self._drafts.wanted(build)
        model = build_model(build)
        if self._drafts is not None:
            self._drafts.share(build, model)
        if self.config.labels is not None:
            shape = (len(self.config.labels.names), self.config.hidden_size)
            self.score_head = source.take("score.weight", shape, torch.float64).cpu()
        if self._stage.is_whole:
            source.finish()
        return model


def resolve_dtype(dtype: torch.dtype | str, device: str = "cpu") -> torch.dtype:
    """The dtype to compute in. "auto" is bfloat16 on a GPU, and on a CPU for which kernels are
    compiled, or that multiplies it natively (AVX512-BF16 or AMX, if oneDNN's settings allow it);
    else float32.

    Raises:
        InvalidRequest: an unknown name, or bfloat16 in Triton's interpreter.
    """
    is_on_cpu = device == "cpu"
    if dtype == "auto":
        return torch.bfloat16 if _is_bfloat16_fast(is_on_cpu) else torch.float32
    known = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if known is None or known not in DTYPES.values():
        raise InvalidRequest.of("dtype", str(dtype), f"auto or one of {', '.join(DTYPES)}")
    if known is torch.bfloat16 and not is_on_cpu and is_interpreted():
        allowed = "auto, float32 or float16: Triton's interpreter computes bfloat16 wrongly"
        raise InvalidRequest.of("dtype", "bfloat16", allowed)
    return known


def _is_bfloat16_fast(is_on_cpu: bool) -> bool:
    if not is_on_cpu:
        return not is_interpreted()
    return has_fast_bfloat16() or why_not_native(torch.bfloat16) is None


def why_slow(dtype: str, device: str, kernels: str) -> str | None:
    """What an engine with these flags says where torch calls compute what compiled kernels would;
    None where nothing is missing, or they were asked for. Raises InvalidRequest, see
    `why_not_native`."""
    if device != "cpu" or kernels != "auto" or dtype not in ("auto", "bfloat16"):
        return None
    missing = why_not_native(torch.bfloat16)
    chosen = "kernels=cpu takes torch calls without a warning"
    return missing and f"torch calls run, slower than compiled CPU kernels: {missing} ({chosen})"


def has_fast_bfloat16() -> bool:
    """Whether bfloat16 products run natively on this CPU, given ONEDNN_MAX_CPU_ISA."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    if limit and limit not in ("DEFAULT", "ALL") and "BF16" not in limit and "AMX" not in limit:
        return False
    # Private in torch 2.11 to 2.13, so its presence is checked.
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, probe, bool)()) for probe in probes)


def _pageable(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def _accelerator_of(device: str) -> Accelerator | None:
    """None for the CPU, which needs none."""
    if device == "cpu":
        return None
    if torch.device(device).type != "cuda":
        raise InvalidRequest.of("device", device, "cpu, cuda or cuda:N")
    return accelerator_for(device)


def _checked_model_len(max_model_len: int | None, config: ModelConfig) -> int:
    if max_model_len is None:
        return config.context_length
    if not 1 <= max_model_len <= config.context_length:
        allowed = f"an integer in [1, {config.context_length}], the model's context length"
        raise InvalidRequest.of("max_model_len", max_model_len, allowed)
    return max_model_len


def _require_divisible(config: ModelConfig, *, device: str, num_adapters: int) -> None:
    """Raises InvalidRequest where a step's tokens cannot be divided between ranks."""
    why, name = None, config.architecture
    if device != "cpu":
        why = "GPUs do not divide tokens"
    elif config.latent is not None and config.latent.indexer is not None:
        why = f"{name}, whose layers select keys, needs the keys of all ranks"
    elif config.recurrent is not None and num_adapters:
        why = f"{name}, whose layers are recurrent, does not divide tokens beside LoRA adapters"
    if why is not None:
        raise InvalidRequest(f"cp_size > 1 is not allowed: {why}; use tp_size", "cp_size")
