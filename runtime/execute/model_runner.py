"""Carries out step plans: owns the model, its KV pool and the page table of one device.

Decides nothing: which rows run, with which pages, comes in with the plan.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...constrained.matcher import Mask
from ...errors import InvalidRequest
from ...kernels.adjusted_rows import AdjustedRows
from ...kernels.registry import KernelMode, Kernels, select_kernels
from ...kernels.sampling_rows import SamplingRows
from ...kernels.top_logprobs import top_logprobs
from ..memory.device_pool import DeviceKVPool
from ..memory.host_pool import HostKVPool
from ..memory.sizing import num_pages_for
from ..memory.transfer import KVTransfer
from ..model_config import ModelConfig
from ..models.registry import CausalLM, model_class
from ..sampling_params import SamplingParams
from ..step import (
    FinishedStep,
    PageUpdate,
    Row,
    RowResult,
    StepPlan,
    StepResult,
    TokenLogprob,
)
from ..weights.checkpoint import CheckpointWeights
from ..weights.dummy import DummyWeights
from ..weights.source import ProgressCallback, WeightSource
from .adjustments import RowAdjustment, adjusted_arrays
from .captured import CapturedForward
from .inputs import NO_TOKEN, InputBuilder, Int64Array, WantedLogits, wanted_logits
from .sampling_inputs import sampling_arrays

LoadFormat = Literal["auto", "safetensors", "dummy"]

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
NON_FINITE = "the model produced non-finite logits"
NON_FINITE_STATES = "the model produced non-finite hidden states"
NOTHING_ALLOWED = "the grammar allows no token"
_NOTHING = RowResult()
# Scored positions whose logits are in memory at once: 256 x 152k float32 is 155 MB.
_SCORED_AT_ONCE = 256


class ModelRunner:
    """One device's half of the runtime; lives as long as its engine. Not thread-safe.

    Plans come one after the other; `from_previous` in a plan refers to the plan before.
    """

    can_overlap = False

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
        kernels: KernelMode | Kernels = "auto",
        load_format: LoadFormat = "auto",
        on_progress: ProgressCallback | None = None,
    ) -> None:
        """Loads the weights, then takes KV memory: `num_pages`, or `max_total_tokens`, or
        `mem_fraction` of what is free then.

        Raises:
            ModelLoadError: the checkpoint cannot be loaded.
            InvalidRequest: an argument out of range, or no room for the KV of one sequence.
        """
        self.config = model_config
        self.dtype = resolve_dtype(dtype)
        self.device = _checked_device(device)
        self.page_size = page_size
        self.max_model_len = _checked_model_len(max_model_len, model_config)
        self.kernels: Kernels = (
            kernels
            if isinstance(kernels, Kernels)
            else select_kernels(self.dtype, self.device, kernels)
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
                mem_fraction=mem_fraction,
            )
        self.pool = DeviceKVPool(
            model_config,
            num_pages=num_pages,
            page_size=page_size,
            dtype=self.dtype,
            device=self.device,
        )
        self.host_pool = HostKVPool(self.pool, num_host_pages) if num_host_pages else None
        self._transfer = KVTransfer(self.pool, self.host_pool)
        self._inputs = InputBuilder(
            self.kernels,
            self.pool.layers,
            num_heads=model_config.num_heads,
            page_size=page_size,
            max_running_requests=max_running_requests,
            max_model_len=self.max_model_len,
        )
        self._previous_tokens: Int64Array = np.zeros(0, dtype=np.int64)
        self._forward = CapturedForward(self.model, self.kernels.capture)
        self.segment_cost_tokens = self.kernels.segment_cost_tokens

    @property
    def num_pages(self) -> int:
        """Pages of the KV pool; ids 0 to num_pages - 1 may be handed out."""
        return self.pool.num_pages

    def submit(self, plan: StepPlan) -> FinishedStep:
        """Compute the plan's step now."""
        return FinishedStep(self.execute(plan))

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Make the plan's copies between tiers, then compute its tokens, store their KV, and
        sample, score and sum hidden states where rows ask for it.

        A row whose logits or sums are not finite gets `error`; the others are not affected.
        """
        started = time.perf_counter()
        payloads = self._transfer.run(plan.transfers)
        transfer_s = time.perf_counter() - started if plan.transfers else None
        if not plan.rows:
            return StepResult(plan.step_id, (), None, transfer_s, payloads)
        started = time.perf_counter()
        batch, layout = self._inputs.build(plan, self._previous_tokens)
        wanted = wanted_logits(plan, layout)
        hidden = self._forward(batch)
        results = [_NOTHING] * len(plan.rows)
        previous: Int64Array = np.full(len(plan.rows), NO_TOKEN, dtype=np.int64)
        if wanted.sampled_rows:
            self._sample(plan, wanted, hidden, results, previous)
        if wanted.scored_tokens is not None:
            self._score(plan, wanted, wanted.scored_tokens, hidden, results)
        for index, first, end in wanted.pooled:
            results[index] = _pooled(hidden[first:end])
        self._previous_tokens = previous
        duration_s = time.perf_counter() - started
        return StepResult(plan.step_id, tuple(results), duration_s, transfer_s, payloads)

    def warm_up(self) -> None:
        """Run a short prompt and two decode steps, so that the first request pays no set-up.

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

    def _sample(
        self,
        plan: StepPlan,
        wanted: WantedLogits,
        hidden: Tensor,
        results: list[RowResult],
        previous: Int64Array,
    ) -> None:
        """Fill in the results and `previous` of the rows that sample."""
        picked = hidden if wanted.sampled_tokens is None else hidden[wanted.sampled_tokens]
        logits = self.model.compute_logits(picked)
        params = [_sampling_of(plan.rows[index]) for index in wanted.sampled_rows]
        raw = self._adjust([plan.rows[index] for index in wanted.sampled_rows], logits)
        if plan.masks is not None:
            self._mask(plan, plan.masks, wanted, logits)
        arrays = sampling_arrays(params, wanted.sampled_positions)
        token_ids, is_finite = self.kernels.sample(logits, SamplingRows(**_tensors(arrays)))
        # A failed row's token is never shown, but a plan made ahead may name it.
        previous[list(wanted.sampled_rows)] = token_ids.numpy()
        for index, token_id in zip(wanted.sampled_rows, token_ids.tolist(), strict=True):
            results[index] = RowResult(token_id=token_id)
        for place, index in enumerate(wanted.sampled_rows):
            if params[place].logprobs is not None:
                own = raw.get(place, logits[place])
                results[index] = self._with_logprobs(results[index], own, params[place])
        for place in np.flatnonzero(~is_finite.numpy()).tolist():
            index = wanted.sampled_rows[place]
            results[index] = RowResult(error=_why_not_finite(plan, plan.rows[index]))

    def _adjust(self, rows: Sequence[Row], logits: Tensor) -> dict[int, Tensor]:
        """Change the logits [len(rows), vocab_size] of rows that ask for it; by place, what the
        model said of the rows that want logprobs, where that is or will be changed."""
        adjusted = [
            RowAdjustment(
                place,
                _sampling_of(row),
                row.adjustment,
                -1 if row.from_previous is None else row.from_previous,
            )
            for place, row in enumerate(rows)
            if row.adjustment is not None
        ]
        wanted = [
            place
            for place, row in enumerate(rows)
            if (row.adjustment is not None or row.mask is not None)
            and _sampling_of(row).logprobs is not None
        ]
        raw = {place: logits[place].clone() for place in wanted}
        if adjusted:
            arrays = adjusted_arrays(adjusted, logits.shape[-1])
            previous_tokens = torch.from_numpy(self._previous_tokens)
            self.kernels.adjust_logits(logits, AdjustedRows(**_tensors(arrays)), previous_tokens)
        return raw

    def _mask(self, plan: StepPlan, masks: Mask, wanted: WantedLogits, logits: Tensor) -> None:
        """Leave the rows under a grammar only what it allows."""
        masked = [
            (place, mask)
            for place, index in enumerate(wanted.sampled_rows)
            if (mask := plan.rows[index].mask) is not None
        ]
        places, order = zip(*masked, strict=True)
        packed = torch.from_numpy(masks[list(order)].view(np.int32)).to(self.device)
        rows = torch.tensor(places, device=self.device)
        self.kernels.apply_token_mask(logits, rows, packed)

    def _with_logprobs(
        self, result: RowResult, logits: Tensor, params: SamplingParams
    ) -> RowResult:
        assert result.token_id is not None and params.logprobs is not None
        chosen = torch.tensor([result.token_id], device=logits.device)
        return replace(
            result,
            logprob=float(self.kernels.token_logprobs(logits[None], chosen)[0]),
            top_logprobs=_tops(logits, params.logprobs),
        )

    def _score(
        self,
        plan: StepPlan,
        wanted: WantedLogits,
        tokens: Tensor,
        hidden: Tensor,
        results: list[RowResult],
    ) -> None:
        """Fill in the target log-probabilities of the rows that have targets."""
        targets = torch.from_numpy(wanted.target_ids).to(self.device)
        logprobs: list[float] = []
        best: list[int] = []
        nums = [n for i in wanted.scored_rows for n in _num_tops(plan.rows[i])]
        tops: list[tuple[TokenLogprob, ...]] = []
        for first in range(0, len(targets), _SCORED_AT_ONCE):
            part = slice(first, first + _SCORED_AT_ONCE)
            logits = self.model.compute_logits(hidden[tokens[part]])
            logprobs += self.kernels.token_logprobs(logits, targets[part]).tolist()
            best += logits.argmax(dim=-1).tolist()
            tops += [_tops(row, num) if num else () for row, num in zip(logits, nums[part])]
        first = 0
        for index in wanted.scored_rows:
            part = slice(first, first + len(plan.rows[index].target_ids))
            results[index] = _with_targets(results[index], logprobs[part], best[part])
            if plan.rows[index].num_top_targets and results[index].error is None:
                results[index] = replace(results[index], target_tops=tuple(tops[part]))
            first = part.stop


