"""The page under axe, the checker of accessibility: nothing serious in any view, theme or size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from chat_page import Chat, stream

SIZES = [(390, 844), (1360, 850)]
COMPLETIONS = "**/v1/chat/completions"


def problems(page: Any) -> list[str]:
    """What axe calls serious or critical, each with its first elements."""
    checker = pytest.importorskip("axe_playwright_python.sync_playwright")
    found = checker.Axe().run(page).response["violations"]
    return [
        f"{rule['id']}: {[node['html'][:200] for node in rule['nodes'][:3]]}"
        for rule in found
        if rule["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_axe_finds_nothing_serious(
    open_page: Callable[..., Any], width: int, height: int, scheme: str
) -> None:
    visit = open_page(width=width, height=height, scheme=scheme)
    page, chat = visit.page, Chat(visit.page)
    page.emulate_media(reduced_motion="reduce")  # or a fading button is measured
    assert problems(page) == []
    visit.shot(f"opening-{width}-{scheme}")
    chat.send("Hi, my name is Nora. I live in Bergen.")
    chat.again(0)
    page.set_input_files(
        ".attach-input", {"name": "a.md", "mimeType": "text/plain", "buffer": b"one"}
    )
    page.click(".composer .chip >> nth=0")
    assert problems(page) == []
    visit.shot(f"json-{width}-{scheme}")
    page.get_by_label("No JSON").click()
    call = {"index": 0, "id": "c", "function": {"name": "get_weather", "arguments": '{"a": 1}'}}
    answer = stream([{"tool_calls": [call]}], "length")
    page.route(
        COMPLETIONS, lambda route: route.fulfill(content_type="text/event-stream", body=answer)
    )
    chat.send("And the weather?")
    page.click(".composer .chip >> nth=1")
    page.wait_for_selector(".own-tools")  # visible: the drawer is open
    assert problems(page) == []
    visit.shot(f"tools-{width}-{scheme}")
    if width < 500:
        page.click(".panel-close")
        page.click(".open-sidebar")
    page.get_by_label("Search the conversations").fill("nora")
    assert problems(page) == []
    visit.shot(f"found-{width}-{scheme}")
    page.goto(f"{visit.url}/#/watch")
    page.wait_for_selector(".watch[data-live=true]")
    assert problems(page) == []
    visit.shot(f"watching-{width}-{scheme}")
