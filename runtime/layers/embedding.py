"""The token embedding and the output projection, which may be one matrix."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ...kernels.registry import Kernels
from ..model_config import ModelConfig
from ..weights.source import WeightSource

EMBEDDING_NAME = "model.embed_tokens.weight"
OUTPUT_NAME = "lm_head.weight"


class VocabEmbedding:
    """Token ids to vectors, and vectors to logits.

    Where the two matrices are tied, the output projection still keeps its own packed copy (on a
    CPU packing makes it 4 times faster at one row, see kernels/cpu/linear.py).
    """

    def __init__(self, source: WeightSource, config: ModelConfig, kernels: Kernels) -> None:
        shape = (config.vocab_size, config.hidden_size)
        self._table = source.take(EMBEDDING_NAME, shape)
        if config.tie_word_embeddings:
            source.skip(OUTPUT_NAME)  # some checkpoints store the shared matrix twice
            self._output = kernels.make_output_linear(self._table)
        else:
            self._output = kernels.make_output_linear(source.take(OUTPUT_NAME, shape))

    def embed(self, input_ids: Tensor) -> Tensor:
        """[T] int64 -> [T, hidden_size], a new tensor."""
        return F.embedding(input_ids, self._table)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] -> [N, vocab_size] float32, or float64 for a float64 model."""
        return self._output(hidden)
