"""The forward pass of a step on an accelerator, captured in a graph for each padded size.

What rows attend to is data, and so are the rows' pages, positions and number: a step of any mix of
prompt chunks and decodes fills the arrays of the next larger size and replays that size's graph.
The arrays are in one buffer of fixed layout, into which a step's arrays are copied on the device.

    a step of 21 tokens   |token_ids 21 + 3|sources 21 + 3|...|attention's lists, as for 24 tokens|

Padding tokens attend to nothing, and write their KV to a spare page that no row has. The pass ends
with the logits of the rows that sample. Small sizes have a second graph, for steps of rows that
decode and draw without more ado: it draws their tokens too, and lacks the launches of attention
that such steps have nothing for. A decode step is then this one launch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...kernels.ops import DevicePlan, RecurrentState
from ...kernels.registry import Kernels
from ...kernels.sampling_rows import SamplingRows
from ..checkpoint.config.model_config import ModelConfig
from ..memory.device_pool import DeviceKVPool
from ..memory.state_pool import StatePool
from ..models.forward_batch import ForwardBatch
from ..models.language_model import LanguageModel
from .accelerator import Accelerator
from .inputs import NO_SOURCE, StepInputs, WantedLogits, plan_attentions
from .staging import Field, Staged, num_bytes_of

Arrays = dict[str, npt.NDArray[Any]]

# (from, step): sizes go up by `step` from there. Small ones are decode steps, whose time does not
# depend on padding; from 64 on at most an eighth of a size is padding, and products are cut in
# blocks of 64 or 128 tokens anyhow.
_STEPS = ((8, 8), (256, 32), (512, 64), (1024, 128), (2048, 256))
_SMALL = (1, 2, 4)

# Steps of up to so many tokens have a graph that draws. What it saves, some 2 us a layer and five
# launches, is little beside larger steps (a guess), and each graph takes time at the start.
MAX_DRAWN_TOKENS = 64

# Of rows that only fill a graph: the best of the first token's logits.
_DRAWS_OF_PADDING = {
    "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "position": 0,
}  # fmt: skip


def graph_sizes(max_tokens: int) -> tuple[int, ...]:
    """The padded sizes for steps of up to `max_tokens` tokens, ascending; none for 0.

    Every step of at most `max_tokens` tokens fits the last one.
    """
    if max_tokens == 0:
        return ()
    sizes = list(_SMALL)
    for (first, step), end in zip(_STEPS, [start for start, _ in _STEPS[1:]] + [max_tokens]):
        sizes += range(first, end, step)
    sizes.append(-(-max_tokens // 8) * 8 if max_tokens > _SMALL[-1] else max_tokens)
    return tuple(sorted({*takewhile(lambda size: size < max_tokens, sizes), sizes[-1]}))


@dataclass(frozen=True, slots=True)
class PreparedForward:
    """A step's forward pass on the host: what must be on the device before `GraphForward` runs."""

    arrays: Arrays
    # A plan for each kind of attention: a DevicePlan, or one that the kernels take as it is.
    attention: tuple[object, ...]
    adapters: object | None  # the same for the tokens' adapters; None: no token has one
    recurrence: object | None  # the same for the rows' states; None: the model has none
    padded_tokens: int | None  # None: the step is not padded, nor captured
    num_sampled: int
    has_drafts: bool
    draws: bool  # whether the graph draws the tokens, and leaves no logits


class ForwardResult(NamedTuple):
    """Valid until the next pass."""

    hidden: Tensor  # [>= T, hidden_size]; of a graph that draws it holds anything
    logits: Tensor | None  # [N, vocab_size] of the rows that sample; None if no row does
    drawn: dict[str, Tensor] | None  # the answers of a graph that draws, as the sampler names them


@dataclass(frozen=True, slots=True)
class _Plans:
    """Those of a step, on the device."""

    attention: tuple[object, ...]
    adapters: object | None
    recurrence: object | None


@dataclass(frozen=True, slots=True)
class _Graph:
    inputs: Staged  # at fixed addresses
    replay: Callable[[], None]
    plans: _Plans  # NOTE: the graph reads their memory; they must live as long.


