"""The contract of every op: what each implementation takes, returns and changes.

Ops with weights have two parts: `make_*` prepares the weights once at load (packing, folding), and
the object it returns runs every step. T is the number of tokens in the step. All tensors of a call
share one dtype (float64, float32, bfloat16 or float16) and one device unless noted otherwise.

    kv_layer  [2, num_kv_heads, num_slots, head_dim]   one layer's KV; [0] keys, [1] values

On an accelerator nothing here waits for the device: a step's data goes there in one copy, and
kernels are queued.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from .attention_rows import AttentionRows
from .model_options import DEFAULT_OPTIONS, AttentionOptions, ClampedSwiGLU, RoutingOptions
from .quantized_tensors import QuantizedKV, QuantizedWeight
from .sampling_rows import AdjustedRows, SamplingRows
from .state_rows import StateRows

KVLayer = Tensor | QuantizedKV
"""One layer's KV, plain or quantized; each backend states which kinds it supports."""

Weight = Tensor | QuantizedWeight
"""A linear layer's weight [out_features, in_features]; every backend supports both."""

Activation = Literal["silu", "gelu", "gelu_tanh"]
HostArrays = Mapping[str, npt.NDArray[Any]]
DeviceArrays = Mapping[str, Tensor]


class Linear(Protocol):
    """y = x @ weight.T + bias."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in_features] -> [T, out_features], a new tensor."""
        ...


class OutputLinear(Protocol):
    """y = x @ weight.T in float32, or float64 for float64."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[T, hidden_size] -> [T, vocab_size], contiguous: `out`, or a new tensor."""
        ...


class RMSNorm(Protocol):
    """y = x / sqrt(mean(x^2) + eps) * weight, the mean in float32 or better."""

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """[T, hidden_size] -> [T, hidden_size], contiguous: `out`, which is neither input, or a new
        tensor; x is not changed.

        With `residual` [T, hidden_size], adds x to it IN PLACE and returns the norm of the sum.
        """
        ...


class MakeLinear(Protocol):
    def __call__(self, weight: Weight, bias: Tensor | None) -> Linear:
        """weight [out_features, in_features], bias [out_features]; may keep or copy them."""
        ...


class MakeOutputLinear(Protocol):
    def __call__(self, weight: Weight) -> OutputLinear:
        """weight [vocab_size, hidden_size]; may keep or copy it."""
        ...


class MakeGatedLinear(Protocol):
    def __call__(
        self, weight: Weight, bias: Tensor | None, activation: Activation = "silu"
    ) -> Linear:
        """weight [2 * size, in_features], gates first, bias [2 * size] -> a layer
        activation(x @ gate.T) * (x @ up.T), [T, in_features] -> [T, size]."""
        ...


class NormedLinear(Protocol):
    """A product, or a gated one, of what RMSNorm makes of a sum, in one launch for few tokens."""

    @property
    def max_tokens(self) -> int:
        """The most that it is for."""
        ...

    def __call__(self, x: Tensor | None, residual: Tensor, total: Tensor) -> Tensor:
        """x (None: zeros), residual [T, hidden_size], T <= max_tokens -> what the layer makes of
        the norm of residual + x, a new tensor. `total` [T, hidden_size] becomes that sum; it shares
        no memory with the others, which are not changed. All are contiguous."""
        ...


class MakeNormedLinear(Protocol):
    def __call__(
        self,
        weight: Weight,
        bias: Tensor | None,
        norm_weight: Tensor,
        eps: float,
        activation: Activation | None = None,
    ) -> NormedLinear | None:
        """See MakeLinear and MakeRMSNorm, with an activation MakeGatedLinear; None: this weight has
        no such kernel."""
        ...


class HeadLinear(Protocol):
    """A product of its own for each head."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, num_heads, in_features] -> [T, num_heads, out_features], in any layout."""
        ...


class MakeHeadLinear(Protocol):
    def __call__(self, weight: Tensor) -> HeadLinear:
        """weight [num_heads, in_features, out_features]; may keep or copy it."""
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
        """weight [hidden_size], in the model's dtype, or in float32 if the product with it must be
        rounded only once."""
        ...


