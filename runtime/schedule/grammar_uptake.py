"""Requests whose grammars are on their way, and how an output begins once its grammar is there.

A request is queued while its grammar is compiled elsewhere (`compiler_service.py`), and computes
all but the last token of its prompt meanwhile. Where another process follows its grammar
(`parsers.py`), the same holds after each sampled token, until it is known what may come next. Here
it is known who lacks which; how far such a request may be computed says `Request.num_ready`. A
request without a grammar whose output is known to begin with something begins it here, too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from .request import FinishReason, Request

log = logging.getLogger(__name__)


class GrammarUptake:
    """Owns which requests lack their grammar, or their position in it.

    A request is held from `add` until `take` yields it or `forget` is told that it has ended.
    """

    def __init__(self) -> None:
        self._lacking: dict[Request, None] = {}

    def __len__(self) -> int:
        return len(self._lacking)

    @property
    def has_arrived(self) -> bool:
        """Whether `take` would yield anything."""
        return any(map(_has_come, self._lacking))

    def add(self, request: Request) -> None:
        """A request has come, or has taken a token; nothing happens if its output begins with what
        is drawn."""
        if request.grammar is not None or request.begun:
            self._lacking[request] = None

    def forget(self, request: Request) -> None:
        """A request has ended."""
        self._lacking.pop(request, None)
        if request.follower is not None:
            request.follower.close()

    def take(self) -> Iterator[Request]:
        """Requests that lack nothing more, or whose grammars will not come, in order of `add`.
        Whoever is forgotten meanwhile is left out."""
        arrived = [request for request in self._lacking if _has_come(request)]
        for request in arrived:
            if request in self._lacking:
                del self._lacking[request]
                yield request


def _has_come(request: Request) -> bool:
    if request.follower is not None:
        return request.follower.is_ready
    return request.grammar is None or request.grammar.is_done


def begin_output(request: Request) -> FinishReason | None:
    """Give a request that `take` has yielded its `follower`, if it has none; a reason if it has
    ended with that, and with ERROR its error is set."""
    grammar = request.grammar
    if request.follower is not None or grammar is None:
        return None
    if grammar.failure is not None:
        request.error, request.error_kind = grammar.failure.message, grammar.failure.kind
        return FinishReason.ERROR
    try:
        request.follower = grammar.follower(request.jump_forward, request.stop_ids)
    except Exception as error:
        log.exception("a matcher could not be made")
        request.error = f"the grammar cannot be followed: {type(error).__name__}: {error}"
        return FinishReason.ERROR
    return FinishReason.STOP if request.follower.is_finished else None
