"""`python -m stemma.runtime.parallel.follower`: a process of a model beside the engine's.
Started by the `Leader`, whose orders it carries out until there are no more."""

from __future__ import annotations

import gc
import logging
import os
import queue
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from ...errors import StemmaError
from ...piped_process import read_frame
from ..execute.torch_import import import_torch

if TYPE_CHECKING:
    from .places import Place

log = logging.getLogger(__name__)


def main() -> None:
    """Carry out the orders; ends the process by itself when its parent has gone."""
    # Whoever stops all processes at once (systemd) lets the engine end what runs, with its ranks.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    gc.disable()  # see runtime/__main__.py
    import_torch()
    from .places import Place

    orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(orders,), daemon=True).start()
    place = orders.get()
    assert isinstance(place, Place), "the first order"
    try:
        _follow(place, orders)
    except StemmaError as error:
        print(f"error: {place.name}: {error}", file=sys.stderr)
    except Exception:
        log.exception("%s", place.name)
    os._exit(1)


def _read(orders: queue.SimpleQueue[Any]) -> None:
    """In a thread: whoever computes may wait for other ranks, which are gone with their parent."""
    from .orders import message_of

    while (payload := read_frame(sys.stdin.buffer)) is not None:
        orders.put(message_of(payload))
    os._exit(0)


def _follow(place: Place, orders: queue.SimpleQueue[Any]) -> None:
    from .rank_runner import RankRunner

    seat = place.take()
    try:
        runner = RankRunner(seat.runner())
        gc.freeze()
        gc.enable()
        while True:
            name, *arguments = orders.get()
            getattr(runner, name)(*arguments)
    finally:
        seat.abort()


if __name__ == "__main__":
    main()
