"""What a reader of the page sees when the engine dies under an answer."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from chat_page import Chat, begin_long_answer
from waiting import wait_until


def test_an_engine_that_dies_is_told_of_and_a_retry_finds_the_next_one(
    open_page: Callable[..., Any], page_server: Any
) -> None:
    visit = open_page()
    visit.may_complain = True  # of the 503s while there is no engine
    page, chat = visit.page, Chat(visit.page)
    begin_long_answer(page)
    os.kill(page_server.engine_pid, signal.SIGKILL)
    chat.answer()
    assert chat.message("assistant", 0).get_attribute("data-state") == "failed"
    assert "The answer broke off" in page.locator(".failure:visible").inner_text()
    page.wait_for_selector(".engine[data-state=down]")
    page.wait_for_timeout(300)
    visit.shot("engine-restarting")
    page.wait_for_selector(".engine[data-state=ready]")
    page.click(".failure button")
    wait_until(lambda: len(page.locator(".message.assistant pre").inner_text()) > 30)
    assert page.locator(".failure:visible").count() == 0
    page.keyboard.press("Escape")
    chat.answer()
    page.click(".composer .chip >> nth=0")  # no JSON any more
    assert "Nora" in chat.send("Hi, my name is Nora.")
