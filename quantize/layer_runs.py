"""A decoder computed a layer at a time: only one layer's weights are in memory, and the residual
stream of all tokens in a file.

Layers are the runtime's own (`models/decoder_layers`), so each family that it loads computes here
what it does when it is served, in float32. Models whose layers hand each other more than the
residual stream, or have weights that are no plain linears, are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import InvalidRequest
from ..kernels.ops import Activation, Linear, Weight
from ..kernels.reference.dense import make_gated_linear, make_linear, make_output_linear
from ..kernels.registry import Kernels, select_kernels
from ..runtime.checkpoint.config.model_config import ModelConfig
from ..runtime.checkpoint.parts import WHOLE, Part
from ..runtime.checkpoint.quantized.stacking import stack_weights
from ..runtime.checkpoint.safetensors.checkpoint import CheckpointWeights
from ..runtime.checkpoint.weight_source import WeightSource, stacked_shape
from ..runtime.execute.inputs import InputBuilder, plan_attentions
from ..runtime.models.decoder_layers import DecoderLayer, decoder_layer
from ..runtime.models.forward_batch import ForwardBatch
from ..runtime.models.layers.build import ModelBuild
from ..runtime.models.layers.embedding import VocabEmbedding
from ..runtime.models.layers.norm import norm_of
from ..runtime.models.layers.rotary import LayerRotary
from ..runtime.schedule.plan import PageUpdate, Row, StepPlan

CHUNK_TOKENS = 1024  # computed at once, and the longest text

Linears = tuple[str, ...]
"""The modules that share one input."""


def require_layer_by_layer(config: ModelConfig) -> None:
    """Raises InvalidRequest for a model that is not computed so."""
    why = None
    if config.experts is not None:
        why = "has experts"
    elif config.varied is not None:
        why = "has layers that share KV or vary"
    elif config.recurrent is not None or config.single_blocks is not None:
        why = "has layers without attention"
    elif config.latent is not None:
        why = "has latent attention"
    elif config.is_bare:
        why = "generates nothing"
    if why is not None:
        allowed = "a decoder whose layers are attention and one feed-forward block each; "
        allowed += f"{config.architecture} {why}: `--method rtn` without --calibrate rounds it"
        raise InvalidRequest.of("model", config.architecture, allowed)


class LayerWeights(WeightSource):
    """A checkpoint's tensors in float32, or those that are in their place now."""

    def __init__(self, source: CheckpointWeights) -> None:
        self._source = source
        self.changed: dict[str, Tensor] = {}  # by a tensor's name
        self.weights: dict[str, Weight] = {}  # by a linear's name
        self.last_names: Linears = ()  # of the weight taken last

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        if name in self.changed:
            return self.changed[name].to(dtype or torch.float32)
        return self._source.take(name, shape, dtype)

    def take_stacked(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> Tensor:
        parts = [self.take(name, shape) for name, shape in zip(names, shapes, strict=True)]
        return torch.cat(parts).view(stacked_shape(shapes))

    def take_weight(
        self, names: Sequence[str], out_features: Sequence[int], in_features: int
    ) -> Weight:
        self.last_names = tuple(names)
        if not any(name in self.weights for name in names):
            return self._source.take_weight(names, out_features, in_features)
        sizes = zip(names, out_features, strict=True)
        parts = [
            self.weights[name]
            if name in self.weights
            else self._source.take_weight([name], [size], in_features)
            for name, size in sizes
        ]
        return stack_weights(parts, torch.float32)

    def take_part(
        self, names: Sequence[str], out_features: Sequence[int], in_features: int, part: Part
    ) -> Weight:
        assert part == WHOLE, "one process has all of a layer"
        return self.take_weight(names, out_features, in_features)

    def take_experts(
        self, name: str, num_experts: int, out_features: int, in_features: int
    ) -> Weight:
        raise AssertionError("models with experts are refused")

    def tie_weight(self, table: Tensor) -> Weight:
        return table

    def skip(self, name: str) -> None:
        self._source.skip(name)

    def finish(self) -> None:
        pass


class LayerRuns:
    """Computes embeddings, layers and logits of texts; weights are read when they are asked for."""

    def __init__(self, config: ModelConfig, weights: LayerWeights) -> None:
        self._config, self._weights = config, weights
        self._on_input: Callable[[Linears, Tensor], None] | None = None
        kernels = select_kernels(torch.float32, "cpu", "cpu")
        self._kernels: Kernels = replace(
            kernels,
            make_linear=self._make_linear,
            make_gated_linear=self._make_gated_linear,
            make_output_linear=make_output_linear,
        )
        self._build = ModelBuild(
            config,
            weights,
            self._kernels,
            torch.float32,
            torch.device("cpu"),
            max_model_len=CHUNK_TOKENS,
        )
        self._rotary = LayerRotary(self._build)
        self._inputs = InputBuilder(
            page_size=1, max_running_requests=CHUNK_TOKENS, max_model_len=CHUNK_TOKENS
        )
        shape = (2, config.num_kv_heads, CHUNK_TOKENS, config.head_dim)
        self._kv = (torch.zeros(shape),) * config.num_layers  # one layer is computed at a time

    def layer_name(self, index: int) -> str:
        """In the checkpoint."""
        return f"{self._config.weight_prefix}model.layers.{index}"

    def vocabulary(self, source: WeightSource | None = None) -> VocabEmbedding:
        """The embedding and the output projection; source: None: as in the checkpoint."""
        return VocabEmbedding(replace(self._build, source=source or self._weights))

    def final_norm(self) -> Callable[[Tensor], Tensor]:
        """Before the output projection."""
        config = self._config
        name = f"{config.weight_prefix}model.{config.final_norm}"
        return norm_of(self._build, name, config.hidden_size)

    def layer(self, index: int) -> DecoderLayer:
        """With the weights as they are now."""
        return decoder_layer(self._build, self.layer_name(index), index)

    def run(self, layer: DecoderLayer, index: int, lengths: Sequence[int], stream: Tensor) -> None:
        """stream [T, hidden_size], of texts of these lengths, becomes what is behind the layer."""
        for start, end, texts in _chunks(lengths):
            stream[start:end] = self._output(layer, index, texts, stream[start:end].clone())

    def linears(self, layer: DecoderLayer, index: int) -> list[Linears]:
        """The layer's, in the order in which they are computed."""
        found = list[Linears]()
        self._on_input = lambda linears, x: found.append(linears)
        self._output(layer, index, [1], torch.zeros(1, self._config.hidden_size))
        self._on_input = None
        return list(dict.fromkeys(found))

    def inputs(
        self,
        layer: DecoderLayer,
        index: int,
        lengths: Sequence[int],
        stream: Tensor,
        linears: Linears,
    ) -> Iterator[Tensor]:
        """What these linears get, chunk by chunk [T, in_features]; what follows is not computed."""

        found: list[Tensor] = []

        def stop(reached: Linears, x: Tensor) -> None:
            if reached == linears:
                found.append(x)
                raise _Reached

        for start, end, texts in _chunks(lengths):
            self._on_input = stop
            try:
                self._output(layer, index, texts, stream[start:end].clone())
            except _Reached:
                yield found.pop()
            finally:
                self._on_input = None

    def _output(
        self, layer: DecoderLayer, index: int, lengths: Sequence[int], residual: Tensor
    ) -> Tensor:
        """Of texts of these lengths; residual [T, hidden_size] is changed IN PLACE."""
        batch = self._batch(lengths)
        rotary = self._rotary.at(batch.positions)[index]
        return residual.add_(layer(None, residual, rotary, batch))

    def _batch(self, lengths: Sequence[int]) -> ForwardBatch:
        rows, first = [], 0
        for index, length in enumerate(lengths):
            pages = PageUpdate(0, tuple(range(first, first + length)))
            rows.append(Row(index, index, 0, (0,) * length, pages))
            first += length
        inputs = self._inputs.build(StepPlan(0, tuple(rows)))
        return ForwardBatch(
            input_ids=torch.from_numpy(inputs.token_ids),
            positions=torch.from_numpy(np.ascontiguousarray(inputs.positions)),
            slot_mapping=torch.from_numpy(inputs.slots),
            kv_layers=self._kv,
            attention=plan_attentions(self._kernels, inputs.attention_rows, self._kv, self._config),
        )

    def _make_linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        return self._watched(make_linear(weight, bias))

    def _make_gated_linear(
        self, weight: Weight, bias: Tensor | None, activation: Activation = "silu"
    ) -> Linear:
        return self._watched(make_gated_linear(weight, bias, activation))

    def _watched(self, linear: Linear) -> Linear:
        """NOTE: a layer takes the weight of a linear right before it makes it."""
        names = self._weights.last_names

        def watched(x: Tensor) -> Tensor:
            if self._on_input is not None:
                self._on_input(names, x)
            return linear(x)

        return watched


class _Reached(Exception):
    """The input that was waited for."""


def new_stream(folder: Path, name: str, num_tokens: int, hidden_size: int) -> Tensor:
    """[num_tokens, hidden_size] float32, in a file of this name."""
    shape = (num_tokens, hidden_size)
    return torch.from_numpy(np.memmap(folder / name, np.float32, "w+", shape=shape))


def _chunks(lengths: Sequence[int]) -> Iterator[tuple[int, int, list[int]]]:
    """Consecutive texts of at most CHUNK_TOKENS together: first and last token, their lengths."""
    start, held = 0, list[int]()
    for length in lengths:
        if held and sum(held) + length > CHUNK_TOKENS:
            yield start, start + sum(held), held
            start, held = start + sum(held), []
        held.append(length)
    if held:
        yield start, start + sum(held), held
