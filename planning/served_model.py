"""A model as served: the size of its weights and KV, and what fits. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.kv_cache_dtype import KVCacheDtype
from ..runtime.checkpoint.config.model_config import ModelConfig
from ..runtime.checkpoint.draft_checkpoint import Draft
from ..runtime.memory.kv_layout import KVLayout
from ..runtime.memory.sizing import (
    DEFAULT_CPU_MEM_FRACTION,
    DEFAULT_GPU_MEM_FRACTION,
    num_host_state_slots,
    num_state_slots,
)
from ..runtime.memory.state_layout import StateLayout
from ..runtime.models.layers.stage import ALL_LAYERS, Stage
from .draft_room import DraftRoom
from .formats import DTYPE_BYTES, AdapterRoom, WeightFormat
from .model_shape import ModelShape

DEFAULT_RUNNING = 128  # the engine's max_running_requests unless told


@dataclass(frozen=True, slots=True)
class Fit:
    """A model in a device's memory."""

    weight_bytes: int
    kv_bytes: int  # left for KV; 0 if the weights do not fit
    kv_tokens: int  # the same in tokens

    def num_requests(self, request_tokens: int) -> int:
        """How many requests run at a time, without shared prefixes."""
        return self.kv_tokens // request_tokens


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model in one dtype and one format of weights and KV, before it is loaded."""

    config: ModelConfig
    shape: ModelShape
    format: WeightFormat
    kv_bytes_per_token: int  # with the draft's
    adapters: AdapterRoom | None = None  # None: none are served
    state_bytes: int = 0  # of a sequence's recurrent state; 0: the model has none
    draft: DraftRoom | None = None  # None: no model guesses for it

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        dtype: str,
        quantization: str = "none",
        kv_cache_dtype: KVCacheDtype = "auto",
        adapters: AdapterRoom | None = None,
        stage: Stage = ALL_LAYERS,
        draft: Draft | None = None,
    ) -> ServedModel:
        """dtype: resolved, not "auto"; quantization and kv_cache_dtype as the flags. `stage`: see
        ModelShape. `draft`: what guesses for it."""
        weights = WeightFormat(quantization, dtype)
        layout = KVLayout.of(config, dtype, kv_cache_dtype)
        states = StateLayout.of(config, dtype)
        room = None if draft is None else DraftRoom.of(draft, config, dtype, kv_cache_dtype)
        of_draft = None if room is None else room.layout
        return cls(
            config,
            ModelShape.of(config, stage),
            weights,
            layout.bytes_per_token + (0 if of_draft is None else of_draft.bytes_per_token),
            adapters,
            0 if states is None else states.num_bytes,
            room,
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, the draft's too."""
        of_draft = 0 if self.draft is None else self.draft.weight_bytes
        return self.format.model_bytes(self.shape) + of_draft

    @property
    def adapter_bytes(self) -> int:
        """Bytes of the tables of all slots, in the dtype."""
        if self.adapters is None:
            return 0
        return self.adapters.num_total(self.shape) * DTYPE_BYTES[self.format.dtype]

    @property
    def rotary_bytes(self) -> int:
        """Bytes of the cosines and sines of all positions, one table for each kind of rotary
        embedding in the layers."""
        num_tables = 2 * len(set(self.config.layer_ropes))
        num_positions = self.config.context_length
        itemsize = DTYPE_BYTES[self.format.dtype]
        return num_tables * num_positions * self.config.rotary_dim * itemsize

    def state_pool_bytes(
        self, kv_bytes: int, *, max_running_requests: int, num_checkpoints: int | None
    ) -> int:
        """Bytes of recurrent states beside so much KV: those of all running requests, and of
        `num_checkpoints`, None: as the engine chooses. 0 for a model without any."""
        states = StateLayout.of(self.config, self.format.dtype)
        if states is None:
            return 0
        num_slots = num_state_slots(
            states,
            max_running_requests=max_running_requests,
            num_checkpoints=num_checkpoints,
            kv_bytes=kv_bytes,
        )
        return num_slots * states.num_bytes

    def host_bytes(self, kv_tokens: int) -> int:
        """Bytes of a host tier of so many tokens of KV, with recurrent states where there are."""
        kv_bytes = kv_tokens * self.kv_bytes_per_token
        states = StateLayout.of(self.config, self.format.dtype)
        if states is None:
            return kv_bytes
        return kv_bytes + num_host_state_slots(states, kv_bytes) * states.num_bytes

    def fit(
        self, memory_bytes: int, *, is_gpu: bool, max_running_requests: int = DEFAULT_RUNNING
    ) -> Fit:
        """KV gets the default share of what the weights, rotary tables and adapters leave. Where
        the model has recurrent states, those of all running requests come first, and half of the
        rest is for checkpoints."""
        share = DEFAULT_GPU_MEM_FRACTION if is_gpu else DEFAULT_CPU_MEM_FRACTION
        left = memory_bytes - self.weight_bytes - self.rotary_bytes - self.adapter_bytes
        states = max_running_requests * self.state_bytes
        kv_bytes = max(0, int(left * share) - states) // (2 if states else 1)
        return Fit(self.weight_bytes, kv_bytes, kv_bytes // self.kv_bytes_per_token)
