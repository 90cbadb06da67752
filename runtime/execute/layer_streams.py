"""What is done of a step layer by layer, while other layers are computed: KV is sent to other
engines, and copies of KV into the pool are awaited.

After each layer of a step its KV of the streamed tokens is copied out of the pool and handed over;
the sending is another thread's. On an accelerator a step that is launched call by call begins when
the first layers' KV has arrived from other tiers, and waits on the device before further layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..checkpoint.config.model_config import ModelConfig
from ..memory.asynchronous_transfer import AsynchronousCopies
from ..memory.block_copy import Bytes, Slots, slots_of
from ..memory.device_pool import DeviceKVPool
from ..memory.kv_layout import KVLayout
from ..memory.peers.wire import MAX_PIECE_BYTES, StreamKey
from ..memory.whole_kv import WholeKV
from ..schedule.plan import StreamedKV
from .accelerator import Accelerator


class KVSink(Protocol):
    """Where pieces go (memory/peers/kv_sender.py)."""

    def send_kv(self, key: StreamKey, piece: int, start: int, kv: npt.NDArray[np.uint8]) -> None:
        """A piece of the tokens from `start` on, [num_vectors, length, vector_bytes], its own."""


class LayerStreams:
    """Of one pool on a CPU. Its lifetime is the runner's."""

    def __init__(
        self,
        pool: DeviceKVPool,
        config: ModelConfig,
        sink: KVSink | None,
        whole: WholeKV | None = None,
        numbers: Sequence[int] | None = None,
    ) -> None:
        """whole: where other processes have other parts of the KV; the engine's sends all of it,
        and has the sink. numbers: of all layers' pieces this stage's; None: it has all."""
        self._sink = sink
        self._whole = whole
        self._messages = None if whole is None else whole.messages
        self._page_size = pool.page_size
        self._memory: list[Bytes] = [each.numpy() for part in pool.parts for each in part]
        self._of_layer: dict[int, list[int]] = {}  # of the decoder's layers: their pieces
        layout, piece = pool.layout, 0
        names = model_layers(layout, config)
        for part in layout.parts:
            for layer in layout.layers_of(part):
                self._of_layer.setdefault(names[layer], []).append(piece)
                piece += 1
        self._numbers = range(piece) if numbers is None else numbers

    def begin(self, streams: Sequence[StreamedKV]) -> LayerByLayer:
        """Of a step, whose residual stream has not been received yet: the KV of the stages before
        is passed on first."""
        messages = self._messages
        if messages is not None and messages.has_previous:
            while (piece := messages.receive()) is not None:
                self._give(*piece)
        sent = [(each, self._slots(each)) for each in streams]

        def send(layer: int) -> None:
            for piece in self._of_layer.get(layer, ()):
                for stream, slots in sent:
                    self._send(stream, piece, slots)

        def end() -> None:
            if messages is not None and messages.has_next:
                messages.send(None)

        return LayerByLayer(self._of_layer, send, end)

    def _slots(self, stream: StreamedKV) -> Slots:
        first = stream.start % self._page_size
        slots = slots_of(stream.pages, self._page_size)
        return slots[first : first + stream.end - stream.start]

    def _send(self, stream: StreamedKV, piece: int, slots: Slots) -> None:
        pool, whole = self._memory[piece], self._whole
        num_own, _, width = pool.shape
        num_vectors = num_own if whole is None else whole.num_vectors(num_own)
        most = max(1, MAX_PIECE_BYTES // (num_vectors * width))
        for start in range(0, len(slots), most):
            own = slots[start : start + most]
            if whole is None:
                kv = _copied(pool, own)
            else:
                (kv,) = whole.join([_copied(pool, whole.own_slots(own))], own)
            self._give(stream.key, self._numbers[piece], stream.start + start, kv)

    def _give(self, key: StreamKey, piece: int, start: int, kv: Bytes) -> None:
        """To the engine, or whoever is nearer to it."""
        if self._sink is not None:
            self._sink.send_kv(key, piece, start, kv)
        elif self._messages is not None:
            self._messages.send((key, piece, start, kv))


class LayerWaits:
    """Of a pool on an accelerator: what lets a step wait for copies as late as it may."""

    def __init__(self, layout: KVLayout, config: ModelConfig, accelerator: Accelerator) -> None:
        self._names = model_layers(layout, config)
        self._accelerator = accelerator

    def begin(self, copies: AsynchronousCopies) -> LayerByLayer:
        """Of the next step: what is queued now comes behind the first layers' copies."""
        hold = self._accelerator.hold_for
        first, *later = copies.layers
        hold(first.moment)
        moments = {self._names[each.first_layer] - 1: each.moment for each in later}
        return LayerByLayer(moments, lambda layer: hold(moments[layer]), lambda: None)


class LayerByLayer:
    """One step's layers, for each of which something is done once: when the model has computed it,
    or at the end."""

    def __init__(
        self, layers: Iterable[int], act: Callable[[int], None], on_end: Callable[[], None]
    ) -> None:
        self._left = dict.fromkeys(layers)
        self._act, self._on_end = act, on_end

    def layer_is_done(self, layer: int) -> None:
        """The model has computed a layer, and will not change its KV."""
        if layer in self._left:
            del self._left[layer]
            self._act(layer)

    def end(self) -> None:
        """The model has computed all of them."""
        for layer in list(self._left):
            self.layer_is_done(layer)
        self._on_end()


def model_layers(layout: KVLayout, config: ModelConfig) -> list[int]:
    """Which of the model's layers each of the pool's is; a draft model's are behind all."""
    own = config.attention_layers
    behind = range(config.num_layers + len(own), config.num_layers + layout.num_layers)
    return [*own, *behind]


def _copied(pool: Bytes, slots: Slots) -> npt.NDArray[np.uint8]:
    """[num_vectors, len(slots), vector_bytes]."""
    first, length = int(slots[0]) if len(slots) else 0, len(slots)
    if np.array_equal(slots, np.arange(first, first + length)):
        return pool[:, first : first + length].copy()
    return np.ascontiguousarray(pool[:, slots])