class QueryKeyNorm(Protocol):
    """RMSNorm of queries and keys, before their rotation."""

    def __call__(self, heads: Tensor) -> None:
        """heads [T, num_heads + 2 * num_kv_heads, head_dim], contiguous: queries, keys, values.
        Queries and keys are normed IN PLACE, values are not changed."""
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
        self,
        logits: Tensor,
        selection_bias: Tensor | None,
        options: RoutingOptions,
        num_tokens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Each token's experts and their weights: expert_ids [T, K] int64 in [0, E), the highest
        ranked first, and weights [T, K] in the dtype of the logits.

        num_tokens [1] int32: tokens from there on are padding, whose ids are -1 and weights 0;
        None: there are none. logits [T, E] float32 or float64, of a router. An expert's score is
        the softmax or the sigmoid of its logit; its rank is the score plus selection_bias [E], same
        dtype, which does not affect its weight (Wang et al. 2024, "Auxiliary-loss-free load
        balancing"). Of equal ranks the lower id wins. NaN ranks highest: the chosen ids are valid,
        the weight is NaN.
        """
        ...


class Experts(Protocol):
    """A mixture of experts after its router: sum over k of weight k * expert k of the token.

    An expert is down(activation(gate(x)) * up(x)), its linears with biases where they are given.
    """

    def __call__(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, H], expert_ids [T, K] int64 in [0, E), or -1, which adds nothing and is not
        computed, weights [T, K] of any floating dtype, finite where ids are -1 -> [T, H], a new
        tensor. Experts' results are in the dtype of x; weighting and summing are in float32 or
        better, in the order of k."""
        ...


class MakeExperts(Protocol):
    def __call__(
        self,
        gate_up: Weight,
        down: Weight,
        activation: Activation | ClampedSwiGLU,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> Experts:
        """gate_up [E, 2 * I, H], gates first, down [E, H, I], biases [E, 2 * I] and [E, H]; may
        keep or copy them."""
        ...


class Lora(Protocol):
    """Low-rank adapters of one linear layer (Hu et al., "LoRA", 2021): y += x A.T B.T, with the A
    and B of each token's own adapter, whose B includes its scale.

    A layer of several modules has an A and a B for each of them, B for its own outputs.
    """

    def __call__(self, x: Tensor, y: Tensor, plan: object) -> None:
        """x [T, in_features], y [T, sum of out_features], both contiguous; changes y IN PLACE.
        Tokens without an adapter, and those after the plan's (padding), are not changed."""
        ...


class MakeLora(Protocol):
    def __call__(self, a: Tensor, b: Tensor, out_features: Sequence[int]) -> Lora:
        """For a linear layer of n modules with `out_features` concatenated outputs each, and S
        slots for adapters of up to R ranks.

        a [S, n * R, in_features], module after module, b [S, sum of out_features, R], contiguous;
        both are kept, and read at every call: their owner fills slots while no call runs. Missing
        ranks of an adapter are zeros.
        """
        ...


class GatedLinearWithLora(Protocol):
    """A gated linear layer whose adapters are added before the activation."""

    def __call__(self, x: Tensor, plan: object | None) -> Tensor:
        """x [T, in_features] -> [T, size]; `plan`: see `Lora`, None if no token has an adapter,
        which does not change the result of a token without one."""
        ...


class MakeGatedLinearWithLora(Protocol):
    def __call__(
        self, weight: Weight, bias: Tensor | None, activation: Activation, lora: Lora
    ) -> GatedLinearWithLora:
        """Like MakeGatedLinear, with `lora` added to the 2 * size outputs."""
        ...


class PlanLora(Protocol):
    def __call__(
        self,
        slots: npt.NDArray[np.int32],
        num_slots: int,
        padded_tokens: int | None = None,
    ) -> object:
        """The plan of a step for every layer's `Lora`; made once a step.

        slots [T]: of each token's adapter, in [1, num_slots]; 0: none. A backend of an accelerator
        returns a DevicePlan, whose `bind` does not use the page table; `padded_tokens` as in
        PlanAttention.
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


class JoinColumns(Protocol):
    def __call__(self, first: Tensor, second: Tensor) -> Tensor:
        """first [T, M] and second [T, N], contiguous, of one dtype -> [T, M + N], a new tensor."""
        ...


class GatherShare(Protocol):
    def __call__(self, table: Tensor, index: Tensor, first: int) -> Tensor:
        """table [N, ...] contiguous, the rows [first, first + N) of a larger one; index [T] int64
        -> [T, ...], a new tensor, with zeros for rows that are not here."""
        ...


class RotateAndStore(Protocol):
    def __call__(
        self, heads: Tensor, cos: Tensor, sin: Tensor, kv_layer: KVLayer, slots: Tensor
    ) -> None:
        """Rotate queries and keys by their positions and write keys and values to their slots.

        heads [T, num_heads + 2 * num_kv_heads, head_dim], contiguous: queries, keys, values. The
        queries are rotated IN PLACE; the rest of `heads` is undefined afterwards. `slots` [T]
        int64, distinct except for padding: rows of kv_layer.

        Hugging Face's half rotation: with d = rotary_dim / 2, (a, b) = (head[:d], head[d:2d])
        becomes (a cos - b sin, b cos + a sin), and the rest is not changed. cos, sin:
        [T, 1, rotary_dim], rotary_dim <= head_dim and even, `sin` with its first half NEGATED (so
        that a kernel is one rotate, one product and one fused product-sum).
        """
        ...


class StoreKV(Protocol):
    def __call__(self, k: Tensor, v: Tensor, kv_layer: KVLayer, slots: Tensor) -> None:
        """Write keys and values unchanged to their slots.

        k, v [T, num_kv_heads, head_dim], each token's contiguous; slots as in RotateAndStore.
        """
        ...


class TakeInputs(Protocol):
    def __call__(self, token_ids: Tensor, sources: Tensor, previous: Tensor) -> Tensor:
        """A step's token ids [T] int64, a new tensor: `previous[sources[i]]` where sources[i] >= 0,
        else token_ids[i].

        token_ids, sources [T] int64; previous [P] int64, P > 0: the token that each row of the
        previous step sampled.
        """
        ...


class UpdatePages(Protocol):
    def __call__(self, page_table: Tensor, updates: Tensor) -> None:
        """Write new entries of the page table, IN PLACE.

        page_table [max_running_requests, max_pages] int32; updates [U, 3] int32: row, column, page
        id, all places distinct; a row of -1 is padding.
        """
        ...


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """An attention plan whose integers must still be copied to the device.

    The caller copies `arrays` together with the step's other data, then calls `bind` with the
    copies, under the same names, and the device's page table [max_running_requests, max_pages]
    int32, which holds this step's pages before the attention runs.
    """

    arrays: HostArrays
    bind: Callable[[DeviceArrays, Tensor], object]  # -> the plan that `paged_attention` takes
    is_replayable: bool = True  # its arrays' shapes depend on `padded_tokens` alone
    # The same arrays where this step has nothing for some launches, which are then left out; their
    # shapes depend on `padded_tokens` alone, too. None: it has something for each.
    light: HostArrays | None = None


class PlanAttention(Protocol):
    def __call__(
        self,
        rows: AttentionRows,
        kv_layer: KVLayer,
        num_heads: int,
        options: AttentionOptions = DEFAULT_OPTIONS,
        padded_tokens: int | None = None,
    ) -> object:
        """The plan of a step for `paged_attention` of the same backend; made once a step.

        kv_layer: any layer's, for the shape that all layers share; num_heads: of the queries.
        A backend of an accelerator returns a DevicePlan. There, `padded_tokens` (at least the
        step's tokens) alone determines the shapes of its arrays, so that a plan bound once, when a
        graph was captured, serves later steps with new contents.
        """
        ...


class PagedAttention(Protocol):
    def __call__(
        self, q: Tensor, kv_layer: KVLayer, plan: object, sink_logits: Tensor | None = None
    ) -> Tensor:
        """q [T, num_heads, head_dim] -> [T, num_heads, head_dim].

        Query head h reads KV head h // (num_heads / num_kv_heads). Softmax in float32 or better.
        The step's own KV is stored already. Slots after a row's end are never read. Tokens after
        those of the plan (padding) get undefined results.

        sink_logits [num_heads], contiguous, float32 (float64 for float64 queries): each head's
        score of one more key, which all its queries see and whose value is zero. So it takes part
        in the softmax's sum alone, after scale and soft cap (gpt-oss; Xiao et al. 2023, section
        3.3). None: there is none.
        """
        ...


class StoreLatent(Protocol):
    def __call__(self, latent: Tensor, kv_layer: Tensor, slots: Tensor) -> None:
        """Write latent [T, latent_dim + rope_dim] to rows `slots` [T] int64 of kv_layer
        [num_slots, latent_dim + rope_dim], IN PLACE.

        Slots are distinct except for those of padding tokens, of which any may win.
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
        """The plan of a step for `latent_attention` of the same backend; see PlanAttention.

        kv_layer [num_slots, latent_dim + rope_dim], any layer's; scale: of the scores (the model's
        head_dim ** -0.5 before absorption, times the factor of its rotary scaling).
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
        -> [T, num_heads, latent_dim], input of each head's W_UV. Otherwise as PagedAttention.
        """
        ...


class PlanSelection(Protocol):
    def __call__(self, rows: AttentionRows, num_selected: int) -> object:
        """The plan of a step for `select_keys` of the same backend; made once a step.

        rows: of queries that see more than num_selected keys each. A backend of an accelerator
        returns a DevicePlan.
        """
        ...


class SelectKeys(Protocol):
    """The keys that a query attends to, by an index of all (DeepSeek-V3.2, section 2.1): those with
    the highest

        score = sum over heads of weight * relu(q . key)

    of all at its position and before, which its row alone decides.
    """

    def __call__(self, q: Tensor, weights: Tensor, index_keys: Tensor, plan: object) -> Tensor:
        """q [T, num_heads, head_dim], weights [T, num_heads] float32 (float64 for float64 queries),
        index_keys [num_slots, head_dim], one a token for all heads -> the slots of each query's
        num_selected keys [T, num_selected] int32, in the order of their positions.

        Scores in float32 or better; of equal ones the earlier key wins. Scores that are not
        finite select some of the query's keys.
        """
        ...


class PlanRecurrence(Protocol):
    def __call__(self, rows: StateRows, padded_tokens: int | None = None) -> object:
        """The plan of a step for the recurrent layers' kernels of the same backend; made once a
        step. A backend of an accelerator returns a DevicePlan, whose `bind` does not use the page
        table; `padded_tokens`, not in a step with drafts, as in PlanAttention.

        Of these kernels' pools [num_slots, ...] only the rows' slots are read and written, the
        latter IN PLACE; slots are distinct except for those of padding. What a row computes does
        not depend on other rows. What they leave is the state behind a row's tokens that are no
        drafts.
        """
        ...


class AcceptDrafts(Protocol):
    def __call__(self, plan: object, accepted: Tensor) -> None:
        """Move the states of a step's rows on behind `accepted` [R] int64 of their drafts, 0 to all
        of them, IN PLACE; in every pool that was used with the plan. Once a plan, before anything
        else is done with the slots.
        """
        ...


class ShortConvolution(Protocol):
    def __call__(
        self,
        x: Tensor,
        taps: Tensor,
        bias: Tensor | None,
        tails: Tensor,
        plan: object,
        *,
        has_silu: bool = False,
    ) -> Tensor:
        """Causal convolution of each channel by itself over a row's tokens: x [T, channels] ->
        [T, channels], a new tensor, y_t = sum over i of taps[i] * x_(t - kernel + 1 + i) + bias,
        then silu with `has_silu`.

        taps [kernel, channels], contiguous, float32 or float64; bias [channels]; tails
        [num_slots, kernel - 1, channels]: the last inputs of each row's sequence, oldest first.
        """
        ...


class GatedDeltaRule(Protocol):
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        states: Tensor,
        plan: object,
    ) -> Tensor:
        """Gated delta rule over each row's tokens: with unit vectors q, k (q / sqrt(key_dim)),

            S = exp(log_decay) S;   S = S + k (beta (v - k . S));   out = q . S

        q, k [T, num_key_heads, key_dim], each serving num_value_heads / num_key_heads consecutive
        value heads; v [T, num_value_heads, value_dim] -> [T, num_value_heads, value_dim], a new
        tensor; log_decay [T, num_value_heads] <= 0, in the dtype of the states, or [T,
        num_value_heads, key_dim], one for each number of a key (Kimi Linear); beta [T,
        num_value_heads] of any dtype; states [num_slots, num_value_heads, key_dim, value_dim],
        float32 or float64.
        """
        ...


class StateSpaceScan(Protocol):
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        steps: Tensor,
        decay: Tensor,
        states: Tensor,
        plan: object,
    ) -> Tensor:
        """Mamba-2's scan over each row's tokens (Dao and Gu, "Transformers are SSMs", 2024; q, k, v
        are its C, B, X):

            S = exp(step * decay) S + k (step v);   out = q . S

        q, k [T, num_groups, key_dim], each serving num_heads / num_groups consecutive heads; v [T,
        num_heads, value_dim] -> [T, num_heads, value_dim], a new tensor; steps [T, num_heads] > 0
        and decay [num_heads] < 0, in the dtype of the states; states [num_slots, num_heads,
        key_dim, value_dim], float32 or float64.
        """
        ...


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """One recurrent layer's pool of states."""

    tails: Tensor  # [num_slots, kernel - 1, channels], see ShortConvolution
    matrices: Tensor | None = None  # [num_slots, num_heads, key_dim, value_dim]


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A backend's kernels of recurrent layers."""

    plan: PlanRecurrence
    short_convolution: ShortConvolution
    gated_delta_rule: GatedDeltaRule
    state_space_scan: StateSpaceScan
    accept_drafts: AcceptDrafts


