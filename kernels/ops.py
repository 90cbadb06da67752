"""The contract of every op: what each implementation takes, returns and changes.

Ops with weights come in two parts: `make_*` prepares the weights once at load (packing, folding),
the object it returns runs every step. T is the number of tokens in the step. All tensors of a call
share one dtype (float64, float32, bfloat16 or float16) and one device unless said otherwise.

    kv_layer  [2, num_kv_heads, num_slots, head_dim]   one layer's KV; [0] keys, [1] values

On an accelerator nothing here waits for the device: what a step needs to know goes there in one
copy, and kernels are queued.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from .attention_rows import AttentionRows
from .model_options import DEFAULT_OPTIONS, AttentionOptions, RoutingOptions
from .quantized_kv import QuantizedKV
from .quantized_weight import QuantizedWeight
from .sampling_rows import AdjustedRows, SamplingRows

KVLayer = Tensor | QuantizedKV
"""One layer's KV, as it is or quantized; which kinds a backend takes it says itself."""

Weight = Tensor | QuantizedWeight
"""A linear layer's weight [out_features, in_features]; every backend takes both."""

Activation = Literal["silu", "gelu", "gelu_tanh"]
HostArrays = Mapping[str, npt.NDArray[Any]]
DeviceArrays = Mapping[str, Tensor]


class Linear(Protocol):
    """y = x @ weight.T + bias."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in_features] -> [T, out_features], a new tensor."""
        ...


class RMSNorm(Protocol):
    """y = x / sqrt(mean(x^2) + eps) * weight, the mean in float32 or better."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[T, hidden_size] -> [T, hidden_size], a new tensor; x is left as it is.

        With `residual` [T, hidden_size], adds x to it IN PLACE and returns the norm of the sum.
        """
        ...


class MakeLinear(Protocol):
    def __call__(self, weight: Weight, bias: Tensor | None) -> Linear:
        """weight [out_features, in_features], bias [out_features]; may keep or copy them."""
        ...


class MakeOutputLinear(Protocol):
    def __call__(self, weight: Weight) -> Linear:
        """weight [vocab_size, hidden_size] -> a linear whose result is float32, or float64 for
        float64."""
        ...


class MakeGatedLinear(Protocol):
    def __call__(
        self, weight: Weight, bias: Tensor | None, activation: Activation = "silu"
    ) -> Linear:
        """weight [2 * size, in_features], gates first, bias [2 * size] -> a layer
        activation(x @ gate.T) * (x @ up.T), [T, in_features] -> [T, size]."""
        ...


class ActAndMul(Protocol):
    def __call__(self, gate_up: Tensor, activation: Activation = "silu") -> Tensor:
        """gate_up [T, 2 * size] contiguous, gates first -> activation(gates) * ups [T, size], a
        new tensor.

        silu: x / (1 + exp(-x)); gelu: with the error function; gelu_tanh: its approximation
        (Hendrycks and Gimpel 2016).
        """
        ...


class MakeRMSNorm(Protocol):
    def __call__(self, weight: Tensor, eps: float) -> RMSNorm:
        """weight [hidden_size], of the model's dtype, or float32 where the product with it shall be
        rounded only once."""
        ...


class QueryKeyNorm(Protocol):
    """RMSNorm of queries and keys, before their rotation."""

    def __call__(self, heads: Tensor) -> None:
        """heads [T, num_heads + 2 * num_kv_heads, head_dim], contiguous: queries, keys, values.
        Queries and keys are normed IN PLACE, values stay."""
        ...


class MakeQueryKeyNorm(Protocol):
    def __call__(
        self,
        query_weight: Tensor,
        key_weight: Tensor,
        num_heads: int,
        num_kv_heads: int,
        eps: float,
    ) -> QueryKeyNorm:
        """Weights [head_dim]: each head is normed by itself; query_weight [num_heads * head_dim]
        and key_weight [num_kv_heads * head_dim]: a token's heads together. See MakeRMSNorm."""
        ...


