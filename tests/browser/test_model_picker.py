"""The picker of models on a server with an adapter: who is asked, and what if it has gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from adapters import make_adapter
from chat_page import COMPLETIONS, Chat
from server_process import ServerProcess
from waiting import PATIENCE_S

from stemma.runtime.checkpoint.location import EMBEDDED_MODEL


@pytest.fixture(scope="module")
def page_server(
    tmp_path_factory: pytest.TempPathFactory, browser_path: str
) -> Iterator[ServerProcess]:
    """With an adapter, in place of the one of other modules."""
    folder = tmp_path_factory.mktemp("picker")
    adapter = make_adapter(folder / "odd", EMBEDDED_MODEL, std=0.4)
    with ServerProcess(folder, "--lora-paths", f"odd={adapter}", "--num-threads", "1") as server:
        server.wait_healthy()
        yield server


def test_an_adapter_that_is_picked_answers_until_it_has_gone(
    open_page: Callable[..., Any], page_server: ServerProcess
) -> None:
    visit = open_page(width=390, height=844)
    page, chat = visit.page, Chat(visit.page)
    picker = page.get_by_label("Model", exact=True)
    assert picker.locator("option").all_inner_texts() == ["stemma-tiny", "odd"]
    assert "Nora" in chat.send("Hi, my name is Nora. I live in Bergen.")
    picker.select_option("odd")
    with page.expect_request(COMPLETIONS) as request:
        odd = chat.again(0)
    assert request.value.post_data_json["model"] == "odd"
    assert "Nora! Got it" not in odd
    assert chat.message("assistant", 0).locator(".who").inner_text() == "odd"
    visit.shot("adapter")
    page.keyboard.press("Control+k")
    page.wait_for_selector(".starter")
    assert picker.input_value() == "stemma-tiny", "a choice is a conversation's own"
    page.go_back()
    page.wait_for_selector(".message")
    assert picker.input_value() == "odd"
    gone = httpx.post(
        f"{page_server.url}/unload_lora_adapter", json={"lora_name": "odd"}, timeout=PATIENCE_S
    )
    assert gone.status_code == 200, gone.text
    picker.focus()
    page.wait_for_selector("option:text('odd (not there)')", state="attached")
    visit.may_complain = True  # of the 404 that comes now
    chat.again(0)
    assert "odd" in page.locator(".failure:visible").inner_text()
    picker.select_option("stemma-tiny")
    assert "Nora" in chat.again(0)
