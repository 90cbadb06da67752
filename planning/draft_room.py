"""The memory that what guesses for a model takes beside it. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.kv_cache_dtype import KVCacheDtype
from ..runtime.checkpoint.config.model_config import ModelConfig
from ..runtime.checkpoint.draft_checkpoint import Draft, DraftCheckpoint, OwnPredictor
from ..runtime.memory.kv_layout import KVLayout
from ..runtime.models.drafts import config_of
from ..runtime.models.layers.stage import Stage
from .formats import DTYPE_BYTES, WeightFormat
from .model_shape import ModelShape
from .stored_weights import stored_weights


@dataclass(frozen=True, slots=True)
class DraftRoom:
    """Bytes beside the model's own."""

    weight_bytes: int = 0
    layout: KVLayout | None = None  # of its KV; None: it has none of its own

    @classmethod
    def of(
        cls, draft: Draft, model: ModelConfig, dtype: str, kv_cache_dtype: KVCacheDtype = "auto"
    ) -> DraftRoom:
        """dtype: resolved. Raises ModelLoadError for a head whose files cannot be read."""
        config = config_of(draft, model)
        layout = None if config is None else KVLayout.of(config, dtype, kv_cache_dtype)
        if isinstance(draft, OwnPredictor) and config is not None:
            shape = ModelShape.of(config, Stage(model.num_layers, False, False))
            joining = 2 * model.hidden_size**2 * DTYPE_BYTES[dtype]  # state and embedding
            return cls(WeightFormat("none", dtype).model_bytes(shape) + joining, layout)
        if not isinstance(draft, DraftCheckpoint):
            return cls()
        if draft.head is None and config is not None:
            weights = WeightFormat(draft.quantization, dtype)
            return cls(weights.model_bytes(ModelShape.of(config)), layout)
        stored = stored_weights(draft.folder)
        return cls(0 if stored is None else stored.num_bytes, layout)
