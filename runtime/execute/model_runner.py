"""Carries out step plans: owns the model, its KV pool and the page table of one device.

Decides nothing: which rows run, with which pages, comes in with the plan. How a step is run is
in_order.py's on a CPU and queued.py's on an accelerator.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import torch

from ...errors import InvalidRequest
from ...kernels.registry import KernelMode, Kernels, select_kernels
from ...kernels.triton.availability import is_interpreted
from ..memory.device_pool import DeviceKVPool
from ..memory.host_pool import HostKVPool, PinnedKVPool
from ..memory.queued_transfer import QueuedKVTransfer
from ..memory.sizing import activation_bytes, num_pages_for
from ..memory.transfer import KVTransfer
from ..model_config import ModelConfig
from ..models.registry import CausalLM, model_class
from ..sampling_params import SamplingParams
from ..step import PageUpdate, PendingStep, Row, StepPlan, StepResult
from ..weights.checkpoint import CheckpointWeights
from ..weights.dummy import DummyWeights
from ..weights.source import ProgressCallback, WeightSource
from .accelerator import Accelerator, accelerator_for
from .graphs import DEFAULT_MAX_GRAPH_TOKENS
from .in_order import InOrderSteps
from .inputs import InputBuilder
from .queued import QueuedSteps, StepSizes

LoadFormat = Literal["auto", "safetensors", "dummy"]

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
# Of what is free on a GPU once the weights are there, for KV (vLLM's and SGLang's shares are
# similar); activations and graphs are taken off before.
DEFAULT_GPU_MEM_FRACTION = 0.9


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
        device: str = "cpu",
        num_pages: int | None = None,
        max_total_tokens: int | None = None,
        mem_fraction: float | None = None,
        page_size: int = 1,
        num_host_pages: int = 0,
        max_running_requests: int = 64,
        max_model_len: int | None = None,
        max_step_tokens: int = 2048,
        max_graph_tokens: int = DEFAULT_MAX_GRAPH_TOKENS,
        kernels: KernelMode | Kernels = "auto",
        load_format: LoadFormat = "auto",
        on_progress: ProgressCallback | None = None,
    ) -> None:
        """Loads the weights, then takes KV memory: `num_pages`, or `max_total_tokens`, or
        `mem_fraction` of what is free then.

        device: "cpu", "cuda" or "cuda:N". max_step_tokens: of the largest plan; memory for its
        activations is left free on a GPU. max_graph_tokens: steps of up to so many tokens are
        recorded there; 0: none.

        Raises:
            ModelLoadError: the checkpoint cannot be loaded.
            InvalidRequest: an argument out of range, or no room for the KV of one sequence.
        """
        self.accelerator: Accelerator | None = (
            None if str(device) == "cpu" else accelerator_for(str(device))
        )
        self.device = torch.device("cpu") if self.accelerator is None else self.accelerator.device
        self.config = model_config
        self.dtype = resolve_dtype(dtype, str(device))
        self.page_size = page_size
        self.max_model_len = _checked_model_len(max_model_len, model_config)
        self.kernels: Kernels = (
            kernels
            if isinstance(kernels, Kernels)
            else select_kernels(self.dtype, str(device), kernels)
        )
        self.model = self._load(Path(model_folder), load_format, on_progress)
        if num_pages is None:
            num_pages = num_pages_for(
                model_config,
                dtype_bytes=self.dtype.itemsize,
                page_size=page_size,
                max_running_requests=max_running_requests,
                max_model_len=self.max_model_len,
                max_total_tokens=max_total_tokens,
                mem_fraction=self._mem_fraction(mem_fraction),
                available_bytes=self._available_bytes(max_step_tokens, max_running_requests),
            )
        self.pool = DeviceKVPool(
            model_config,
            num_pages=num_pages,
            page_size=page_size,
            dtype=self.dtype,
            device=self.device,
            num_spare_pages=0 if self.accelerator is None else 1,
        )
        self.steps: InOrderSteps | QueuedSteps = (
            self._in_order(num_host_pages, max_running_requests)
            if self.accelerator is None
            else self._queued(
                self.accelerator, num_host_pages, max_running_requests, max_graph_tokens
            )
        )
        self.can_overlap = self.steps.can_overlap
        self.segment_cost_tokens = self.kernels.segment_cost_tokens

    @property
    def num_pages(self) -> int:
        """Pages of the KV pool; ids 0 to num_pages - 1 may be handed out."""
        return self.pool.num_pages

    def submit(self, plan: StepPlan) -> PendingStep:
        """Make the plan's copies between tiers, then compute its tokens, store their KV, and
        sample, score and sum hidden states where rows ask for it. On an accelerator this is queued.

        A row whose logits or sums are not finite gets `error`; the others are not affected.
        """
        return self.steps.submit(plan)

    def execute(self, plan: StepPlan) -> StepResult:
        """Submit a plan and wait for its result."""
        return self.submit(plan).result()

    def warm_up(self) -> None:
        """Run a short prompt and two decode steps, so that the first request pays no set-up; on a
        GPU, all sizes of steps that are recorded.

        NOTE: writes to page 0 on; call it before any page is in use.
        """
        length = min(16, self.max_model_len - 2, self.num_pages * self.page_size - 2)
        if length < 1:
            return
        pages = tuple(range(-(-(length + 2) // self.page_size)))
        sampling = SamplingParams(temperature=0.0)
        prompt = Row(0, 0, 0, (0,) * length, PageUpdate(0, pages), sampling=sampling)
        self.execute(StepPlan(0, (prompt,)))
        for step in range(2):
            row = Row(0, 0, length + step, (0,), from_previous=0, sampling=sampling)
            self.execute(StepPlan(1 + step, (row,)))
        if isinstance(self.steps, QueuedSteps) and not self.steps.is_interpreted:
            self.steps.record_all()

    def _load(
        self, folder: Path, load_format: LoadFormat, on_progress: ProgressCallback | None
    ) -> CausalLM:
        if load_format == "dummy":
            return self._build(DummyWeights(self.dtype, self.device))
        with CheckpointWeights(folder, self.dtype, self.device, on_progress) as source:
            return self._build(source)

    def _build(self, source: WeightSource) -> CausalLM:
        model = model_class(self.config.architecture)(
            self.config,
            source,
            self.kernels,
            dtype=self.dtype,
            device=self.device,
            max_model_len=self.max_model_len,
        )
        source.finish()
        return model

    def _in_order(self, num_host_pages: int, max_running_requests: int) -> InOrderSteps:
        host_pool = HostKVPool(self.pool, num_host_pages) if num_host_pages else None
        inputs = InputBuilder(
            self.kernels,
            self.pool.layers,
            num_heads=self.config.num_heads,
            page_size=self.page_size,
            max_running_requests=max_running_requests,
            max_model_len=self.max_model_len,
        )
        return InOrderSteps(self.model, self.kernels, inputs, KVTransfer(self.pool, host_pool))

    def _queued(
        self,
        accelerator: Accelerator,
        num_host_pages: int,
        max_running_requests: int,
        max_graph_tokens: int,
    ) -> QueuedSteps:
        host_pool = PinnedKVPool(self.pool, num_host_pages) if num_host_pages else None
        with accelerator.queue():
            transfer = QueuedKVTransfer(
                self.pool, host_pool, self.kernels.make_page_copy, accelerator
            )
            sizes = StepSizes(
                num_heads=self.config.num_heads,
                hidden_size=self.config.hidden_size,
                vocab_size=self.config.vocab_size,
                max_running_requests=max_running_requests,
                max_model_len=self.max_model_len,
                max_graph_tokens=max_graph_tokens,
            )
            return QueuedSteps(self.model, self.kernels, self.pool, transfer, accelerator, sizes)

    def _mem_fraction(self, asked: float | None) -> float | None:
        return DEFAULT_GPU_MEM_FRACTION if asked is None and self.accelerator else asked

    def _available_bytes(self, max_step_tokens: int, max_running_requests: int) -> int | None:
        """On an accelerator, less what a step needs beside the KV; None: the host's."""
        if self.accelerator is None:
            return None
        needed = activation_bytes(
            self.config, self.dtype.itemsize, max_step_tokens, max_running_requests
        )
        return max(0, self.accelerator.available_bytes() - needed)


