"""Images on their way through the vision tower, and the features of those that are there.

The plan says what is encoded and what is dropped; an image that cannot be encoded is reported, and
the step goes on.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from ...kernels.context_share import TokenShare
from ..models.forward_batch import ImageRows
from ..models.vision.geometry import Grid
from ..models.vision.tower import Encoding, VisionTower
from ..schedule.plan import EncodeSlice, StepPlan
from .inputs import StepLayout

log = logging.getLogger(__name__)


class ImageFeatures:
    """Owns the features of all images that plans may name."""

    def __init__(self, tower: VisionTower) -> None:
        self._tower = tower
        self._encodings: dict[int, Encoding] = {}
        self._features: dict[int, Tensor] = {}  # [1 + layers, tokens, hidden_size]

    def run(self, plan: StepPlan) -> tuple[tuple[int, str], ...]:
        """Drop and encode what the plan says; the keys of images that failed, and why."""
        for key in plan.dropped_images:
            self._features.pop(key, None)
            self._encodings.pop(key, None)
        errors = []
        for part in plan.encodes:
            try:
                self._encode(part)
            except Exception as error:  # of this image alone
                log.exception("an image could not be encoded")
                self._encodings.pop(part.key, None)
                errors.append((part.key, f"{type(error).__name__}: {error}"))
        return tuple(errors)

    def _encode(self, part: EncodeSlice) -> None:
        if part.source is not None:
            patches = torch.from_numpy(part.source.patches())
            self._encodings[part.key] = self._tower.begin(patches, Grid(*part.source.grid))
        encoding = self._encodings.get(part.key)
        if encoding is None:
            return  # it has failed before
        features = self._tower.advance(encoding, part.num_blocks)
        if features is not None:
            if not bool(torch.isfinite(features).all()):
                raise ValueError("features that are not finite")
            self._features[part.key] = features
            del self._encodings[part.key]

    def rows(self, plan: StepPlan, layout: StepLayout) -> ImageRows | None:
        """What the plan's rows compute of images."""
        places, features = [], []
        for row, start in zip(plan.rows, layout.query_start.tolist(), strict=False):
            for part in row.images:
                places.append(torch.arange(part.length) + (start + part.start))
                whole = self._features[part.key]
                features.append(whole[:, part.first : part.first + part.length])
        if not places:
            return None
        return ImageRows(torch.cat(places), torch.cat(features, 1))


def own_images(rows: ImageRows | None, tokens: TokenShare) -> ImageRows | None:
    """What a rank's tokens are of a step's images; None: nothing."""
    if rows is None or tokens.communicator is None:
        return rows
    nth = torch.full((tokens.num_tokens,), -1)
    nth[rows.places] = torch.arange(len(rows.places))
    nth = tokens.take(nth)
    (places,) = (nth >= 0).nonzero(as_tuple=True)
    return ImageRows(places, rows.features[:, nth[places]]) if len(places) else None
