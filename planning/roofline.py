"""The time of a step by the roofline model (Williams, Waterman and Patterson 2009): each part takes
the longer of its reading and its arithmetic. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

from .devices import DeviceModel
from .formats import DTYPE_BYTES
from .model_shape import AttentionLayers
from .served_model import ServedModel

_MAX_KNOWN = 65_536  # sizes of steps whose times are kept
_PART_BYTES = 4  # of a number of a part of attention: float32


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step, by cause."""

    reading_s: float  # of products that are bound by reading weights
    computing_s: float  # of products that are bound by arithmetic
    attention_s: float
    overhead_s: float

    @property
    def total_s(self) -> float:
        return self.reading_s + self.computing_s + self.attention_s + self.overhead_s

    @property
    def bound_by(self) -> str:
        """The largest part."""
        parts = {
            "weights": self.reading_s,
            "arithmetic": self.computing_s,
            "attention": self.attention_s,
            "overhead": self.overhead_s,
        }
        return max(parts, key=lambda name: parts[name])


Rows: TypeAlias = Sequence[tuple[int, int]]
"""(tokens computed, tokens before them) of each row of a step."""


@dataclass(frozen=True)
class CostModel:
    """One model on one device; or a rank's part of one on each of several, see `rank_shape`."""

    model: ServedModel
    device: DeviceModel
    num_ranks: int = 1
    num_sums: int = 0  # of a step, over the ranks
    num_shares: int = 1  # of a step's tokens and the KV, each on as many ranks

    def step_time(self, rows: Rows, num_sampled: int) -> StepTime:
        """num_sampled of the rows sample. If adapters are served, each row has one, with as many
        different ones as there are slots."""
        found = self._known(sum([num for num, _ in rows]), num_sampled, len(rows))
        befores = [before for num_tokens, before in rows if num_tokens == 1]
        chunks = [row for row in rows if row[0] != 1]
        return self._with_attention(found, befores, chunks)

    def decode_times(self, befores: Sequence[int], num_steps: int) -> list[float]:
        """Seconds of so many steps of rows of one token each that all sample, behind so many at
        first, and each step a token further."""
        found = self._known(len(befores), len(befores), len(befores))
        return [
            self._with_attention(found, [num + further for num in befores], ()).total_s
            for further in range(num_steps)
        ]

    def counted_s(self, num_tokens: int, num_sampled: int, num_keys: int, num_pairs: int) -> float:
        """Seconds of a step by its counts alone, whatever its rows: keys are read, pairs of a query
        and a key multiplied, which layers with windows have fewer of."""
        attention_s = sum(
            layers.count * max(num_keys * key_s, num_pairs * pair_s)
            for layers, key_s, pair_s in self._key_times_s
        )
        return self._known(num_tokens, num_sampled, num_sampled).total_s + attention_s

    def _with_attention(self, found: StepTime, befores: Sequence[int], chunks: Rows) -> StepTime:
        attention_s = self._attention_s(befores, chunks)
        return StepTime(found.reading_s, found.computing_s, attention_s, found.overhead_s)

    def _known(self, num_tokens: int, num_sampled: int, num_rows: int) -> StepTime:
        """All but attention."""
        key = (self._num_own(num_tokens), num_sampled, num_rows)
        found = self._known_times.get(key)
        if found is None:
            if len(self._known_times) >= _MAX_KNOWN:
                self._known_times.clear()
            found = self._known_times[key] = self._without_attention(*key)
        return found

    @cached_property
    def _known_times(self) -> dict[tuple[int, int, int], StepTime]:
        """What the last steps took besides attention: many are as large as one before."""
        return {}

    def _without_attention(self, num_tokens: int, num_sampled: int, num_rows: int) -> StepTime:
        reading_s = computing_s = 0.0
        for read_s, compute_s in self._products_s(num_tokens, num_sampled, num_rows):
            if read_s >= compute_s:
                reading_s += read_s
            else:
                computing_s += compute_s
        device, layers = self.device, self.model.config.num_layers
        overhead_s = device.step_s + layers * device.layer_s + num_sampled * device.row_s
        overhead_s += self._num_adapted * device.adapter_s
        overhead_s += self._sums_s(num_tokens) + self._exchanges_s(num_tokens)
        return StepTime(reading_s, computing_s, 0.0, overhead_s)

    def _num_own(self, num_tokens: int) -> int:
        """Of a step's tokens, those that a rank computes."""
        return -(-num_tokens // self.num_shares)

    def _sums_s(self, num_tokens: int) -> float:
        """Each rank sends and receives 2 (n - 1) / n times a sum's bytes (a ring)."""
        if not self.num_sums:
            return 0.0
        itemsize = DTYPE_BYTES[self.model.format.dtype]
        num_bytes = num_tokens * self.model.config.hidden_size * itemsize
        way = 2 * (self.num_ranks - 1) / self.num_ranks * num_bytes / self.device.link_bytes_s
        return self.num_sums * (self.device.sum_s + way)

    def _exchanges_s(self, num_own: int) -> float:
        """Of each layer's heads, of its parts of attention, and of what the last layer gives: each
        rank gets what all others have (docs/how-it-works/parallelism.md counts it)."""
        if self.num_shares == 1:
            return 0.0
        config, itemsize = self.model.config, DTYPE_BYTES[self.model.format.dtype]
        num_bytes = num_own * config.hidden_size * itemsize
        for num_heads, num_kv, key_dim, value_dim in self._exchanged_heads:
            num_bytes += num_own * (num_heads * key_dim + num_kv) * itemsize
            num_bytes += num_own * self.num_shares * num_heads * (value_dim + 1) * _PART_BYTES
        num_messages = 1 + 2 * len(self._exchanged_heads)
        way_s = (self.num_shares - 1) * num_bytes / self.device.link_bytes_s
        return num_messages * self.device.sum_s + way_s

    @cached_property
    def _exchanged_heads(self) -> list[tuple[int, int, int, int]]:
        """Of each layer with attention: heads, numbers of keys and values a token, and the numbers
        of a query and of a result."""
        config = self.model.config
        if config.latent is not None:
            size = config.latent.latent_dim + config.latent.rope_dim
            of_layer = (config.num_heads, size, size, config.latent.latent_dim)
            return [of_layer] * len(config.attention_layers)
        return [
            (config.num_heads, 2 * num_kv_heads * head_dim, head_dim, head_dim)
            for num_kv_heads, head_dim in config.kv_shapes
        ]

    @property
    def _num_adapted(self) -> int:
        """Linear layers that take adapters."""
        if self.model.adapters is None:
            return 0
        return sum(product.count for product in self.model.shape.products if product.num_modules)

    def _products_s(
        self, num_tokens: int, num_sampled: int, num_rows: int
    ) -> Iterator[tuple[float, float]]:
        """For each kind of product, and its adapters: reading time, and arithmetic time."""
        rates, adapters = self.device.rates[self.model.format.name], self.model.adapters
        for product in self.model.shape.products:
            count = num_sampled if product.is_sampled_only else num_tokens
            if not count:
                continue
            read = self.model.format.product_bytes(product) * product.num_touched(count)
            flop = 2 * product.in_features * product.out_features * product.num_used * count
            yield product.count * read / rates.read_bytes_s, product.count * flop / rates.flop_s
            if adapters is not None and product.num_modules:
                numbers = product.count * adapters.num_numbers(product)
                num_read = numbers * min(num_rows, adapters.num_slots)
                read_s = num_read * DTYPE_BYTES[self.model.format.dtype] / rates.read_bytes_s
                yield read_s, 2 * numbers * num_tokens / rates.flop_s

    def handover_s(self, num_tokens: int) -> float:
        """The residual stream of so many tokens, to the next stage."""
        itemsize = DTYPE_BYTES[self.model.format.dtype]
        num_bytes = self._num_own(num_tokens) * self.model.config.hidden_size * itemsize
        return self.device.sum_s + num_bytes / self.device.link_bytes_s

    def _attention_s(self, befores: Sequence[int], chunks: Rows) -> float:
        """Of rows of one token each behind so many, and of rows of more: each row's attention, and
        its recurrent states, read and written once. A chunk reads its keys once for all of its
        tokens; in layers with a window, keys before it cost nothing; where keys are selected, all
        index keys are read. Of divided KV a rank reads its share, with the queries of all
        tokens."""
        num_rows = len(befores) + len(chunks)
        total_s = num_rows * 2 * self.model.state_bytes / self.device.kv_bytes_s
        if self.model.config.latent is not None:
            total_s += sum(self._selection_s(1, before) for before in befores)
            total_s += sum(self._selection_s(*row) for row in chunks)
        for layers, key_s, pair_s in self._key_times_s:
            # A lone query's keys are its pairs.
            attention_s = layers.num_seen(befores) * max(key_s, pair_s)
            for row in chunks:
                attention_s += max(layers.num_keys(*row) * key_s, layers.num_pairs(*row) * pair_s)
            total_s += layers.count * attention_s / self.num_shares
        return total_s

    @cached_property
    def _key_times_s(self) -> list[tuple[AttentionLayers, float, float]]:
        """Of a key: reading it, and a query's arithmetic with it, in each kind of layer."""
        device, times = self.device, []
        for layers in self.model.shape.attention:
            key_bytes, flop_a_pair = self._of_a_key(layers)
            pair_s = flop_a_pair / device.attention_flop_s
            times.append((layers, key_bytes / device.kv_bytes_s, pair_s))
        return times

    def _of_a_key(self, layers: AttentionLayers) -> tuple[float, float]:
        """Bytes of a token's KV in one of the layers, and operations of a query with it."""
        config, latent = self.model.config, self.model.config.latent
        if latent is not None:
            index_bytes = 0
            if latent.indexer is not None:
                index_bytes = self._index_key_bytes * len(latent.indexer.layers)
            latent_bytes = self.model.kv_bytes_per_token - index_bytes
            key_bytes = latent_bytes / len(config.attention_layers)
            return key_bytes, 2 * config.num_heads * (2 * latent.latent_dim + latent.rope_dim)
        numbers = sum(heads * head_dim for heads, head_dim in config.kv_shapes)
        share = layers.num_kv_heads * layers.head_dim / numbers
        return self.model.kv_bytes_per_token * share, 4 * config.num_heads * layers.head_dim

    @property
    def _index_key_bytes(self) -> int:
        latent = self.model.config.latent
        if latent is None or latent.indexer is None:
            return 0
        return latent.indexer.head_dim * DTYPE_BYTES[self.model.format.dtype]

    def _selection_s(self, num_tokens: int, before: int) -> float:
        """Scores of all keys, in layers that select them."""
        latent = self.model.config.latent
        if latent is None or latent.indexer is None:
            return 0.0
        indexer, (layers,) = latent.indexer, self.model.shape.attention
        every = replace(layers, count=len(indexer.layers), num_visible=None)
        read_s = every.num_keys(num_tokens, before) * self._index_key_bytes / self.device.kv_bytes_s
        flop = every.num_pairs(num_tokens, before) * 2 * indexer.num_heads * indexer.head_dim
        return every.count * max(read_s, flop / self.device.attention_flop_s)
