"""The head of a sequence classifier: scores for a pooled vector, one a label."""

from __future__ import annotations

from torch import Tensor

from ...checkpoint.config.encoder_config import ScoreHead
from .build import EncoderBuild


class Scores:
    """norm(activation(dense(x))), as far as the config has these, then the output layer."""

    def __init__(self, build: EncoderBuild, head: ScoreHead) -> None:
        size = build.config.hidden_size
        self._dense = self._norm = None
        if head.dense is not None:
            self._dense = build.linear([head.dense], size, [size], has_bias=head.has_dense_bias)
            self._activate = build.activation(head.dense_activation)
        if head.norm is not None:
            self._norm = build.norm(head.norm)
        self._output = build.linear([head.output], size, [head.num_labels], has_bias=True)

    def __call__(self, x: Tensor) -> Tensor:
        """[N, hidden_size] -> [N, num_labels] logits, in the model's dtype."""
        if self._dense is not None:
            x = self._activate(self._dense(x))
        if self._norm is not None:
            x = self._norm(x)
        return self._output(x)