class RouteExperts(Protocol):
    def __call__(
        self, logits: Tensor, selection_bias: Tensor | None, options: RoutingOptions
    ) -> tuple[Tensor, Tensor]:
        """Each token's experts and their weights: expert_ids [T, K] int64 in [0, E), the highest
        ranked first, and weights [T, K] in the dtype of the logits.

        logits [T, E] float32 or float64, of a router. An expert's score is the softmax or the
        sigmoid of its logit; its rank is the score plus selection_bias [E], same dtype, which does
        not count for its weight (Wang et al. 2024, "Auxiliary-loss-free load balancing"). Of equal
        ranks the lower id wins. NaN ranks highest: what is chosen is valid, its weight is NaN.
        """
        ...


class Experts(Protocol):
    """A mixture of experts behind its router: sum over k of weight k * expert k of the token.

    An expert is down(activation(gate(x)) * up(x)).
    """

    def __call__(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, H], expert_ids [T, K] int64 in [0, E), weights [T, K] of any floating dtype ->
        [T, H], a new tensor. What an expert returns is in the dtype of x; weighting and summing
        are in float32 or better, in the order of k."""
        ...


class MakeExperts(Protocol):
    def __call__(self, gate_up: Weight, down: Weight, activation: Activation) -> Experts:
        """gate_up [E, 2 * I, H], gates first, down [E, H, I]; may keep or copy them."""
        ...


class Lora(Protocol):
    """Low-rank adapters beside one linear layer (Hu et al., "LoRA", 2021): y += x A.T B.T, with
    the A and B of each token's own adapter, whose scale is in its B.

    A layer of several modules has an A and a B for each of them, B for its own outputs.
    """

    def __call__(self, x: Tensor, y: Tensor, plan: object) -> None:
        """x [T, in_features], y [T, sum of out_features], both contiguous; changes y IN PLACE.
        Tokens without an adapter, and those past the plan's (padding), keep theirs."""
        ...


class MakeLora(Protocol):
    def __call__(self, a: Tensor, b: Tensor, out_features: Sequence[int]) -> Lora:
        """For a linear layer of n modules with `out_features` outputs each, which follow each
        other, and S slots for adapters of up to R ranks.

        a [S, n * R, in_features], module after module, b [S, sum of out_features, R], contiguous;
        both are kept, and read at every call: their owner fills slots while no call runs. Ranks
        that an adapter lacks are zeros.
        """
        ...


class GatedLinearWithLora(Protocol):
    """A gated linear layer whose adapters are added ahead of the activation."""

    def __call__(self, x: Tensor, plan: object | None) -> Tensor:
        """x [T, in_features] -> [T, size]; `plan`: see `Lora`, None where no token has an adapter,
        which makes no difference to a token without one."""
        ...


class MakeGatedLinearWithLora(Protocol):
    def __call__(
        self, weight: Weight, bias: Tensor | None, activation: Activation, lora: Lora
    ) -> GatedLinearWithLora:
        """As MakeGatedLinear, with what `lora` adds to the 2 * size outputs."""
        ...


class PlanLora(Protocol):
    def __call__(
        self,
        slots: npt.NDArray[np.int32],
        num_slots: int,
        padded_tokens: int | None = None,
    ) -> object:
        """What every layer's `Lora` needs to know of a step; made once a step.

        slots [T]: of each token's adapter, in [1, num_slots]; 0: it has none. A backend of an
        accelerator returns a DevicePlan, whose `bind` asks nothing of the page table; with
        `padded_tokens` as in PlanAttention.
        """
        ...


class ScaleInPlace(Protocol):
    def __call__(self, x: Tensor, factor: float) -> None:
        """x [T, size], contiguous, becomes x * factor, rounded once."""
        ...


class AddInPlace(Protocol):
    def __call__(self, total: Tensor, x: Tensor) -> None:
        """total [T, size] becomes total + x [T, size], both contiguous."""
        ...


class GatherRows(Protocol):
    def __call__(self, table: Tensor, index: Tensor) -> Tensor:
        """table [N, ...] contiguous, index [T] int64 in [0, N) -> [T, ...], a new tensor."""
        ...


