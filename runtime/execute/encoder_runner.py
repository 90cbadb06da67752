"""The device half of an encoder's engine: loads it, and computes whole texts.

A plan's rows are whole texts. They are packed end to end: a step costs what its tokens cost, and
nothing stays when it is done.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...errors import InvalidRequest
from ...frontend.client.progress import ByteProgress
from ...kernels.registry import KernelMode, Kernels, select_kernels
from ..checkpoint.config.embedding_config import DenseModule, EmbeddingConfig
from ..checkpoint.config.encoder_config import EncoderConfig
from ..checkpoint.loader import LoadFormat, open_weights
from ..checkpoint.quantized.quantizing import Quantization
from ..models.encoders.build import EncoderBuild
from ..models.encoders.dense import DenseLayers
from ..models.encoders.encoder import Encoder
from ..models.encoders.packed import PackedTexts, packed
from ..models.encoders.pooling import pooled
from ..models.encoders.score_head import Scores
from ..schedule.plan import Encoding, FinishedStep, Row, RowResult, StepPlan, StepResult
from .accelerator import Accelerator, accelerator_for
from .model_runner import has_fast_bfloat16, resolve_dtype

_NOT_FINITE = RowResult(error="the model produced non-finite vectors")


class EncoderRunner:
    """Executes plans of whole texts, one after the other. Not thread-safe."""

    can_overlap = False
    segment_cost_tokens = 1 << 30  # texts share nothing

    def __init__(
        self,
        folder: Path,
        config: EncoderConfig,
        *,
        dtype: torch.dtype | str = "auto",
        device: str = "cpu",
        kernels: KernelMode | Kernels = "auto",
        load_format: LoadFormat = "auto",
        quantization: Quantization | Literal["none"] = "none",
        embedding: EmbeddingConfig | None = None,
        on_progress: ByteProgress | None = None,
    ) -> None:
        """`embedding`: with the layers that follow its pooling. Raises ModelLoadError or
        InvalidRequest."""
        self.config = config
        self.dtype = encoder_dtype(dtype, device, quantization)
        self.accelerator = _accelerator_of(device)
        self.device = torch.device("cpu") if self.accelerator is None else self.accelerator.device
        self.kernels: Kernels = (
            kernels if isinstance(kernels, Kernels) else select_kernels(self.dtype, device, kernels)
        )
        is_deterministic = kernels == "deterministic"
        with open_weights(
            folder, load_format, quantization, self.dtype, self.device, on_progress
        ) as source:
            build = EncoderBuild(
                config, source, self.kernels, self.dtype, self.device, is_deterministic
            )
            self._is_exact = build.is_exact
            self.model = Encoder(build)
            self._scores = None if config.head is None else Scores(build, config.head)
            source.finish()
        dense: Sequence[DenseModule] = () if embedding is None else embedding.dense
        self._dense = DenseLayers(folder, dense)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> FinishedStep:
        """Compute the plan's texts. One whose vector is not finite gets `error`; others are not
        affected."""
        started = time.perf_counter()
        order = sorted(range(len(plan.rows)), key=lambda index: len(plan.rows[index].input_ids))
        rows = [plan.rows[index] for index in order]
        results = dict(zip(order, self._results(rows), strict=True)) if rows else {}
        outcomes = tuple(results[index] for index in range(len(plan.rows)))
        duration_s = time.perf_counter() - started
        return FinishedStep(StepResult(plan.step_id, outcomes, duration_s))

    def _results(self, rows: Sequence[Row]) -> list[RowResult]:
        asked = [row.encoding or Encoding() for row in rows]
        texts = packed(
            [row.input_ids for row in rows],
            [each.num_first for each in asked],
            self.config.padding_id,
            self.device,
            is_exact=self._is_exact,
        )
        hidden = self.model.forward(texts)
        outputs: list[RowResult] = [_NOT_FINITE] * len(rows)
        for kind in dict.fromkeys((each.pooling, each.has_scores) for each in asked):
            chosen = [i for i, each in enumerate(asked) if kind == (each.pooling, each.has_scores)]
            for index, vector in zip(chosen, self._read(hidden, texts, chosen, *kind), strict=True):
                if np.isfinite(vector).all():
                    outputs[index] = RowResult(pooled=vector)
        return outputs

    def _read(
        self,
        hidden: Tensor,
        texts: PackedTexts,
        chosen: Sequence[int],
        pooling: str,
        has_scores: bool,
    ) -> npt.NDArray[np.float64]:
        """[chosen, size]"""
        if not has_scores:
            return self._dense(pooled(hidden, texts, chosen, pooling).cpu().numpy())
        head = self.config.head
        assert head is not None and self._scores is not None, "this model has no scores"
        vectors = pooled(hidden, texts, chosen, head.pooling)
        logits: npt.NDArray[np.float64] = (
            self._scores(vectors.to(self.dtype)).double().cpu().numpy()
        )
        return logits


def encoder_dtype(
    dtype: torch.dtype | str,
    device: str = "cpu",
    quantization: Quantization | Literal["none"] = "none",
) -> torch.dtype:
    """As `resolve_dtype`, but that "auto" is float32 on a CPU that does not itself multiply
    bfloat16: compiled kernels read half of the bytes there and multiply no faster, and a step's
    tokens share each weight (`stemma bench encoding --dtype`). Weights rounded by `quantization`
    have kernels for bfloat16."""
    is_plain_cpu = device == "cpu" and not has_fast_bfloat16()
    if dtype == "auto" and is_plain_cpu and quantization == "none":
        return torch.float32
    return resolve_dtype(dtype, device)


def _accelerator_of(device: str) -> Accelerator | None:
    """None for the CPU, which needs none."""
    if device == "cpu":
        return None
    if torch.device(device).type != "cuda":
        raise InvalidRequest.of("device", device, "cpu, cuda or cuda:N")
    return accelerator_for(device)
