"""A model whose logits of every token can be had, for benchmarks of what formats cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...runtime.schedule.plan import PageUpdate, Row, StepPlan
from ...runtime.schedule.sampling_params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from ...kernels.ops import MakeOutputLinear, OutputLinear, Weight
    from ...kernels.registry import Kernels
    from ...runtime.execute.model_runner import ModelRunner


class Scorer:
    """Computes one text at a time."""

    def __init__(
        self, model: Path, kernels: Kernels, *, dtype: str, max_total_tokens: int, **options: Any
    ) -> None:
        """options: of `ModelRunner`."""
        from ...runtime.execute.model_runner import ModelRunner
        from ...runtime.models.model_config import read_model_config

        self._seen: list[Tensor] = []
        self._runner: ModelRunner = ModelRunner(
            model,
            read_model_config(model),
            dtype=dtype,
            kernels=replace(
                kernels,
                capture=None,
                make_output_linear=self._watching(kernels.make_output_linear),
            ),
            max_total_tokens=max_total_tokens,
            max_running_requests=1,
            **options,
        )

    def write(
        self, prompt: list[int], num_tokens: int, sampling: SamplingParams, end: int | None = None
    ) -> list[int]:
        """The prompt and the model's output of so many tokens, up to the token `end`."""
        text, start = list(prompt), 0
        for _ in range(num_tokens):
            row = self._row(text[start:], start, sampling=sampling)
            result = self._runner.execute(StepPlan(0, (row,))).rows[0]
            assert result.token_id is not None, result.error
            start = len(text)
            text.append(result.token_id)
            if result.token_id == end:
                break
        return text

    def logits(self, text: list[int]) -> Tensor:
        """[tokens, vocab_size] float32."""
        import torch

        self._seen.clear()
        self._runner.execute(StepPlan(0, (self._row(text, 0, target_ids=(*text[1:], 0)),)))
        return torch.cat(self._seen).float()

    def _row(self, ids: list[int], start: int, **wanted: Any) -> Row:
        update = PageUpdate(0, tuple(range(start + len(ids))))
        return Row(0, 0, start, tuple(ids), update, **wanted)

    def _watching(self, make: MakeOutputLinear) -> MakeOutputLinear:
        def make_watched(weight: Weight) -> OutputLinear:
            linear = make(weight)

            def watched(x: Tensor, out: Tensor | None = None) -> Tensor:
                logits = linear(x, out)
                self._seen.append(logits.clone())
                return logits

            return watched

        return make_watched
