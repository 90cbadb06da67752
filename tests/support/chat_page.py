"""A driver for the page's chat, and canned responses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from waiting import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page, Route

ENDED = ", ".join(
    f".message.assistant:last-child[data-state={state}]" for state in ("done", "stopped", "failed")
)
LONG = {"type": "array", "items": {"type": "string", "minLength": 20}, "minItems": 200}
COMPLETIONS = "**/v1/chat/completions"


class Chat:
    """The user's actions in the chat, and what it shows."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.page.wait_for_selector(".starter, .message")

    def send(self, text: str) -> str:
        """Write, send, and return the answer when it has ended."""
        self.page.fill(".composer textarea", text)
        self.page.keyboard.press("Enter")
        return self.answer()

    def answer(self) -> str:
        """The last message, once it has ended."""
        self.page.wait_for_selector(ENDED)
        return self.answers[-1]

    @property
    def answers(self) -> list[str]:
        """All answers shown."""
        return self.page.locator(".message.assistant .text").all_inner_texts()

    def message(self, role: str, index: int) -> Locator:
        return self.page.locator(f".message.{role}").nth(index)

    def edit(self, index: int, text: str) -> str:
        """Change the user's message `index`; returns the answer in the new branch."""
        message = self.message("user", index)
        message.hover()
        message.locator("[data-tool=edit]").click()
        self.page.fill(".editor textarea", text)
        self.page.keyboard.press("Enter")
        return self.answer()

    def again(self, index: int) -> str:
        """Request a second answer beside answer `index`."""
        message = self.message("assistant", index)
        message.hover()
        message.locator("[data-tool=again]").click()
        return self.answer()

    def tokens(self, kind: str, index: int = -1) -> int:
        """A token count of an answer: "reused", "computed" or "made"."""
        costs = self.page.locator(f".message.assistant .cost.{kind} b").all_inner_texts()
        return int(costs[index].replace(",", ""))

    def branch(self, role: str, index: int) -> str:
        """Such as "2/3"; empty where there is only one."""
        shown = self.message(role, index).locator(".branches .num")
        return shown.inner_text() if shown.count() else ""


def stream(deltas: Sequence[dict[str, Any]], finish: str = "stop") -> str:
    """The body of a streamed chat completion."""
    usage = {"prompt_tokens": 1234, "completion_tokens": 56}
    chunks: list[dict[str, Any]] = [
        *({"choices": [{"index": 0, "delta": d, "finish_reason": None}]} for d in deltas),
        {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]},
        {"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 1200}}},
    ]
    events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return "".join((*events, "data: [DONE]\n\n"))


def answer_with(page: Page, *deltas: dict[str, Any]) -> None:
    """Make the page's completions return these deltas from now on."""

    def fulfill(route: Route) -> None:
        route.fulfill(content_type="text/event-stream", body=stream(deltas))

    page.route(COMPLETIONS, fulfill)


def begin_long_answer(page: Page) -> None:
    """Start an answer that takes seconds, and wait for its beginning."""
    page.click(".composer .chip >> nth=0")
    page.fill(".schema", json.dumps(LONG))
    page.fill(".composer textarea", "Repeat: all day long")
    page.keyboard.press("Enter")
    wait_until(lambda: len(page.locator(".message.assistant pre").inner_text()) > 30)