class GraphForward:
    """Owns the graphs, and what they read: the page table and the last sampled tokens.

    Invariant: a captured step's results are in the same tensors as any other step's, valid until
    the next call.
    """

    def __init__(
        self,
        model: LanguageModel,
        kernels: Kernels,
        pool: DeviceKVPool,
        accelerator: Accelerator,
        *,
        table_shape: tuple[int, int],
        config: ModelConfig,
        dtype: torch.dtype,
        sizes: tuple[int, ...],
        num_adapter_slots: int = 0,
        states: StatePool | None = None,
        has_logits: bool = True,
    ) -> None:
        """states: of a model with recurrent layers. has_logits: False: other stages have the layers
        behind."""
        self._model = model
        self._kernels = kernels
        self._pool = pool
        self._spare_slot = pool.num_pages * pool.page_size
        self._accelerator = accelerator
        self._config = config
        self._max_rows = table_shape[0]
        self._num_adapter_slots = num_adapter_slots
        self._has_logits = has_logits
        self._states: tuple[RecurrentState, ...] = () if states is None else states.layers
        self.drafted: object | None = None  # the recurrence's plan of a last step with drafts
        # By (size, with adapters, draws).
        self._graphs: dict[tuple[int, bool, bool], _Graph] = {}
        self.sizes = sizes
        device = accelerator.device
        self.page_table = torch.zeros(table_shape, dtype=torch.int32, device=device)
        # [max_running_requests] int64, by row of the previous plan; and one for padding
        self.previous = torch.zeros(self._max_rows + 1, dtype=torch.int64, device=device)
        self._token_ids = torch.zeros(self._max_rows, dtype=torch.int64, device=device)
        self._is_finite = torch.zeros(self._max_rows, dtype=torch.bool, device=device)
        largest = sizes[-1] if sizes else 0
        wide = torch.promote_types(dtype, torch.float32)
        self._hidden = torch.empty((largest, config.hidden_size), dtype=dtype, device=device)
        num_logits = min(largest, self._max_rows) if has_logits else 0
        self._logits = torch.empty((num_logits, config.vocab_size), dtype=wide, device=device)

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def prepare(
        self, inputs: StepInputs, wanted: WantedLogits, draws: Arrays | None = None
    ) -> PreparedForward:
        """Lay out the step's arrays, padded if a size fits. draws: the sampler's arrays if nothing
        but plain draws is asked of the step."""
        tokens = wanted.sampled_tokens
        if tokens is None:
            tokens = np.arange(len(wanted.sampled_rows))
        padded = self._padded_size(inputs.num_tokens)
        if len(tokens) > self._max_rows:
            padded = None  # more draws, of drafts, than a graph has logits
        has_drafts = bool(self._states) and bool(inputs.state_rows.num_drafts.any())
        if has_drafts:
            padded = None  # what is kept of them outlives the step
        recurrence = None
        if self._states:
            recurrence = self._kernels.recurrence.plan(inputs.state_rows, padded)
            if not isinstance(recurrence, DevicePlan):
                padded = None
        attention = plan_attentions(
            self._kernels, inputs.attention_rows, self._pool.layers, self._config, padded
        )
        if not all(isinstance(plan, DevicePlan) and plan.is_replayable for plan in attention):
            padded = None  # the plan contains this step's integers: it cannot be replayed
        light = [plan.light for plan in attention if isinstance(plan, DevicePlan)]
        is_decode = wanted.sampled_tokens is None and None not in light
        if draws is not None and padded is not None and is_decode and self.draws_at(padded):
            attention = tuple(
                replace(plan, arrays=arrays)
                for plan, arrays in zip(attention, light, strict=True)
                if isinstance(plan, DevicePlan) and arrays is not None
            )
        else:
            draws = None
        adapters = None
        if inputs.adapters is not None:
            adapters = self._kernels.plan_lora(inputs.adapters, self._num_adapter_slots, padded)
        size = inputs.num_tokens if padded is None else padded
        num_rows = len(tokens) if padded is None else min(padded, self._max_rows)
        sources = np.zeros(0, dtype=np.int64) if inputs.sources is None else inputs.sources
        arrays: Arrays = {
            "token_ids": _padded(inputs.token_ids, size, 0),
            "sources": _padded(sources, size, NO_SOURCE),
            "positions": _padded(inputs.positions, size, 0),
            "slots": _padded(inputs.slots, size, self._spare_slot),
            "sampled_tokens": _padded(tokens, num_rows, 0),
            "num_tokens": np.array([inputs.num_tokens], dtype=np.int32),
        }
        if draws is not None:
            arrays |= self._padded_draws(draws, num_rows)
        plans = {_name_of(kind): plan for kind, plan in enumerate(attention)}
        others = {"adapters": adapters, "recurrence": recurrence}
        for prefix, plan in {**plans, **others}.items():
            if isinstance(plan, DevicePlan):
                arrays |= {f"{prefix}.{name}": array for name, array in plan.arrays.items()}
        num_sampled = len(tokens) if self._has_logits else 0
        return PreparedForward(
            arrays,
            attention,
            adapters,
            recurrence,
            padded,
            num_sampled,
            has_drafts,
            draws is not None,
        )

    def draws_at(self, size: int) -> bool:
        """Whether steps of this padded size, of a token each row, may have a graph that draws."""
        is_reached = self._padded_size(min(size, self._max_rows)) == size
        return self._has_logits and size <= MAX_DRAWN_TOKENS and is_reached

    def _padded_draws(self, draws: Arrays, num_rows: int) -> Arrays:
        rows = {
            f"sampling.{name}": _padded(draws[f"sampling.{name}"], num_rows, filler)
            for name, filler in _DRAWS_OF_PADDING.items()
        }
        return {**rows, "sampled_rows": _padded(draws["sampled_rows"], num_rows, self._max_rows)}

    def __call__(
        self, prepared: PreparedForward, staged: Staged, residual: Tensor | None = None
    ) -> ForwardResult:
        """residual: from the stage before."""
        self.drafted = None
        if prepared.padded_tokens is None:
            plans = self._bound(prepared, staged)
            self.drafted = plans.recurrence if prepared.has_drafts else None
            hidden = self._forward(staged, plans, residual)
            logits = self._logits_of(hidden, staged) if prepared.num_sampled else None
            return ForwardResult(hidden, logits, None)
        own = None
        if residual is not None:  # a graph computes it where it leaves its results
            own = self._hidden[: prepared.padded_tokens]
            own[: len(residual)].copy_(residual)
            own[len(residual) :].zero_()
        key = (prepared.padded_tokens, prepared.adapters is not None, prepared.draws)
        graph = self._graphs.get(key)
        if graph is None:
            self._graphs[key] = self._captured(prepared, staged, own)
        else:
            graph.inputs.buffer.copy_(staged.buffer[: len(graph.inputs.buffer)])
            graph.replay()
        hidden, num_rows = self._hidden[: prepared.padded_tokens], prepared.num_sampled
        if prepared.draws:
            drawn = {
                "token_ids": self._token_ids[:num_rows],
                "is_finite": self._is_finite[:num_rows],
            }
            return ForwardResult(hidden, None, drawn)
        return ForwardResult(hidden, self._logits[:num_rows] if num_rows else None, None)

    def _padded_size(self, num_tokens: int) -> int | None:
        place = bisect_left(self.sizes, num_tokens)
        return self.sizes[place] if place < len(self.sizes) else None

    def _captured(
        self, prepared: PreparedForward, staged: Staged, residual: Tensor | None
    ) -> _Graph:
        """Capture a graph of this size; its first run computes this step."""
        own: dict[str, Field] = {name: staged.fields[name] for name in prepared.arrays}
        inputs = Staged(staged.buffer[: num_bytes_of(own.values())].clone(), own)
        plans = self._bound(prepared, inputs)

        def run() -> None:
            hidden = self._forward(inputs, plans, residual)
            if prepared.draws:
                self._draw(hidden, inputs)
                return
            if self._has_logits:
                logits = self._logits_of(hidden, inputs)
                self._logits[: len(logits)].copy_(logits)
            if hidden is not residual:
                self._hidden[: len(hidden)].copy_(hidden)

        return _Graph(inputs, self._accelerator.capture(run), plans)

    def _forward(self, at: Staged, plans: _Plans, residual: Tensor | None) -> Tensor:
        token_ids = self._kernels.take_inputs(at["token_ids"], at["sources"], self.previous)
        batch = ForwardBatch(
            token_ids, at["positions"], at["slots"], self._pool.layers, plans.attention,
            plans.adapters, self._states, plans.recurrence, self._pool.index_keys,
            num_tokens=at["num_tokens"], residual=residual,
        )  # fmt: skip
        return self._model.forward(token_ids, batch.positions, batch)

    def _draw(self, hidden: Tensor, at: Staged) -> None:
        """As `Sampling.launch` does of rows without more ado."""
        rows = SamplingRows(**{name: at[f"sampling.{name}"] for name in _DRAWS_OF_PADDING})
        token_ids, is_finite = self._kernels.sample(self._logits_of(hidden, at), rows)
        self.previous.index_copy_(0, at["sampled_rows"], token_ids)
        self._token_ids[: len(token_ids)].copy_(token_ids)
        self._is_finite[: len(is_finite)].copy_(is_finite)

    def _logits_of(self, hidden: Tensor, at: Staged) -> Tensor:
        return self._model.compute_logits(hidden.index_select(0, at["sampled_tokens"]))

    def _bound(self, prepared: PreparedForward, at: Staged) -> _Plans:
        attention = tuple(
            self._bound_plan(_name_of(kind), plan, at)
            for kind, plan in enumerate(prepared.attention)
        )
        return _Plans(
            attention,
            self._bound_plan("adapters", prepared.adapters, at),
            self._bound_plan("recurrence", prepared.recurrence, at),
        )

    def _bound_plan(self, prefix: str, plan: object, at: Staged) -> object:
        if not isinstance(plan, DevicePlan):
            return plan
        lists: Mapping[str, Tensor] = {name: at[f"{prefix}.{name}"] for name in plan.arrays}
        return plan.bind(lists, self.page_table)


def _name_of(kind: int) -> str:
    """The prefix of the names of an attention plan's arrays."""
    return f"attention{kind}"


def _padded(array: npt.NDArray[Any], size: int, filler: float) -> npt.NDArray[Any]:
    if len(array) == size:
        return array
    whole = np.full(size, filler, dtype=array.dtype)
    whole[: len(array)] = array
    return whole
