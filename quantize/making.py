"""A model quantized by what programs make it compute, from texts to a checkpoint.

Layer by layer, and linear by linear in it: each is rounded for what it will get behind those that
are rounded already, towards what it gives in the original. Memory holds a layer of both and a chunk
of tokens; the residual streams of all texts are in files beside the checkpoint. Texts held out go
through both models, which gives the divergence of the whole.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from torch import Tensor

from ..errors import ModelLoadError
from ..kernels.ops import Weight
from ..kernels.quantized_tensors import QuantizedWeight
from ..kernels.reference.quantized import round_rows
from ..runtime.checkpoint.config.model_config import ModelConfig
from ..runtime.checkpoint.new_folder import new_folder, require_new
from ..runtime.checkpoint.quantized.layouts import Layout, PlannedLinear
from ..runtime.checkpoint.quantized.quantization_config import packed_config
from ..runtime.checkpoint.quantized.quantized_copy import (
    CopyReport,
    announced,
    copy_others,
    relative_error,
    write_config,
)
from ..runtime.checkpoint.quantized.quantizing import QuantizingWeights, is_output
from ..runtime.checkpoint.quantized.rounding import round_to_4_bits, round_to_8_bits
from ..runtime.checkpoint.safetensors.checkpoint import CheckpointWeights
from ..runtime.checkpoint.safetensors.safetensors_writer import SafetensorsWriter
from ..runtime.checkpoint.weight_source import ModelTensors
from ..runtime.models.decoder_layers import DecoderLayer
from ..runtime.models.layers.embedding import EMBEDDING_NAME
from .awq import awq_scales, smooth_scales
from .folding import Fold, fold_in, folds_of, require_foldable
from .gptq import InputOrder, gptq_numbers
from .grids import grid_of
from .inputs import InputProducts, InputStatistics
from .layer_runs import (
    CHUNK_TOKENS,
    LayerRuns,
    LayerWeights,
    Linears,
    new_stream,
    require_layer_by_layer,
)

Method = Literal["rtn", "gptq", "awq", "smoothquant"]
_SHARD_BYTES = 250_000_000  # of which one is in memory
_LOGITS_ROWS = 64  # tokens whose logits are in memory


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a model is quantized."""

    method: Method
    layout: Layout
    strength: float | None = None  # SmoothQuant's alpha; None: the best for each input


@dataclass(slots=True)
class Divergence:
    """Of the quantized model from the original, over tokens that it was not calibrated by."""

    num_tokens: int = 0
    kl: float = 0.0  # nats a token
    same_best: float = 0.0  # share of tokens


@dataclass(slots=True)
class Report:
    """What came of it."""

    copy: CopyReport
    num_tokens: int  # calibrated by
    divergence: Divergence = field(default_factory=Divergence)
    seconds: float = 0.0


def require_quantizable(config: ModelConfig, recipe: Recipe) -> None:
    """Raises InvalidRequest for what the method cannot do with a model."""
    require_layer_by_layer(config)
    if recipe.method in ("awq", "smoothquant"):
        require_foldable(config, recipe.method)


def sampled(texts: Sequence[Sequence[int]], most: int, seed: int) -> list[tuple[int, ...]]:
    """Parts of texts, drawn at random, of at most `most` tokens together. A layer's chunk is the
    longest."""
    parts = [
        tuple(text[start : start + CHUNK_TOKENS])
        for text in texts
        for start in range(0, len(text), CHUNK_TOKENS)
    ]
    random.Random(seed).shuffle(parts)
    found, room = [], most
    for part in parts:
        found.append(part[:room])
        room -= len(found[-1])
        if not room:
            break
    return found


def quantize_by_texts(
    folder: Path,
    out: Path,
    config: ModelConfig,
    tensors: ModelTensors,
    texts: Sequence[Sequence[int]],
    held: Sequence[Sequence[int]],
    recipe: Recipe,
    *,
    version: str,
    shard_bytes: int = _SHARD_BYTES,
    on_layer: Callable[[int, int], None] | None = None,
) -> Report:
    """texts, held: token ids to learn from and to measure by.

    Raises:
        InvalidRequest: `out` exists or cannot be made, or see `require_quantizable`.
        ModelLoadError: as `write_quantized_copy`.
    """
    require_new(out)
    require_quantizable(config, recipe)
    given = packed_config(folder)
    if given is not None:
        raise ModelLoadError(f"{folder} is quantized already ({given.method})")
    started = time.monotonic()
    layout = recipe.layout
    rounded = layout.plan(tensors.linears)
    kept = [name for name in tensors.linears if name not in rounded and not is_output([name])]
    with torch.no_grad(), closing(CheckpointWeights(folder, torch.float32)) as source:
        for name, shape in tensors.shapes.items():
            source.require(name, shape)
        with new_folder(out) as draft, TemporaryDirectory(dir=out.parent) as streams:
            job = _Job(source, config, rounded, recipe, Path(streams), draft, shard_bytes)
            job.add(texts, held)
            for index in range(config.num_layers):
                job.quantize_layer(index)
                if on_layer is not None:
                    on_layer(index + 1, config.num_layers)
            report = job.finish()
            copy_others(folder, draft)
            write_config(folder, draft, layout.section(rounded, kept, version))
    report.seconds = time.monotonic() - started
    return report


