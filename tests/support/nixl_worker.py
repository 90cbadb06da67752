"""Whether NIXL runs here."""

from __future__ import annotations

import functools

import pytest

from stemma.errors import MissingDependency
from stemma.runtime.memory.peers.nixl_memory import NixlWorker


def skip_without_nixl() -> None:
    """Skip the test that calls it, with the reason, where NIXL cannot be loaded."""
    if reason := _why_not():
        pytest.skip(reason)


@functools.cache
def _why_not() -> str:
    try:
        NixlWorker().close()
    except MissingDependency as error:
        return str(error)
    return ""
