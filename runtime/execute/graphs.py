"""The forward pass of a step on an accelerator, captured in a graph for each padded size.

What rows attend to is data, and so are the rows' pages, positions and number: a step of any mix of
prompt chunks and decodes fills the arrays of the next larger size and replays that size's graph.
The arrays are in one buffer of fixed layout, into which a step's arrays are copied on the device.

    a step of 21 tokens   |token_ids 21 + 3|sources 21 + 3|...|attention's lists, as for 24 tokens|

Padding tokens attend to nothing, and write their KV to a spare page that no row has. The pass ends
with the tokens drawn from the logits as they are; a step that changes logits draws behind it, from
what the graph leaves. Hidden states, logits and tokens are written where all graphs leave theirs.
Small sizes have a second graph, without the launches of attention that decode steps have nothing
for. A decode step is then this one launch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
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
from ..models.forward_batch import ForwardBatch, OnLayer
from ..models.language_model import LanguageModel
from ..models.layers.stage import ALL_LAYERS, Stage
from .accelerator import Accelerator
from .inputs import NO_SOURCE, StepInputs, WantedLogits, plan_attentions
from .sampler import NO_DRAWS, Drawn
from .staging import Field, Staged, num_bytes_of

Arrays = dict[str, npt.NDArray[Any]]

# (from, step): sizes go up by `step` from there. Small ones are decode steps, whose time does not
# depend on padding; from 64 on at most an eighth of a size is padding, and products are cut in
# blocks of 64 or 128 tokens anyhow.
_STEPS = ((8, 8), (256, 32), (512, 64), (1024, 128), (2048, 256))
_SMALL = (1, 2, 4)

# Steps of up to so many tokens have a light graph. What it saves, some 2 us a layer, is little
# beside larger steps (a guess), and each graph takes time at the start.
MAX_LIGHT_TOKENS = 64

# Of rows that only fill a graph: the best of the first token's logits, which is two passes less.
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
    is_light: bool  # nothing is wide for attention, and the graph lacks that
    is_drawn: bool  # the graph makes the step's draws


class ForwardResult(NamedTuple):
    """Valid until the next pass."""

    hidden: Tensor  # [>= T, hidden_size]
    logits: Tensor | None  # [N, vocab_size] of the rows that sample; None if no row does
    drawn: Drawn | None  # of these rows; None: the pass did not draw


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
        stage: Stage = ALL_LAYERS,
    ) -> None:
        """states: of a model with recurrent layers. stage: which layers the model has."""
        self._model = model
        self._kernels = kernels
        self._pool = pool
        self._spare_slot = pool.num_pages * pool.page_size
        self._accelerator = accelerator
        self._config = config
        self._max_rows = table_shape[0]
        self._num_adapter_slots = num_adapter_slots
        self._has_logits = has_logits = stage.is_last
        self._states: tuple[RecurrentState, ...] = () if states is None else states.layers
        self.drafted: object | None = None  # the recurrence's plan of a last step with drafts
        # By (size, with adapters, light).
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
        # What a graph reads of the stages before, and may write over.
        self._residual = self._hidden
        if stage.is_last and not stage.is_first:
            self._residual = torch.empty_like(self._hidden)
        num_logits = min(largest, self._max_rows) if has_logits else 0
        self._logits = torch.empty((num_logits, config.vocab_size), dtype=wide, device=device)

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def prepare(
        self, inputs: StepInputs, wanted: WantedLogits, draws: Arrays = NO_DRAWS
    ) -> PreparedForward:
        """Lay out the step's arrays, padded if a size fits. draws: the sampler's, if they are from
        the logits as they are."""
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
        light = None if padded is None or not self.has_light(padded) else _light(attention)
        attention = attention if light is None else light
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
        if padded is not None and self._has_logits:
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
            is_light=light is not None,
            is_drawn=padded is not None and len(draws["rows"]) > 0,
        )

    def has_light(self, size: int) -> bool:
        """Whether there is a light graph of this padded size: decode steps reach it."""
        is_reached = self._padded_size(min(size, self._max_rows)) == size
        return size <= MAX_LIGHT_TOKENS and is_reached

    def _padded_draws(self, draws: Arrays, num_rows: int) -> Arrays:
        fillers = {**_DRAWS_OF_PADDING, "rows": self._max_rows}
        return {
            f"graph_draws.{name}": _padded(draws[name], num_rows, filler)
            for name, filler in fillers.items()
        }

    def __call__(
        self,
        prepared: PreparedForward,
        staged: Staged,
        residual: Tensor | None = None,
        on_layer: OnLayer | None = None,
    ) -> ForwardResult:
        """residual: from the stage before. on_layer: of a step that is not padded, see
        `ForwardBatch`."""
        self.drafted = None
        if prepared.padded_tokens is None:
            plans = self._bound(prepared, staged)
            self.drafted = plans.recurrence if prepared.has_drafts else None
            hidden = self._forward(staged, plans, residual, on_layer=on_layer)
            logits = self._logits_of(hidden, staged) if prepared.num_sampled else None
            return ForwardResult(hidden, logits, None)
        own = None
        if residual is not None:
            own = self._residual[: prepared.padded_tokens]
            own[: len(residual)].copy_(residual)
            own[len(residual) :].zero_()
        key = (prepared.padded_tokens, prepared.adapters is not None, prepared.is_light)
        graph = self._graphs.get(key)
        if graph is None:
            self._graphs[key] = self._captured(prepared, staged, own)
        else:
            graph.inputs.buffer.copy_(staged.buffer[: len(graph.inputs.buffer)])
            graph.replay()
        hidden, num_rows = self._hidden[: prepared.padded_tokens], prepared.num_sampled
        logits = self._logits[:num_rows] if num_rows else None
        return ForwardResult(hidden, logits, self._drawn(num_rows) if prepared.is_drawn else None)

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
            out = self._hidden[: prepared.padded_tokens]
            hidden = self._forward(inputs, plans, residual, out)
            if self._has_logits:
                self._draw(hidden, inputs)

        return _Graph(inputs, self._accelerator.capture(run), plans)

    def _forward(
        self,
        at: Staged,
        plans: _Plans,
        residual: Tensor | None,
        out: Tensor | None = None,
        on_layer: OnLayer | None = None,
    ) -> Tensor:
        token_ids = self._kernels.take_inputs(at["token_ids"], at["sources"], self.previous)
        batch = ForwardBatch(
            token_ids, at["positions"], at["slots"], self._pool.layers, plans.attention,
            plans.adapters, self._states, plans.recurrence, self._pool.index_keys,
            num_tokens=at["num_tokens"], residual=residual, out=out,
            on_layer=on_layer,
        )  # fmt: skip
        return self._model.forward(token_ids, batch.positions, batch)

    def _draw(self, hidden: Tensor, at: Staged) -> None:
        """As `Sampling.launch` does, from logits as they are."""
        rows = SamplingRows(**{name: at[f"graph_draws.{name}"] for name in _DRAWS_OF_PADDING})
        num_rows = len(rows.temperature)
        logits, drawn = self._logits[:num_rows], self._drawn(num_rows)
        self._kernels.sample(self._logits_of(hidden, at, logits), rows, drawn)
        self.previous.index_copy_(0, at["graph_draws.rows"], drawn.token_ids)

    def _drawn(self, num_rows: int) -> Drawn:
        return Drawn(self._token_ids[:num_rows], self._is_finite[:num_rows])

    def _logits_of(self, hidden: Tensor, at: Staged, out: Tensor | None = None) -> Tensor:
        return self._model.compute_logits(hidden.index_select(0, at["sampled_tokens"]), out)

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


def _light(attention: Iterable[object]) -> tuple[object, ...] | None:
    """The plans without room for what is wide; None: something is."""
    plans = [plan for plan in attention if isinstance(plan, DevicePlan)]
    if any(plan.light is None for plan in plans):
        return None
    return tuple(replace(plan, arrays=plan.light or plan.arrays) for plan in plans)


def _name_of(kind: int) -> str:
    """The prefix of the names of an attention plan's arrays."""
    return f"attention{kind}"


def _padded(array: npt.NDArray[Any], size: int, filler: float) -> npt.NDArray[Any]:
    if len(array) == size:
        return array
    whole = np.full(size, filler, dtype=array.dtype)
    whole[: len(array)] = array
    return whole