class AdjustLogits(Protocol):
    def __call__(self, logits: Tensor, rows: AdjustedRows, previous_tokens: Tensor) -> None:
        """Penalties, bias and banned tokens, IN PLACE; see `adjusted_rows`.

        logits [N, vocab_size] float32 or float64, contiguous; previous_tokens [P] int64, the token
        that each row of the previous step sampled.
        """
        ...


class ApplyTokenMask(Protocol):
    def __call__(self, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
        """Set the logits of tokens that may not be sampled to -inf, IN PLACE; other rows are kept.

        logits [N, vocab_size] float32 or float64, contiguous; rows [K] int64, distinct; masks
        [K, ceil(vocab_size / 32)] int32, contiguous: bit i % 32 of word i // 32 allows token i.
        """
        ...


class Observe(Protocol):
    def __call__(self, queries: Tensor, keys: Tensor, options: AttentionOptions) -> Tensor:
        """How much attention a sequence's last queries pay to its keys: [num_kv_heads, C] float32,
        of float64 inputs float64, summed over the queries of all heads that share a key.

        queries [W, num_heads, head_dim], keys [num_kv_heads, C, head_dim], both rotated, C >= W;
        query i is that of token C - W + i, and sees the keys up to its own. Cost: that of scores.
        """
        ...


class Sample(Protocol):
    def __call__(
        self, logits: Tensor, rows: SamplingRows, out: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draw a token a row: token_ids [N] int64 and is_finite [N] bool, on the logits' device:
        `out`, or new tensors.

        logits [N, vocab_size] float32 or float64, contiguous; -inf masks a token. The draw is
        defined in docs/how-it-works/sampling.md, in float64, and the same on every backend.
        is_finite is False if a row's logits contain NaN or +inf, or all are -inf; its token is then
        some valid id.
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
        """Copy out of the layers."""
        ...

    def unpack(self, pages: Tensor, packed: Tensor) -> None:
        """Copy into the layers; pages are distinct."""
        ...


class MakePageCopy(Protocol):
    def __call__(self, layers: Sequence[Tensor], page_size: int) -> PageCopy:
        """For the layers of one pool, each [num_vectors, num_slots, width], contiguous, with
        num_slots a multiple of page_size; the layers are kept."""
        ...


class Captured(Protocol):
    """A forward pass over fixed tensors, recorded once so that it can be rerun at less cost."""

    result: Tensor  # what the pass returned; overwritten by each replay

    def replay(self, plans: Sequence[object], lora_plan: object | None = None) -> None:
        """Run it again; plans: this step's, in the order in which the recording's were passed to
        `Capture`; the tensors that it read hold this step's values."""
        ...


class Capture(Protocol):
    def __call__(
        self,
        run: Callable[[], Tensor],
        plans: Sequence[object],
        lora_plan: object | None = None,
        *,
        outputs: Callable[[], Sequence[Tensor]] = tuple,
        beside: Captured | None = None,
    ) -> tuple[Tensor, Captured | None]:
        """Run once and record; None if `run` does something that cannot be recorded. plans: the
        attention plans that `run` uses; lora_plan: that of its adapters, None: without any.
        outputs: tells after the run which tensors besides the result are read after a replay.
        beside: a recording that is never replayed at the same time, so that both may compute in
        the same memory; results and outputs have their own."""
        ...


class Communicator(Protocol):
    """This process among those that hold a model together, each a rank in [0, num_ranks).

    All ranks call the same methods with the same shapes in the same order. Not thread-safe, but for
    `abort`.
    """

    rank: int
    num_ranks: int

    def all_reduce(self, x: Tensor) -> None:
        """x: contiguous, of a floating dtype; changed IN PLACE to the sum over the ranks, added in
        their order (on a GPU in an order that the same group always takes). After `abort` it holds
        anything."""
        ...

    def all_gather(self, data: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """data: of host memory -> [num_ranks, *data.shape]. Raises RankLost after `abort`."""
        ...

    def all_to_all(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """parts: for each rank what it is given, [N] uint8 with any N, where the ranks compute ->
        from each rank what it gave to this one. Raises RankLost after `abort`."""
        ...

    def gather_columns(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """x [N, sizes[rank]] -> [N, sum of sizes], all ranks' columns."""
        ...

    def abort(self) -> None:
        """Let every rank that waits, or will, give up; from any thread."""
        ...

    def check(self) -> None:
        """Raises RankLost after `abort`."""
        ...

    def close(self) -> None:
        """Free what it holds; nobody uses it any more."""
        ...
