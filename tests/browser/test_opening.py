"""How the page opens: at its top, with a plain word on what it is, wherever the address leads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from chat_page import Chat

SIZES = [(390, 844), (390, 560), (820, 500), (1360, 850)]


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_page_opens_at_its_top_and_says_what_it_is(
    open_page: Callable[..., Any], width: int, height: int
) -> None:
    page = open_page(width=width, height=height).page
    Chat(page)
    assert page.evaluate("[scrollY, document.querySelector('.thread').scrollTop]") == [0, 0]
    for shown in (".emblem", ".beginning h2", ".beginning p >> nth=0", ".composer"):
        box = page.locator(shown).bounding_box()
        assert box and box["y"] >= 0 and box["y"] + box["height"] <= height, shown
    assert page.locator(".beginning h2").inner_text() == "Chat with stemma-tiny"
    assert (
        "runs a language model on this server" in page.locator(".beginning p >> nth=0").inner_text()
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("address", ["#watch", "#/watch", "#watch/0"])
def test_watch_is_reached_by_what_people_type(open_page: Callable[..., Any], address: str) -> None:
    page = open_page(f"/{address}").page
    page.wait_for_selector(".watch[data-live=true]")
    assert page.title() == "Watch · Stemma"
    page.evaluate("location.hash = '#chat'")
    page.wait_for_selector(".chat")