class _Job:
    """A model on its way through."""

    def __init__(
        self,
        source: CheckpointWeights,
        config: ModelConfig,
        rounded: dict[str, PlannedLinear],
        recipe: Recipe,
        streams: Path,
        out: Path,
        shard_bytes: int,
    ) -> None:
        self._source, self._config, self._rounded = source, config, rounded
        self._recipe, self._folder = recipe, streams
        self._weights = LayerWeights(source)
        self._runs = LayerRuns(config, self._weights)
        prefixes = [f"{self._runs.layer_name(index)}." for index in range(config.num_layers)]
        of_layers = [[n for n in source.names() if n.startswith(own)] for own in prefixes]
        inside = {name for names in of_layers for name in names}
        others = [name for name in source.names() if name not in inside]
        self._of_layers = of_layers
        in_order = [*others, *(name for names in of_layers for name in names)]
        self._writer = SafetensorsWriter(out, announced(source, in_order, rounded), shard_bytes)
        self._copied = CopyReport(
            num_kept=len(others),
            bytes_before=sum(map(source.num_bytes, in_order)),
            bytes_after=self._writer.total_bytes,
        )
        for name in others:
            self._writer.write({name: source.read(name)})

    def add(self, texts: Sequence[Sequence[int]], held: Sequence[Sequence[int]]) -> None:
        """Embed them."""
        self._lengths = [len(text) for text in texts]
        self._held_lengths = [len(text) for text in held]
        embed, size = self._runs.vocabulary().embed, self._config.hidden_size

        def embedded(name: str, some: Sequence[Sequence[int]]) -> Tensor:
            stream, at = new_stream(self._folder, name, sum(map(len, some)), size), 0
            for text in some:
                stream[at : at + len(text)] = embed(torch.tensor(text))
                at += len(text)
            return stream

        # Of both models each.
        self._stream, self._original = embedded("texts", texts), embedded("original", texts)
        self._held, self._exact = embedded("held", held), embedded("exact", held)

    def quantize_layer(self, index: int) -> None:
        """And take all texts through it."""
        runs = self._runs
        layer = runs.layer(index)
        runs.run(layer, index, self._held_lengths, self._exact)
        groups = [
            linears
            for linears in runs.linears(layer, index)
            if all(name in self._rounded for name in linears)
        ]
        if self._recipe.method in ("awq", "smoothquant"):
            self._fold(index, layer, groups)
            layer = runs.layer(index)  # computes the same, of other inputs
        for linears in groups:
            self._round(index, layer, linears)
        rounded = runs.layer(index)
        if index + 1 < self._config.num_layers:
            runs.run(layer, index, self._lengths, self._original)
            runs.run(rounded, index, self._lengths, self._stream)
        runs.run(rounded, index, self._held_lengths, self._held)
        self._write(index)

    def finish(self) -> Report:
        """What remains is the output projection."""
        self._writer.close()
        table = f"{self._config.weight_prefix}{EMBEDDING_NAME}"
        if table in self._source:  # which both vocabularies then share
            shape = self._source.shape(table)
            self._weights.changed[table] = self._source.take(table, shape)
        norm, vocabulary = self._runs.final_norm(), self._runs.vocabulary()
        rounding = QuantizingWeights(self._weights, "int8", torch.float32)
        rounded_logits = self._runs.vocabulary(rounding).logits
        divergence = Divergence(len(self._held))
        for start in range(0, len(self._held), _LOGITS_ROWS):
            rows = slice(start, start + _LOGITS_ROWS)
            exact = vocabulary.logits(norm(self._exact[rows].clone()))
            logits = rounded_logits(norm(self._held[rows].clone()))
            log_p, log_q = exact.log_softmax(-1), logits.log_softmax(-1)
            divergence.kl += float((log_p.exp() * (log_p - log_q)).sum())
            divergence.same_best += float((exact.argmax(-1) == logits.argmax(-1)).sum())
        divergence.kl /= len(self._held)
        divergence.same_best /= len(self._held)
        return Report(self._copied, len(self._stream), divergence)

    def _linear(self, name: str) -> Tensor:
        """Before it is rounded [out_features, in_features] float32."""
        folded = self._weights.weights.get(name)
        if isinstance(folded, Tensor):
            return folded
        return self._source.take(f"{name}.weight", self._rounded[name].shape)

    def _fold(self, index: int, layer: DecoderLayer, groups: Sequence[Linears]) -> None:
        """Give inputs that the method scales their scales."""
        weights = {name: self._linear(name) for linears in groups for name in linears}
        for fold in folds_of(self._config, self._runs.layer_name(index), groups):
            if fold.rows is None or fold.rows in self._rounded:
                inputs = self._statistics(index, layer, fold.names)
                scales = self._scales(fold, inputs, [weights[name] for name in fold.names])
                fold_in(fold, scales, weights.__getitem__, self._source, self._weights.changed)
        self._weights.weights.update(weights)

    def _scales(self, fold: Fold, inputs: InputStatistics, weights: list[Tensor]) -> Tensor:
        """[in_features], by which the inputs are to be divided."""
        recipe = self._recipe
        if recipe.method == "smoothquant":
            return smooth_scales(weights, inputs, recipe.strength, fold.tied)
        size = self._rounded[fold.names[0]].group_size
        return awq_scales(weights, inputs, recipe.layout.bits, size, fold.tied)

    def _statistics(self, index: int, layer: DecoderLayer, linears: Linears) -> InputStatistics:
        inputs = self._runs.inputs(layer, index, self._lengths, self._stream, linears)
        found = InputStatistics(self._rounded[linears[0]].shape[1], len(self._stream))
        for x in inputs:
            found.note(x)
        return found

    def _products(
        self, index: int, layer: DecoderLayer, original: DecoderLayer, linears: Linears
    ) -> InputProducts:
        inputs = self._runs.inputs(layer, index, self._lengths, self._stream, linears)
        originals = self._runs.inputs(original, index, self._lengths, self._original, linears)
        found = InputProducts(self._rounded[linears[0]].shape[1])
        for x, exact in zip(inputs, originals, strict=True):
            if self._recipe.layout.activations == "int8":
                numbers, scales = round_rows(x)
                x = numbers * scales
            found.note(x, exact)
        return found

    def _round(self, index: int, original: DecoderLayer, linears: Linears) -> None:
        """Those before it in the layer are rounded already."""
        weights = {name: self._linear(name) for name in linears}
        if self._recipe.method == "rtn":
            rounded = {name: self._nearest(name, weight) for name, weight in weights.items()}
        elif self._recipe.method == "awq":
            importance = self._statistics(index, self._runs.layer(index), linears).mean_square
            rounded = {
                name: self._on_grid(name, weight.t().contiguous(), importance)
                for name, weight in weights.items()
            }
        else:
            products = self._products(index, self._runs.layer(index), original, linears)
            rounded = self._made_up_for(weights, products, len(self._stream))
        for name, weight in weights.items():
            self._copied.errors[name] = relative_error(rounded[name], weight)
        self._weights.weights.update(rounded)

    def _nearest(self, name: str, weight: Tensor) -> QuantizedWeight:
        if self._recipe.layout.bits == 8:
            return round_to_8_bits(weight)
        return round_to_4_bits(weight, self._rounded[name].group_size)

    def _made_up_for(
        self, weights: dict[str, Tensor], products: InputProducts, num_tokens: int
    ) -> dict[str, QuantizedWeight]:
        """By GPTQ, towards the original's products."""
        importance = products.gram.diagonal() / num_tokens
        towards = {name: products.drift @ weight.t() for name, weight in weights.items()}
        del products.drift  # with the factor there are never more than two of its size
        order = InputOrder(products.gram)
        return {
            name: self._on_grid(
                name, weight.t() + order.solve(towards.pop(name)), importance, order
            )
            for name, weight in weights.items()
        }

    def _on_grid(
        self, name: str, columns: Tensor, importance: Tensor, order: InputOrder | None = None
    ) -> QuantizedWeight:
        """columns [in_features, out_features]; order: None: each to its nearest number."""
        layout = self._recipe.layout
        grid = grid_of(columns, layout.bits, self._rounded[name].group_size, importance)
        if not bool(grid.scales.isfinite().all()):
            raise ModelLoadError(f"{name}: a weight is not finite, or too large to quantize")
        numbers = grid.nearest(columns) if order is None else gptq_numbers(columns, grid, order)
        return grid.packed(numbers, layout.activations)

    def _write(self, index: int) -> None:
        for tensor in self._of_layers[index]:
            name = tensor.removesuffix(".weight")
            weight: Weight | None = self._weights.weights.get(name)
            if tensor.endswith(".weight") and isinstance(weight, QuantizedWeight):
                self._writer.write(self._rounded[name].tensors(name, weight))
                continue
            changed = self._weights.changed.get(tensor)
            self._writer.write({tensor: self._source.read(tensor) if changed is None else changed})
            self._copied.num_kept += 1
        self._weights.weights.clear()
        self._weights.changed.clear()