class RotateAndStore(Protocol):
    def __call__(
        self, heads: Tensor, cos: Tensor, sin: Tensor, kv_layer: KVLayer, slots: Tensor
    ) -> None:
        """Rotate queries and keys by their positions and write keys and values to their slots.

        heads [T, num_heads + 2 * num_kv_heads, head_dim], contiguous: queries, keys, values. The
        queries are rotated IN PLACE; what becomes of the rest of `heads` is open. `slots` [T]
        int64, distinct but for those of padding: rows of kv_layer.

        Hugging Face's half rotation: with d = rotary_dim / 2, (a, b) = (head[:d], head[d:2d])
        becomes (a cos - b sin, b cos + a sin), and what follows stays. cos, sin:
        [T, 1, rotary_dim], rotary_dim <= head_dim and even, `sin` with its first half NEGATED (so
        that a kernel is one rotate, one product and one fused product-sum).
        """
        ...


class StoreKV(Protocol):
    def __call__(self, k: Tensor, v: Tensor, kv_layer: KVLayer, slots: Tensor) -> None:
        """Write keys and values as they are to their slots.

        k, v [T, num_kv_heads, head_dim], each token's contiguous; slots as in RotateAndStore.
        """
        ...


class TakeInputs(Protocol):
    def __call__(self, token_ids: Tensor, sources: Tensor, previous: Tensor) -> Tensor:
        """A step's token ids [T] int64, a new tensor: `previous[sources[i]]` where sources[i] >= 0,
        else token_ids[i].

        token_ids, sources [T] int64; previous [P] int64, P > 0: what each row of the step before
        sampled.
        """
        ...


class UpdatePages(Protocol):
    def __call__(self, page_table: Tensor, updates: Tensor) -> None:
        """Write new entries of the page table, IN PLACE.

        page_table [max_running_requests, max_pages] int32; updates [U, 3] int32: row, column, page
        id, no place twice; a row of -1 is padding.
        """
        ...


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """An attention plan whose integers have still to be copied to the device.

    The caller copies `arrays` with everything else that the step needs, then calls `bind` with the
    copies, under the same names, and the device's page table [max_running_requests, max_pages]
    int32, which holds this step's pages by the time that the attention runs.
    """

    arrays: HostArrays
    bind: Callable[[DeviceArrays, Tensor], object]  # -> the plan that `paged_attention` takes


class PlanAttention(Protocol):
    def __call__(
        self,
        rows: AttentionRows,
        kv_layer: KVLayer,
        num_heads: int,
        options: AttentionOptions = DEFAULT_OPTIONS,
        padded_tokens: int | None = None,
    ) -> object:
        """What `paged_attention` of the same backend needs to know of a step; made once a step.

        kv_layer: any layer's, for its shape, which all layers share; num_heads of the queries.
        A backend of an accelerator returns a DevicePlan. There, `padded_tokens` (at least the
        step's tokens) makes the shapes of its arrays depend on that number alone, so that a plan
        bound once, when a graph was captured, serves later steps through new contents.
        """
        ...


class PagedAttention(Protocol):
    def __call__(self, q: Tensor, kv_layer: KVLayer, plan: object) -> Tensor:
        """q [T, num_heads, head_dim] -> [T, num_heads, head_dim].

        Query head h reads KV head h // (num_heads / num_kv_heads). Softmax in float32 or better.
        The step's own KV is stored already. Slots past a row's end are never read. Tokens past
        those of the plan (padding) get unspecified results.
        """
        ...


class StoreLatent(Protocol):
    def __call__(self, latent: Tensor, kv_layer: Tensor, slots: Tensor) -> None:
        """Write latent [T, latent_dim + rope_dim] to rows `slots` [T] int64 of kv_layer
        [num_slots, latent_dim + rope_dim], IN PLACE.

        Slots are distinct but for those of padding tokens, of whose rows any may win.
        """
        ...


