"""The token embedding and the output projection, which may be one matrix."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ....kernels.ops import OutputLinear, Weight
from ....kernels.reference.dense import placed
from ...checkpoint.parts import WHOLE, Part, Range
from ...checkpoint.weight_parts import part_of
from .build import ModelBuild
from .ranks import Ranks

EMBEDDING_NAME = "model.embed_tokens.weight"
OUTPUT_NAME = "lm_head"
WORD_BITS = 32

logger = logging.getLogger(__name__)


class VocabEmbedding:
    """Token ids to vectors, and vectors to logits.

    Where the two matrices are tied, the output projection still keeps its own packed copy (on a
    CPU packing makes it 4 times faster at one row, see kernels/cpu/linear.py). A checkpoint may
    store a tied matrix under either name or both; two that differ are not tied, whatever its config
    says: Hugging Face treats a fine-tuned or merged head so. Between ranks the vocabulary is
    divided; of the stages of a pipeline the first has the one matrix and the last the other.
    """

    def __init__(self, build: ModelBuild) -> None:
        config, stage = build.config, build.stage
        self._ranks = build.ranks
        self._share = vocab_share(config.vocab_size, build.ranks)
        self._gather = build.kernels.gather_rows
        self._gather_share = build.kernels.gather_share
        self._scale = build.kernels.scale_in_place
        # Rounded to the dtype, as in Gemma's training: sqrt(3072) is 55.5 in bfloat16.
        self._multiplier = torch.tensor(config.embedding_multiplier, dtype=build.dtype).item()
        self._output: OutputLinear | None = None
        table, is_tied = None, config.tie_word_embeddings
        if stage.is_first or (stage.is_last and is_tied):
            table, is_tied = self._take_table(build)
        if stage.is_last:
            self._take_output(build, table if is_tied else None)
        self._table = table if stage.is_first else None

    def _take_table(self, build: ModelBuild) -> tuple[Tensor, bool]:
        """The embedding, and whether it is the output projection too."""
        config, source = build.config, build.source
        shape = (config.vocab_size, config.hidden_size)
        rows = None if self._share is None else [self._share]
        table, output = (f"{config.weight_prefix}{name}" for name in (EMBEDDING_NAME, OUTPUT_NAME))
        head, is_tied = f"{output}.weight", config.tie_word_embeddings
        if is_tied and head in source and table not in source:
            table = head
        taken = source.take_rows(table, shape, rows)
        if is_tied and head in source and table != head:
            # Compared before anything else is loaded, while there is room for both.
            is_tied = torch.equal(taken, source.take_rows(head, shape, rows))
            is_tied = build.ranks.agree(is_tied)
            if not is_tied:
                logger.warning("%s and %s differ: not tied, whatever the config says", head, table)
        return taken, is_tied

    def _take_output(self, build: ModelBuild, table: Tensor | None) -> None:
        """table: the embedding, where it is the same matrix."""
        config, source = build.config, build.source
        output = f"{config.weight_prefix}{OUTPUT_NAME}"
        rows = None if self._share is None else [self._share]
        part = WHOLE if rows is None else Part([rows])
        self._gather_columns = _gathering(config.vocab_size, build.ranks)
        self._logits_divisor = config.logits_divisor
        self._soft_cap = config.logits_soft_cap
        self._bias: Tensor | None = None
        if table is not None:
            weight = source.tie_weight(table)
            if self._share is not None and _num_rows(weight) == config.vocab_size:
                weight = part_of([output], weight, [config.vocab_size], part)
        else:
            sizes = [config.vocab_size]
            weight = source.take_part([output], sizes, config.hidden_size, part)
        self._output = build.kernels.make_output_linear(weight)
        if config.logits_bias:
            wide = torch.promote_types(build.dtype, torch.float32)
            self._bias = source.take_rows(f"{output}.bias", (config.vocab_size,), rows, wide)

    def embed(self, input_ids: Tensor) -> Tensor:
        """[T] int64 -> [T, hidden_size], a new tensor."""
        x = self._rows(input_ids)
        if self._multiplier != 1.0:
            self._scale(x, self._multiplier)
        return x

    def _rows(self, input_ids: Tensor) -> Tensor:
        assert self._table is not None, "it is the first stage's"
        if self._share is None:
            return self._gather(self._table, input_ids)
        return self._ranks.sum(self._gather_share(self._table, input_ids, self._share[0]))

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[N, hidden_size] -> [N, vocab_size], or this rank's share of the vocabulary unless ranks
        gather them, float32, or float64 for a float64 model; `out`, or a new tensor."""
        assert self._output is not None, "it is the last stage's"
        gather = self._gather_columns
        logits = self._output(hidden, None if gather is not None else out)
        if self._bias is not None:
            logits += self._bias
        if self._logits_divisor != 1.0:
            logits /= self._logits_divisor
        if self._soft_cap is not None:
            logits = logits.div_(self._soft_cap).tanh_().mul_(self._soft_cap)
        return logits if gather is None else placed(gather(logits), out)


def vocab_share(vocab_size: int, ranks: Ranks) -> Range | None:
    """The token ids of a rank; None: all. They begin at multiples of 32, the bits of a mask's
    word."""
    if vocab_size < WORD_BITS * ranks.num_ranks:
        return None
    share = ranks.share(-(-vocab_size // WORD_BITS))
    if share is None:
        return None
    return share[0] * WORD_BITS, min(vocab_size, share[1] * WORD_BITS)


def _gathering(vocab_size: int, ranks: Ranks) -> Callable[[Tensor], Tensor] | None:
    """Makes logits of a rank's share those of all; None: ranks keep theirs, or have all of them."""
    communicator, sizes = ranks.communicator, []
    if communicator is None or not ranks.gathers_logits:
        return None
    for rank in range(ranks.num_ranks):
        share = vocab_share(vocab_size, replace(ranks, rank=rank))
        if share is None:
            return None
        sizes.append(share[1] - share[0])
    return partial(communicator.gather_columns, sizes=sizes)


def _num_rows(weight: Weight) -> int:
    return len(weight) if isinstance(weight, Tensor) else weight.out_features
