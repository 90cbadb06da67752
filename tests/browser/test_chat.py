"""The chat in a browser, against a real server on the embedded model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_page import COMPLETIONS, Chat, answer_with, begin_long_answer
from waiting import wait_until

NORA = "Hi, my name is Nora. I live in Bergen."
EXTRACT = "Text: Anna Berg is 34 years old. She lives in Lisbon.\nExtract name, age, city as JSON."


def test_a_chat_of_five_turns_is_answered_and_remembered(open_page: Callable[..., Any]) -> None:
    visit = open_page()
    chat = Chat(visit.page)
    visit.shot("empty")
    assert "Nora" in chat.send(NORA)
    assert "42" in chat.send("My lucky number is 42.")
    assert chat.send("What is my name?") == "Your name is Nora."
    assert chat.send("Where do I live?") == "You live in Bergen."
    assert "joke" not in chat.send("Tell me a joke.")
    assert len(chat.answers) == 5
    assert all(chat.tokens("reused", turn) > chat.tokens("reused", turn - 1) for turn in (2, 3, 4))
    assert all(chat.tokens("computed", turn) < 20 for turn in (1, 2, 3, 4))
    assert visit.page.locator(".conversations .title").inner_text().startswith(NORA[:20])
    visit.page.reload()
    chat = Chat(visit.page)
    assert len(chat.answers) == 5, "a conversation is kept by the browser"


def test_an_edit_and_a_second_answer_are_branches_that_reuse_their_prefix(
    open_page: Callable[..., Any],
) -> None:
    visit = open_page()
    chat = Chat(visit.page)
    visit.page.click(".starter >> nth=0")
    chat.answer()
    chat.send("My lucky number is 42.")
    chat.send("What is my name?")
    assert chat.edit(2, "What is my lucky number?") == "Your lucky number is 42."
    assert chat.branch("user", 2) == "2/2"
    assert chat.tokens("reused") > 40 and chat.tokens("computed") < 15
    assert "Rome" in chat.edit(1, "Actually, I moved to Rome.")
    assert chat.send("Where do I live?") == "You live in Rome."
    chat.again(2)
    assert chat.branch("assistant", 2) == "2/2" and chat.branch("user", 1) == "2/2"
    assert chat.tokens("computed") == 1, "all of the prompt but its last token was there"
    assert "the same words as branch 1" in chat.message("assistant", 2).inner_text()
    chat.send("I work as a pilot.")
    assert "cat" in chat.edit(3, "My pet is a cat called Milo.")
    assert chat.send("What is my pet called?") == "You have a cat named Milo."
    tree = visit.page.locator(".stemma .node")
    assert tree.count() == 19 and visit.page.locator(".stemma .node.lit").count() == 10
    visit.page.locator(".chat-head").hover()
    visit.shot("branches")
    chat.message("user", 1).get_by_label("Previous branch").click()
    assert chat.answers[-1] == "Your lucky number is 42.", "the way below it is remembered"
    tree.filter(has_text="What is my name?").click()
    assert chat.answers[-1] == "Your name is Nora." and chat.branch("user", 2) == "1/2"
    visit.page.emulate_media(color_scheme="dark")
    visit.page.wait_for_timeout(300)  # buttons fade
    visit.shot("branches-dark")


def test_an_answer_under_a_schema_is_json_that_fits(open_page: Callable[..., Any]) -> None:
    visit = open_page()
    chat = Chat(visit.page)
    visit.page.click("text=A text into JSON")
    chat.answer()
    assert visit.page.locator(".validity").inner_text() == "complete, fits the schema"
    shown = json.loads(visit.page.locator(".json pre").inner_text())
    assert shown == {"name": "Anna Berg", "age": 34, "city": "Lisbon"}
    visit.page.click(".panel [data-tab=settings]")
    visit.shot("schema")
    visit.page.fill(".schema", '{"type": "object"')
    assert "Not sent: no JSON" in visit.page.locator(".schema-state").inner_text()
    visit.page.fill(".composer textarea", "more")
    visit.page.keyboard.press("Enter")
    assert "The schema cannot be sent" in visit.page.locator(".toast").inner_text()
    assert len(chat.answers) == 1
    visit.may_complain = True  # of the 400 that comes now
    visit.page.fill(".schema", '{"$ref": "https://example.org/none"}')
    chat.send("And a schema that the server refuses")
    assert "$ref" in visit.page.locator(".failure:visible").inner_text()


def test_stop_ends_the_answer_here_and_on_the_server(
    open_page: Callable[..., Any], page_server: Any
) -> None:
    visit = open_page()
    chat = Chat(visit.page)
    begin_long_answer(visit.page)
    assert visit.page.locator(".validity").inner_text() == "valid so far"
    written = len(visit.page.locator(".message.assistant pre").inner_text())
    visit.page.click(".views >> text=Watch")  # meanwhile it goes on
    visit.page.wait_for_selector(".chat", state="detached")
    visit.page.click(".views >> text=Chat")
    wait_until(lambda: len(visit.page.locator(".message.assistant pre").inner_text()) > written)
    num_aborted = page_server.num_aborted()
    visit.page.keyboard.press("Escape")
    chat.answer()
    assert chat.message("assistant", 0).get_attribute("data-state") == "stopped"
    assert "stopped" in visit.page.locator(".message-foot").inner_text()
    wait_until(lambda: page_server.num_aborted() > num_aborted)
    visit.page.click(".send >> nth=0")  # the field is empty: nothing happens
    assert len(chat.answers) == 1


def test_settings_are_checked_sent_and_kept(open_page: Callable[..., Any]) -> None:
    visit = open_page()
    chat = Chat(visit.page)
    answer_with(visit.page, {"content": "Yes."})
    visit.page.click(".panel [data-tab=settings]")
    visit.page.fill('[aria-label="System prompt"]', "Be brief.")
    visit.page.fill("#sampling-temperature", "0.5")
    visit.page.fill("#sampling-top_k", "1.5")
    assert "a whole number" in visit.page.locator("#sampling-top_k-problem").inner_text()
    visit.page.fill(".composer textarea", "Hello")
    visit.page.keyboard.press("Enter")
    assert "top_k must be a whole number" in visit.page.locator(".toast").inner_text()
    visit.page.fill("#sampling-top_k", "40")
    visit.page.get_by_label("Stop strings").fill("END\n\\n\\n")
    with visit.page.expect_request(COMPLETIONS) as request:
        chat.send("Hello")
    sent = request.value.post_data_json
    assert [message["role"] for message in sent["messages"]] == ["system", "user"]
    assert (sent["temperature"], sent["top_k"], sent["stop"]) == (0.5, 40, ["END", "\n\n"])
    assert "top_p" not in sent and "response_format" not in sent
    visit.page.reload()
    visit.page.click(".panel [data-tab=settings]")
    assert visit.page.input_value("#sampling-temperature") == "0.5"
    assert visit.page.input_value('[aria-label="System prompt"]') == "Be brief."


def test_all_is_reached_with_the_keyboard(open_page: Callable[..., Any]) -> None:
    visit = open_page()
    page, chat = visit.page, Chat(visit.page)
    page.keyboard.type("My name is Nora.")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("I live in Bergen.")
    assert page.input_value(".composer textarea") == "My name is Nora.\nI live in Bergen."
    page.keyboard.press("Enter")
    assert "Nora" in chat.answer()
    page.keyboard.press("Shift+Tab")  # from the field to the last message's tools, and on to it
    while "message" not in (page.evaluate("document.activeElement.className") or ""):
        page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.matches(':focus-visible')")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # its "edit"
    page.keyboard.press("Control+a")
    page.keyboard.type("My name is Ada.")
    page.keyboard.press("Enter")
    assert "Ada" in chat.answer()
    assert page.evaluate("document.activeElement.className") == "message assistant"
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowLeft")
    assert "Nora" in chat.answers[-1] and chat.branch("user", 0) == "1/2"
    page.keyboard.press("ArrowRight")
    assert "Ada" in chat.answers[-1]
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.tagName") == "TEXTAREA"
    page.keyboard.press("Control+k")
    page.wait_for_selector(".starter")
    assert page.locator(".conversations li").count() == 2
    page.keyboard.press("Escape")
    page.locator("#theme-button").focus()
    page.keyboard.press("?")
    assert "between the branches" in page.locator("dialog").inner_text()
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")


@pytest.mark.parametrize("width", [390, 900])
def test_a_narrow_page_has_all_in_reach_and_nothing_beyond_its_edge(
    open_page: Callable[..., Any], width: int
) -> None:
    visit = open_page(width=width, height=844, scheme="dark" if width == 390 else "light")
    page, chat = visit.page, Chat(visit.page)
    code = "```python\n" + "x = 1; " * 60 + "\n```\n\n" + "long" * 90
    answer_with(page, {"content": code})
    chat.send("Write something wide, please, in one very long line of code.")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    box = page.locator(".composer").bounding_box()
    assert box and box["x"] >= 0 and box["x"] + box["width"] <= width
    visit.shot(f"width-{width}")
    page.click(".open-panel >> nth=0")
    page.locator(".stemma .node").first.click()
    page.wait_for_selector(".chat:not(.with-panel)")
    if width == 390:
        page.click(".open-sidebar")
        page.click(".new-chat")
        page.wait_for_selector(".starter")
        page.wait_for_selector(".chat:not(.with-sidebar)")


def test_who_is_quicker_than_the_views_gets_the_last_one_asked_for(
    open_page: Callable[..., Any],
) -> None:
    page = open_page().page
    Chat(page)
    held: list[Any] = []
    page.route("**/watch.css", lambda route: held.append(route))  # the other view waits for it
    page.evaluate("location.hash = '#/watch'")
    wait_until(lambda: page.evaluate("0") or held)
    page.evaluate("location.hash = '#/chat'")
    page.wait_for_timeout(100)
    held[0].continue_()
    page.wait_for_selector("#view > .chat")
    page.wait_for_timeout(300)
    assert page.locator("#view > *").count() == page.locator("#view > .chat").count() == 1


def test_the_theme_is_the_systems_until_another_is_asked_for(
    open_page: Callable[..., Any],
) -> None:
    visit = open_page(scheme="dark")
    page = visit.page
    Chat(page)

    def brightness() -> int:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in colour[4:-1].split(","))

    assert brightness() < 120
    visit.shot("empty-dark")
    page.emulate_media(color_scheme="light")
    wait_until(lambda: brightness() > 650)
    page.click("#theme-button")  # light
    page.click("#theme-button")  # dark
    assert brightness() < 120
    page.reload()
    assert brightness() < 120


def test_conversations_are_renamed_exported_imported_and_deleted(
    open_page: Callable[..., Any], tmp_path: Path
) -> None:
    visit = open_page()
    page, chat = visit.page, Chat(visit.page)
    answer_with(page, {"content": "Yes."})
    chat.send("First")
    chat.again(0)
    page.get_by_label("Rename").click()
    page.fill("dialog input", "My <b>title</b>")
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog", state="detached")
    assert page.locator(".chat-title").inner_text() == "My <b>title</b>"
    with page.expect_download() as download:
        page.click("text=Export")
    download.value.save_as(tmp_path / "export.json")
    page.get_by_label("Delete").click()
    page.click("dialog .primary")
    page.wait_for_selector(".starter")
    page.set_input_files('input[type="file"]', tmp_path / "export.json")
    page.click("text=My <b>title</b>")
    wait_until(lambda: chat.branch("assistant", 0) == "2/2")  # a link: shown a moment later
    (tmp_path / "bad.json").write_text('{"format": "stemma-conversations", "conversations": [{}]}')
    page.set_input_files('input[type="file"]', tmp_path / "bad.json")
    assert "Not imported" in page.locator(".toast >> text=Not").inner_text()


def test_thoughts_calls_and_warnings_of_an_answer_are_shown(
    open_page: Callable[..., Any],
) -> None:
    visit = open_page()
    page, chat = visit.page, Chat(visit.page)
    call = {"index": 0, "function": {"name": "lookup", "arguments": '{"city": '}}
    rest = {"index": 0, "function": {"arguments": '"Rome"}'}}
    answer_with(
        page,
        {"reasoning_content": "First **this**, "},
        {"reasoning_content": "then that."},
        {"content": "# A title\n\n| a | b |\n| - | -: |\n| 1 | 2 |"},
        {"tool_calls": [call]},
        {"tool_calls": [rest]},
    )
    chat.send("Think.")
    page.click(".assistant summary")
    assert page.locator(".reasoning").inner_text().endswith("First this, then that.")
    assert page.locator(".call b").inner_text() == "lookup"
    assert json.loads(page.locator(".call code").inner_text()) == {"city": "Rome"}
    assert page.locator(".prose td").all_inner_texts() == ["1", "2"]
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    chat.message("assistant", 0).get_by_label("Copy the text").click()
    page.wait_for_selector('[title="Copied"]')
    assert page.evaluate("navigator.clipboard.readText()").startswith("# A title\n\n| a | b |")
    assert (chat.tokens("reused"), chat.tokens("computed"), chat.tokens("made")) == (1200, 34, 56)
    visit.shot("forms")


def test_a_server_that_asks_for_a_key_gets_the_one_that_is_typed(
    open_page: Callable[..., Any],
) -> None:
    visit = open_page("/assets/icon.svg")
    visit.may_complain = True  # of the 401s
    page = visit.page

    def guard(route: Any) -> None:
        if route.request.headers.get("authorization") == "Bearer sesame":
            return route.continue_()
        return route.fulfill(status=401, json={"error": {"message": "no", "type": "x"}})

    page.route("**/v1/**", guard)
    page.goto(visit.url)
    page.fill("dialog input", "wrong")
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog >> text=refused")
    page.fill("dialog input", "sesame")
    page.keyboard.press("Enter")
    assert "Nora" in Chat(page).send(NORA)
