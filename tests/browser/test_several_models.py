"""The page of a server of several models: the picker lists them, and one is loaded by a message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from chat_page import COMPLETIONS, Chat
from server_process import ServerProcess

from stemma.runtime.checkpoint.location import EMBEDDED_MODEL


@pytest.fixture(scope="module")
def page_server(
    tmp_path_factory: pytest.TempPathFactory, browser_path: str
) -> Iterator[ServerProcess]:
    """With two models, in place of the one of other modules."""
    folder = tmp_path_factory.mktemp("several")
    models = [f"--model={name}={EMBEDDED_MODEL}" for name in ("one", "org/two")]
    with ServerProcess(folder, *models, "--models-max", "1", "--num-threads", "1") as server:
        server.wait_healthy()
        yield server


def test_a_model_that_is_picked_is_loaded_and_answers(open_page: Callable[..., Any]) -> None:
    page = open_page(width=390, height=844).page
    chat, picker = Chat(page), page.get_by_label("Model", exact=True)
    assert picker.locator("option").all_inner_texts() == ["one", "org/two"]
    assert "Nora" in chat.send("Hi, my name is Nora. I live in Bergen.")
    assert chat.message("assistant", 0).locator(".who").inner_text() == "one"
    picker.select_option("org/two")
    with page.expect_request(COMPLETIONS) as request:
        assert "Nora" in chat.again(0)
    assert request.value.post_data_json["model"] == "org/two"
    assert chat.message("assistant", 0).locator(".who").inner_text() == "org/two"
