"""Small steps replay a recorded forward pass, where the kernels can record one.

There is one recording for each number of tokens up to a limit, with and without adapters, made at
the first such step. Its inputs are fixed tensors, into which a step's inputs are copied; what a row
attends to and a token's adapter come with the plans, so prompts and decode rows of the same number
of tokens share a recording.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from ...kernels.ops import Capture, Captured
from ..models.forward_batch import ForwardBatch
from ..models.language_model import LanguageModel

# The more tokens, the smaller the interpreter's share (llama-160m, two cores of an Ice Lake Xeon:
# 8% of a step at 32 tokens, 6% at 64). While a pass is recorded all that its layers allocate stays:
# of so many tokens in 32 layers what one layer takes of 2,048. Results stay for good.
MAX_CAPTURED_TOKENS = 64
MAX_CAPTURED_WITH_ADAPTERS = 32  # more tokens of one adapter may be torch's products


@dataclass(frozen=True, slots=True)
class _Replay:
    """A recording with the tensors that it reads."""

    batch: ForwardBatch
    captured: Captured

    def run(self, batch: ForwardBatch) -> Tensor:
        self.batch.input_ids.copy_(batch.input_ids)
        self.batch.positions.copy_(batch.positions)
        self.batch.slot_mapping.copy_(batch.slot_mapping)
        if self.batch.residual is not None and batch.residual is not None:
            self.batch.residual.copy_(batch.residual)
        self.captured.replay(batch.attention, batch.adapters)
        if self.batch.kept is not None and batch.kept is not None:
            batch.kept.of.update(self.batch.kept.of)
        return self.captured.result


class CapturedForward:
    """A model's forward pass, replayed where it can be. Owns the recordings.

    The result is valid until the next call.
    """

    def __init__(self, model: LanguageModel, capture: Capture | None) -> None:
        self._model = model
        self._capture = capture
        # By (number of tokens, with adapters, with states kept); None: the pass does more than
        # call kernels.
        self._replays: dict[tuple[int, bool, bool], _Replay | None] = {}
        self._last: Captured | None = None

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """-> hidden [T, hidden_size], see `Decoder.forward`."""
        key = (len(batch.input_ids), batch.adapters is not None, batch.kept is not None)
        most = MAX_CAPTURED_TOKENS if batch.adapters is None else MAX_CAPTURED_WITH_ADAPTERS
        is_recorded = key[0] <= most and batch.images is None
        is_recorded = is_recorded and batch.on_layer is None and batch.observed is None
        if self._capture is None or not is_recorded:
            return self._forward(batch)
        if key not in self._replays:
            result, self._replays[key] = self._record(batch, self._capture)
            return result
        replay = self._replays[key]
        return self._forward(batch) if replay is None else replay.run(batch)

    def _forward(self, batch: ForwardBatch) -> Tensor:
        return self._model.forward(batch.input_ids, batch.positions, batch)

    def _record(self, batch: ForwardBatch, capture: Capture) -> tuple[Tensor, _Replay | None]:
        fixed = replace(
            batch,
            input_ids=batch.input_ids.clone(),
            positions=batch.positions.clone(),
            slot_mapping=batch.slot_mapping.clone(),
            residual=None if batch.residual is None else batch.residual.clone(),
        )
        result, captured = capture(
            lambda: self._forward(fixed),
            fixed.attention,
            fixed.adapters,
            outputs=lambda: [] if fixed.kept is None else list(fixed.kept.of.values()),
            beside=self._last,
        )
        if captured is None:
            return result, None
        self._last = captured
        return result, _Replay(replace(fixed, attention=(), adapters=None), captured)
