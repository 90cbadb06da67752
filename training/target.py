"""The model that a draft is trained for: its hidden states of whole texts, as its engine computes
them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from copy import copy

import numpy as np
import torch
from torch import Tensor

from ..runtime.execute.inputs import InputBuilder, plan_attentions
from ..runtime.execute.model_runner import ModelRunner
from ..runtime.models.decoder import Decoder
from ..runtime.models.forward_batch import ForwardBatch
from ..runtime.schedule.plan import PageUpdate, Row, StepPlan

_CHUNK = 1024  # tokens of a forward


class Target:
    """Takes a runner's KV for its own. `head` [vocab_size, hidden_size] float32: the output
    projection, whatever it is stored as."""

    def __init__(self, runner: ModelRunner) -> None:
        assert isinstance(runner.model, Decoder), "its layers are alike"
        self.config = runner.config
        self._runner = runner
        self._model = runner.model
        self._inputs = InputBuilder(
            page_size=runner.page_size, max_running_requests=1, max_model_len=runner.max_model_len
        )
        self._bias = self._projected(torch.zeros(1, runner.config.hidden_size))
        size = runner.config.hidden_size
        self.head = (self._projected(torch.eye(size)) - self._bias).T.contiguous()

    def of_first_layers(self, num_layers: int) -> Target:
        """The model that its first layers are, on the same KV: one text at a time of either."""
        first = copy(self)
        first._model = self._model.first(num_layers)
        return first

    @torch.no_grad()
    def hidden(self, token_ids: Sequence[int]) -> Tensor:
        """[T, hidden_size] in the model's dtype: the final, normed hidden state of each token."""
        runner, size = self._runner, self._runner.page_size
        pages = PageUpdate(0, array("i", range(-(-len(token_ids) // size))))
        found = []
        for start in range(0, len(token_ids), _CHUNK):
            ids = tuple(token_ids[start : start + _CHUNK])
            row = Row(0, 0, start, ids, None if start else pages)
            inputs = self._inputs.build(StepPlan(0, (row,)))
            layers = runner.pool.layers
            attention = plan_attentions(
                runner.kernels, inputs.attention_rows, layers, runner.config
            )
            batch = ForwardBatch(
                input_ids=torch.from_numpy(inputs.token_ids),
                positions=torch.from_numpy(np.ascontiguousarray(inputs.positions)),
                slot_mapping=torch.from_numpy(inputs.slots),
                kv_layers=layers,
                attention=attention,
            )
            hidden = self._model.forward(batch.input_ids, batch.positions, batch)
            found.append(hidden.clone())
        return torch.cat(found)

    @torch.no_grad()
    def embed(self, token_ids: Tensor) -> Tensor:
        """[...] int64 -> [..., hidden_size] float32"""
        return self._model.vocabulary.embed(token_ids.flatten()).float().view(*token_ids.shape, -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] float32 -> [N, vocab_size]; gradients reach `hidden`."""
        logits = hidden @ self.head.T + self._bias
        cap = self.config.logits_soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    @torch.no_grad()
    def _projected(self, hidden: Tensor) -> Tensor:
        """Rows of the output projection, from the logits of unit vectors; a soft cap does not
        matter to numbers so small."""
        return self._model.compute_logits(hidden.to(self._runner.dtype)).float()
