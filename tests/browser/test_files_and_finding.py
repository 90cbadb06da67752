"""Files that go with messages, conversations found by their words, and files of conversations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chat_page import COMPLETIONS, Chat, answer_with
from waiting import wait_until

ATTACH = ".attach-input"


def a_file(name: str, content: bytes) -> dict[str, Any]:
    return {"name": name, "mimeType": "text/plain", "buffer": content}


def test_text_files_go_before_the_message_and_share_its_prefix(
    open_page: Callable[..., Any],
) -> None:
    visit = open_page()
    page, chat = visit.page, Chat(visit.page)
    notes = "Anna Berg is 34 years old. ```She lives in Lisbon.```"
    page.set_input_files(ATTACH, [a_file("notes.md", notes.encode()), a_file("b.bin", b"\xff\0")])
    page.wait_for_selector(".toast:has-text('b.bin was not attached: it is no text')")
    assert page.locator(".attachments .name").all_inner_texts() == ["notes.md"]
    with page.expect_request(COMPLETIONS) as request:
        chat.send("Who is it?")
    (message,) = request.value.post_data_json["messages"]
    assert message["content"] == f"File notes.md:\n````\n{notes}\n````\n\nWho is it?"
    assert page.locator(".attachments li").count() == 0
    assert page.locator(".message.user .text").inner_text() == "Who is it?"
    chat.edit(0, "Where does she live?")
    assert chat.tokens("reused") > 20, "both questions share the file's tokens"
    page.click(".message details.attachment summary")
    assert notes in page.locator(".message .attachment pre").inner_text()
    visit.shot("attachment")


def test_a_file_may_be_taken_away_again_and_be_all_there_is(open_page: Callable[..., Any]) -> None:
    visit = open_page(width=390, height=844)
    page, chat = visit.page, Chat(visit.page)
    answer_with(page, {"content": "Read."})
    page.set_input_files(ATTACH, [a_file("a.txt", b"one"), a_file("b.txt", b"two")])
    page.get_by_label("Remove a.txt").click()
    page.set_input_files(ATTACH, [a_file("huge.txt", b"x" * 500_001)])
    page.wait_for_selector(".toast:has-text('larger than 500 kB')")
    page.click(".send")
    chat.answer()
    assert page.locator(".message.user .name").all_inner_texts() == ["b.txt"]
    assert page.locator(".chat-title").inner_text() == "b.txt"


def test_conversations_are_found_by_what_was_said_in_them(open_page: Callable[..., Any]) -> None:
    visit = open_page()
    page, chat = visit.page, Chat(visit.page)
    answer_with(page, {"content": "The heron <b>stands</b> still."})
    chat.send("A question about birds")
    chat.send("Something later")
    page.keyboard.press("Control+k")
    page.wait_for_selector(".starter")
    chat.send("Another one")
    search = page.get_by_label("Search the conversations")
    search.fill("ABOUT BIRDS")
    assert page.locator(".found").inner_text() == "1 found"
    assert page.locator(".conversations mark").inner_text() == "about birds"
    page.click(".conversations a")
    page.wait_for_selector("text=A question about birds")
    assert page.evaluate("document.activeElement.innerText").startswith("You\nA question")
    search.fill("<b>stands")
    assert page.locator(".conversations li").count() == 2
    search.fill("nowhere")
    assert page.locator(".found").inner_text() == "Nothing found."
    search.fill("")
    assert page.locator(".conversations li").count() == 2


def test_an_export_of_one_conversation_brings_back_all_that_it_holds(
    open_page: Callable[..., Any], tmp_path: Path
) -> None:
    visit = open_page()
    page, chat = visit.page, Chat(visit.page)
    call = {"index": 0, "id": "call_1", "function": {"name": "look", "arguments": "{}"}}
    answer_with(page, {"tool_calls": [call]})
    page.click(".composer .chip >> nth=1")
    page.check("[name=calculate]")
    page.set_input_files(ATTACH, [a_file("a.txt", b"one")])
    chat.send("Look: up / down?")
    page.get_by_label("Result of look").fill("seen")
    page.click("text=Send the result")
    wait_until(lambda: len(chat.answers) == 2)
    chat.answer()
    with page.expect_download() as download:
        page.get_by_label("Export this conversation").click()
    assert download.value.suggested_filename == "Look-up-down.json"
    download.value.save_as(tmp_path / "one.json")
    (kept,) = json.loads((tmp_path / "one.json").read_text())["conversations"]
    page.get_by_label("Delete").click()
    page.click("dialog .primary")
    page.wait_for_selector(".starter")
    page.set_input_files('input[accept*=".json,application"]', tmp_path / "one.json")
    page.click("text=Look: up / down?")
    page.wait_for_selector(".message.tool")
    with page.expect_download() as download:
        page.get_by_label("Export this conversation").click()
    download.value.save_as(tmp_path / "again.json")
    (again,) = json.loads((tmp_path / "again.json").read_text())["conversations"]
    for changing in ("id", "updatedMs", "createdMs"):
        kept.pop(changing), again.pop(changing)
    assert again == kept


def test_messages_as_the_api_takes_them_are_imported(
    open_page: Callable[..., Any], tmp_path: Path
) -> None:
    visit = open_page()
    page, chat = visit.page, Chat(visit.page)
    made = {"id": "x", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is up?"}]},
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "x", "content": "the sky"},
        {"role": "assistant", "content": "The sky."},
    ]
    (tmp_path / "messages.json").write_text(json.dumps({"messages": messages}))
    page.set_input_files('input[accept*=".json,application"]', tmp_path / "messages.json")
    page.click("text=What is up?")
    page.wait_for_selector(".message.tool")
    assert chat.answers == ["", "The sky."]
    answer_with(page, {"content": "Down."})
    with page.expect_request(COMPLETIONS) as request:
        chat.send("And down?")
    sent = request.value.post_data_json["messages"]
    assert sent[0] == messages[0] and sent[2:5] == messages[2:]
    (tmp_path / "bad.json").write_text('{"messages": [{"role": "wizard", "content": "x"}]}')
    page.set_input_files('input[accept*=".json,application"]', tmp_path / "bad.json")
    page.wait_for_selector(".toast:has-text('a message without role')")
