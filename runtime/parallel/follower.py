"""`python -m stemma.runtime.parallel.follower`: another rank than 0 of a model. Started by the
`Leader`, whose orders it carries out until there are no more."""

from __future__ import annotations

import gc
import logging
import os
import queue
import sys
import threading
from typing import TYPE_CHECKING, Any

from ...errors import StemmaError
from ...piped_process import read_frame
from ..execute.torch_import import import_torch

if TYPE_CHECKING:
    from .orders import Start

log = logging.getLogger(__name__)


def main() -> None:
    """Carry out the orders; ends the process by itself when its parent has gone."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    gc.disable()  # see runtime/__main__.py
    import_torch()
    from .orders import Start

    orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(orders,), daemon=True).start()
    start = orders.get()
    assert isinstance(start, Start), "the first order"
    try:
        _follow(start, orders)
    except StemmaError as error:
        print(f"error: rank {start.rank}: {error}", file=sys.stderr)
    except Exception:
        log.exception("rank %d", start.rank)
    os._exit(1)


def _read(orders: queue.SimpleQueue[Any]) -> None:
    """In a thread: whoever computes may wait for other ranks, which are gone with their parent."""
    from .orders import message_of

    while (payload := read_frame(sys.stdin.buffer)) is not None:
        orders.put(message_of(payload))
    os._exit(0)


def _follow(start: Start, orders: queue.SimpleQueue[Any]) -> None:
    import numpy as np

    from ..models.layers.ranks import Ranks
    from .rank_runner import RankRunner

    communicator = start.meeting.join(start.rank)
    try:
        ranks = Ranks(
            start.rank,
            start.meeting.num_ranks,
            communicator,
            gathers_logits=start.options["device"] != "cpu",
            expert_groups=start.expert_groups,
            divides_tokens=start.divides_tokens,
        )
        runner = RankRunner(start.model_folder, start.model_config, ranks, start.options)
        gc.freeze()
        gc.enable()
        communicator.all_gather(np.zeros(1))
        while True:
            name, *arguments = orders.get()
            getattr(runner, name)(*arguments)
    finally:
        communicator.abort()


if __name__ == "__main__":
    main()
