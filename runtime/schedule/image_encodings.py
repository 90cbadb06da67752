"""Which images have their features on the device, and which are on their way there.

A chunk of a prompt ends before an image whose features are missing, which are then asked for: once,
whoever else asks. An image is encoded a few blocks a step, so that the rows beside it wait no more
than they would for a chunk of a prompt. Its features stay while requests need them, and then as
long as there is room, least recently used first to go. An image whose KV is cached is not encoded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..images.image import Image
from .plan import EncodeSlice
from .request import Request, RequestState


@dataclass(slots=True, eq=False)
class _State:
    image: Image
    num_bytes: int
    num_blocks: int = 0  # planned so far
    users: set[Request] = field(default_factory=set)


class ImageEncodings:
    """Owns what there is of each image. Invariant: all features together take at most `max_bytes`,
    or are those of one image."""

    def __init__(self, *, max_bytes: int, num_blocks: int, bytes_per_token: int) -> None:
        """`num_blocks`: of the vision tower; `bytes_per_token`: of features."""
        self._max_bytes = max_bytes
        self._num_blocks = num_blocks
        self._bytes_per_token = bytes_per_token
        self._states: OrderedDict[int, _State] = OrderedDict()  # least recently used first
        self._wanted: dict[int, tuple[Image, Request]] = {}
        self._dropped: list[int] = []  # that the executor still has
        self._num_encoded = self._num_hits = 0

    def computable(self, request: Request, num_tokens: int) -> int:
        """How many of the request's next `num_tokens` can be computed in this step: up to the first
        image that has no features yet."""
        start = request.num_scheduled_tokens
        for span in request.images:
            if span.start >= start + num_tokens:
                break
            if span.end > start and not self._has_features(span.image, request):
                return max(0, span.start - start)
        return num_tokens

    def _has_features(self, image: Image, request: Request) -> bool:
        state = self._states.get(image.token_id)
        if state is None:
            self._wanted.setdefault(image.token_id, (image, request))
            return False
        state.users.add(request)
        if state.num_blocks < self._num_blocks:
            return False
        self._states.move_to_end(image.token_id)
        self._num_hits += 1
        return True

    def begin_step(self) -> None:
        """A step is being planned: let go what nobody needs any more."""
        self._wanted.clear()
        for key, state in self._states.items():
            if state.users:
                state.users = {user for user in state.users if _needs(user, key)}

    def take(self, num_patch_blocks: int) -> tuple[tuple[int, ...], tuple[EncodeSlice, ...]]:
        """What the step drops and encodes: so many patches through one block, and at least one
        block of one image."""
        slices: list[EncodeSlice] = []
        for image, request in self._wanted.values():
            if self._make_room(image):
                self._begin(image, request)
        self._wanted.clear()
        for key, state in self._states.items():
            left = self._num_blocks - state.num_blocks
            if not left or not state.users:  # nobody waits for it any more: perhaps somebody will
                continue
            num_blocks = min(left, max(0, num_patch_blocks) // state.image.num_patches)
            if num_blocks == 0:
                if slices:
                    break
                num_blocks = 1
            source = None if state.num_blocks else state.image
            slices.append(EncodeSlice(key, num_blocks, source))
            state.num_blocks += num_blocks
            self._num_encoded += state.num_blocks == self._num_blocks
            num_patch_blocks -= num_blocks * state.image.num_patches
        dropped, self._dropped = tuple(self._dropped), []
        return dropped, tuple(slices)

    def fail(self, key: int) -> Sequence[Request]:
        """The image cannot be encoded: it is forgotten; those who need it."""
        state = self._states.pop(key, None)
        return () if state is None else [user for user in state.users if _needs(user, key)]

    def reset(self) -> None:
        """A step has failed, and nobody knows how far it came: begin anew."""
        self._dropped += self._states
        self._states.clear()

    def describe(self) -> Mapping[str, int]:
        """As plain data."""
        num_bytes = sum(state.num_bytes for state in self._states.values())
        return {
            "num_images": len(self._states),
            "bytes": num_bytes,
            "max_bytes": self._max_bytes,
            "encoded": self._num_encoded,
            "hits": self._num_hits,
        }

    def _begin(self, image: Image, request: Request) -> None:
        num_bytes = image.num_tokens * self._bytes_per_token
        self._states[image.token_id] = _State(image, num_bytes, users={request})

    def _make_room(self, image: Image) -> bool:
        """Drop features that nobody needs; whether the image's may be made now."""
        room = self._max_bytes - image.num_tokens * self._bytes_per_token
        taken = sum(state.num_bytes for state in self._states.values())
        for key in [key for key, state in self._states.items() if not state.users]:
            if taken <= room:
                break
            taken -= self._states.pop(key).num_bytes
            self._dropped.append(key)
        return taken <= room or not self._states


def _needs(request: Request, key: int) -> bool:
    """Whether it runs and has not been given all of the image's tokens to compute."""
    return request.state is RequestState.RUNNING and any(
        span.image.token_id == key and span.end > request.num_scheduled_tokens
        for span in request.images
    )