def resolve_dtype(dtype: torch.dtype | str, device: str = "cpu") -> torch.dtype:
    """The dtype to compute in; "auto" is bfloat16 where it is multiplied natively: on a GPU (but
    not in Triton's interpreter, which gets it wrong), and on CPUs with AVX512-BF16 or AMX where
    oneDNN is not told otherwise; else float32.

    Raises:
        InvalidRequest: an unknown name.
    """
    if isinstance(dtype, torch.dtype):
        if dtype not in DTYPES.values():
            raise InvalidRequest.of("dtype", str(dtype), f"one of {', '.join(DTYPES)}")
        return dtype
    if dtype == "auto":
        is_fast = has_fast_bfloat16() if device == "cpu" else not is_interpreted()
        return torch.bfloat16 if is_fast else torch.float32
    if dtype not in DTYPES:
        raise InvalidRequest.of("dtype", dtype, f"auto or one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def has_fast_bfloat16() -> bool:
    """Whether bfloat16 products run natively on this CPU, under ONEDNN_MAX_CPU_ISA too."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    if limit and limit not in ("DEFAULT", "ALL") and "BF16" not in limit and "AMX" not in limit:
        return False
    # Private in torch 2.11 to 2.13, so looked for.
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, probe, bool)()) for probe in probes)


def _checked_model_len(max_model_len: int | None, config: ModelConfig) -> int:
    if max_model_len is None:
        return config.context_length
    if not 1 <= max_model_len <= config.context_length:
        allowed = f"an integer in [1, {config.context_length}], the model's context length"
        raise InvalidRequest.of("max_model_len", max_model_len, allowed)
    return max_model_len