class PlanLatentAttention(Protocol):
    def __call__(
        self,
        rows: AttentionRows,
        kv_layer: Tensor,
        num_heads: int,
        scale: float,
        padded_tokens: int | None = None,
    ) -> object:
        """What `latent_attention` of the same backend needs to know of a step; see PlanAttention.

        kv_layer [num_slots, latent_dim + rope_dim], any layer's; scale: of the scores (the model's
        head_dim ** -0.5 before absorption, times what its rotary scaling asks for).
        """
        ...


class LatentAttention(Protocol):
    """Multi-head latent attention in its absorbed form (DeepSeek-V2, section 2.1).

    A token's KV is one row for all heads, a latent and a rotated key:

        score = (q_latent . latent + q_rope . key) * scale      out = softmax(score) . latent
    """

    def __call__(self, q_latent: Tensor, q_rope: Tensor, kv_layer: Tensor, plan: object) -> Tensor:
        """q_latent [T, num_heads, latent_dim], queries times each head's W_UK; q_rope [T,
        num_heads, rope_dim], rotated; kv_layer [num_slots, latent_dim + rope_dim], latents first
        -> [T, num_heads, latent_dim], for each head's W_UV to take. Otherwise as PagedAttention.
        """
        ...


class AdjustLogits(Protocol):
    def __call__(self, logits: Tensor, rows: AdjustedRows, previous_tokens: Tensor) -> None:
        """Penalties, bias and forbidden tokens, IN PLACE; see `adjusted_rows`.

        logits [N, vocab_size] float32 or float64, contiguous; previous_tokens [P] int64, what each
        row of the step before sampled.
        """
        ...


class ApplyTokenMask(Protocol):
    def __call__(self, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
        """Set the logits of tokens that may not be sampled to -inf, IN PLACE; other rows stay.

        logits [N, vocab_size] float32 or float64, contiguous; rows [K] int64, distinct; masks
        [K, ceil(vocab_size / 32)] int32, contiguous: bit i % 32 of word i // 32 allows token i.
        """
        ...


class Sample(Protocol):
    def __call__(self, logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
        """Draw a token a row: token_ids [N] int64 and is_finite [N] bool, on the logits' device.

        logits [N, vocab_size] float32 or float64, contiguous; -inf masks a token. The draw is
        docs/how-it-works/sampling.md's, in float64, the same on every backend. is_finite is False
        where there is NaN or +inf among a row's logits or all are -inf; its token is then some
        valid id.
        """
        ...


class TokenLogprobs(Protocol):
    def __call__(self, logits: Tensor, token_ids: Tensor) -> Tensor:
        """logits [N, vocab_size], token_ids [N] int64 -> log-probabilities [N] (natural log, at
        temperature 1) in the logits' dtype."""
        ...


class PageCopy(Protocol):
    """Copies whole pages of one part of all layers' KV, bit by bit.

    pages [N] int64; packed [num_layers, num_vectors, N, page_size, width] in the layers' dtype on
    their device, the last two axes contiguous, the others in any order.
    """

    def pack(self, pages: Tensor, packed: Tensor) -> None:
        """Out of the layers."""
        ...

    def unpack(self, pages: Tensor, packed: Tensor) -> None:
        """Into the layers; pages are distinct."""
        ...


class MakePageCopy(Protocol):
    def __call__(self, layers: Sequence[Tensor], page_size: int) -> PageCopy:
        """For the layers of one pool, each [num_vectors, num_slots, width], contiguous, with
        num_slots a multiple of page_size; the layers are kept."""
        ...


class Captured(Protocol):
    """A forward pass over fixed tensors, recorded once to be run again at less cost."""

    result: Tensor  # what the pass returned; overwritten by each replay

    def replay(self, plans: Sequence[object], lora_plan: object | None = None) -> None:
        """Run it again; plans of this step, in the order in which those of the recording were
        handed to `Capture`; the tensors that it read hold this step's values."""
        ...


class Capture(Protocol):
    def __call__(
        self, run: Callable[[], Tensor], plans: Sequence[object], lora_plan: object | None = None
    ) -> tuple[Tensor, Captured | None]:
        """Run once and record; None where `run` does something that cannot be recorded. plans: the
        attention plans that `run` uses; lora_plan: that of its adapters, None: without any."""
        ...
