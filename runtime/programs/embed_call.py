"""A running `Embed`: its request computes the text, and sums hidden states or has an
encoder's vector."""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

from ..schedule.plan import RowResult
from ..schedule.request import FinishReason, Request
from .calls import Report, RequestQueue, meta_of


class EmbedCall:
    """One embedding. Reports its end exactly once, unless aborted."""

    def __init__(
        self,
        report: Report,
        normalize: bool,
        head: npt.NDArray[np.float64] | None = None,
    ) -> None:
        """`normalize`: scale to length 1. `head` [labels, size]: makes scores of the vector."""
        self._report = report
        self._normalize = normalize
        self._head = head
        self._is_aborted = False
        self.request: Request | None = None

    def abort(self, queue: RequestQueue) -> None:
        self._is_aborted = True
        if self.request is not None:
            queue.abort(self.request)

    def on_token(self, request: Request, result: RowResult) -> FinishReason | None:
        raise AssertionError("nothing is sampled for an embedding")

    def on_finish(self, request: Request) -> None:
        if self._is_aborted:
            return
        if request.finish_reason is not FinishReason.STOP:
            reason = request.error or "the call was aborted"
            return self._report.failed(reason, request.error_kind)
        vector = request.vector if request.hidden is None else request.hidden.pooled()
        assert vector is not None
        if self._head is not None:
            vector = self._head @ vector
        if self._normalize:  # a zero vector stays zero
            vector = vector / (np.linalg.norm(vector) or 1.0)
        payload = {"value": vector.tolist(), "text": "", "meta": meta_of(request)}
        self._report.finished(array("i"), "", payload)
