"""Detects at once when a client leaves before it has its response."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

from starlette.exceptions import HTTPException
from starlette.types import Receive

CLIENT_CLOSED_REQUEST = 499  # nginx's: nobody is there to read it
_T = TypeVar("_T")


async def disconnected(receive: Receive) -> None:
    """Return when the client has gone; the request's body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`. It is cancelled when the client goes away: raises HTTPException."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            refuse_the_gone()
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()


def refuse_the_gone() -> NoReturn:
    """Raises HTTPException."""
    raise HTTPException(CLIENT_CLOSED_REQUEST, "the client went away")
