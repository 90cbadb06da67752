"""Predicted step times, times to first token and per token, and throughput. Torch-free."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from .closed_loop import ClosedLoop, Load, ModelledDevice
from .roofline import CostModel, StepTime


@dataclass(frozen=True, slots=True)
class NamedStep:
    """A step of one kind."""

    name: str
    rows: tuple[tuple[int, int], ...]  # (tokens computed, tokens before them)


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """Seconds, and tokens a second over all clients."""

    ttft_s: float  # median
    ttft_p99_s: float
    tpot_s: float  # median
    output_tokens_s: float

    @classmethod
    def of(cls, loop: ClosedLoop, duration_s: float) -> LoadFigures:
        """The figures of a completed load."""
        ttfts_s = sorted(answer.ttft_s for answer in loop.answers)
        return cls(
            statistics.median(ttfts_s),
            ttfts_s[-(-len(ttfts_s) * 99 // 100) - 1],
            statistics.median(answer.tpot_s for answer in loop.answers),
            loop.num_output_tokens / duration_s,
        )


def usual_steps(batches: Sequence[int], prompt_tokens: int, context: int) -> list[NamedStep]:
    """Decode steps of `batches` rows with `context` tokens each, and a new prompt."""
    decodes = [NamedStep(f"decode, batch {num}", ((1, context),) * num) for num in batches]
    return [*decodes, NamedStep(f"prefill of {prompt_tokens} tokens", ((prompt_tokens, 0),))]


def predict_step(costs: CostModel, step: NamedStep) -> StepTime:
    """The time of a step in which every row samples."""
    return costs.step_time(step.rows, len(step.rows))


def predict_load(
    stages: Sequence[CostModel],
    load: Load,
    *,
    kv_tokens: int,
    token_budget: int,
    max_running_requests: int,
) -> LoadFigures:
    """Run the load on the real scheduler with a modelled device."""
    device = ModelledDevice(*stages)
    loop = ClosedLoop(
        device,
        load,
        clock=device.clock,
        vocab_size=stages[-1].model.config.vocab_size,
        kv_tokens=kv_tokens,
        token_budget=token_budget,
        max_running_requests=max_running_requests,
        num_stages=device.num_stages,
    )
    return LoadFigures.of(loop, loop.run())