def resolve_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """The dtype to compute in; "auto" is bfloat16 where this CPU multiplies it natively
    (AVX512-BF16 or AMX, and oneDNN is not told otherwise), else float32.

    Raises:
        InvalidRequest: an unknown name.
    """
    if isinstance(dtype, torch.dtype):
        if dtype not in DTYPES.values():
            raise InvalidRequest.of("dtype", str(dtype), f"one of {', '.join(DTYPES)}")
        return dtype
    if dtype == "auto":
        return torch.bfloat16 if has_fast_bfloat16() else torch.float32
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


def _checked_device(device: torch.device | str) -> torch.device:
    if str(device) != "cpu":
        raise InvalidRequest.of("device", str(device), "cpu")
    return torch.device(device)


def _checked_model_len(max_model_len: int | None, config: ModelConfig) -> int:
    if max_model_len is None:
        return config.context_length
    if not 1 <= max_model_len <= config.context_length:
        allowed = f"an integer in [1, {config.context_length}], the model's context length"
        raise InvalidRequest.of("max_model_len", max_model_len, allowed)
    return max_model_len


def _sampling_of(row: Row) -> SamplingParams:
    assert row.sampling is not None, "only rows that sample are asked for their parameters"
    return row.sampling


def _why_not_finite(plan: StepPlan, row: Row) -> str:
    has_mask = plan.masks is not None and row.mask is not None
    is_empty = has_mask and not plan.masks[row.mask].any()  # type: ignore[index]
    return NOTHING_ALLOWED if is_empty else NON_FINITE


def _tensors(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _tops(logits: Tensor, count: int) -> tuple[TokenLogprob, ...]:
    """The best tokens of one row of logits [vocab_size], best first."""
    token_ids, logprobs = top_logprobs(logits[None], min(count, logits.shape[-1]))
    return tuple(map(TokenLogprob, token_ids[0].tolist(), logprobs[0].tolist()))


def _num_tops(row: Row) -> list[int]:
    """How many of the best tokens are told, by target."""
    return [row.num_top_targets] * len(row.target_ids)


def _with_targets(result: RowResult, logprobs: list[float], best: list[int]) -> RowResult:
    if not np.isfinite(logprobs).all():
        return RowResult(error=NON_FINITE)
    return replace(result, target_logprobs=tuple(logprobs), target_argmax=tuple(best))


def _pooled(hidden: Tensor) -> RowResult:
    """hidden [N, hidden_size] -> their sum, in float64 whatever they are in."""
    total = hidden.sum(dim=0, dtype=torch.float64).numpy()
    if not np.isfinite(total).all():
        return RowResult(error=NON_FINITE_STATES)
    return RowResult(pooled=total)
