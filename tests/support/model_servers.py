"""Servers of several models, and what they tell of each."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from server_process import ServerProcess
from waiting import PATIENCE_S

from stemma.runtime.checkpoint.location import EMBEDDED_MODEL

LONG = 1900  # tokens; the context has 2048
TINY = f"tiny={EMBEDDED_MODEL}"
TWIN_NAME = "org/twin-ü"
TWIN = f"{TWIN_NAME}={EMBEDDED_MODEL}"
KEY = "a-key-of-these-tests"
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "ignore_eos": True}
FLAGS = ("--num-threads", "1", "--max-running-requests", "8")


def served(folder: Path, *flags: str) -> ServerProcess:
    return ServerProcess(folder / "server", *FLAGS, *flags)


def models_of(*models: str) -> list[str]:
    return [word for model in models for word in ("--model", model)]


def states(server: ServerProcess, **headers: str) -> dict[str, str]:
    told = httpx.get(f"{server.url}/v1/models", headers=headers, timeout=PATIENCE_S).json()["data"]
    return {model["id"]: model["status"]["value"] for model in told}


def metric(server: ServerProcess, name: str, model: str) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text
    found = re.search(rf'^{name}{{model="{re.escape(model)}"}} (\S+)$', text, re.MULTILINE)
    assert found, text
    return float(found[1])


@contextlib.contextmanager
def asking(*asks: Callable[[], httpx.Response]) -> Iterator[list[Any]]:
    """Requests under way beside the block; their answers once it has ended."""
    replies: list[Any] = []
    with ThreadPoolExecutor(len(asks)) as threads:
        futures = [threads.submit(ask) for ask in asks]
        yield replies
        replies += [future.result(PATIENCE_S) for future in futures]
