"""Texts read in the HTTP process: on threads of their own, and by several of them at once."""

from __future__ import annotations

import asyncio
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from waiting import PATIENCE_S

from stemma.frontend.protocol.chat_message import Message
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL
from stemma.runtime.tokenizer import chat_template
from stemma.server.generation.model_text import ModelText


def _model_text() -> ModelText:
    info: dict[str, Any] = {"model_path": EMBEDDED_MODEL, "vocab_size": 4096}
    return ModelText(lambda: info)


def test_threads_that_read_texts_are_nobody_elses() -> None:
    texts, is_over = _model_text(), threading.Event()

    async def ask_while_all_read() -> None:
        reading = [asyncio.create_task(texts.in_thread(is_over.wait)) for _ in range(64)]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(asyncio.to_thread(threading.get_ident), PATIENCE_S)
        is_over.set()
        assert all(await asyncio.gather(*reading))

    asyncio.run(ask_while_all_read())


def test_chats_may_be_read_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The template forgets what it keeps whenever that is too much."""
    monkeypatch.setattr(chat_template, "_MAX_CACHED_CHARS", 0)
    texts = _model_text()
    chats = [[Message("user", f"{i}"), Message("assistant", "a")] * (1 + i % 9) for i in range(60)]
    alone = [texts.encode_chat(chat) for chat in chats]
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(texts.encode_chat, chats)) == alone
    finally:
        sys.setswitchinterval(interval_s)
