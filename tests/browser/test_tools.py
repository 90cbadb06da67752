"""Tools on the page: what the browser carries out, what the reader answers for, what is sent."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from chat_page import COMPLETIONS, Chat, stream
from waiting import wait_until

WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}},
}


def script(page: Any, *turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answer one request after the other with these deltas; returns the requests as they come."""
    asked: list[dict[str, Any]] = []

    def fulfill(route: Any) -> None:
        deltas = turns[min(len(asked), len(turns) - 1)]
        asked.append(route.request.post_data_json)
        finish = "tool_calls" if any("tool_calls" in delta for delta in deltas) else "stop"
        route.fulfill(content_type="text/event-stream", body=stream(deltas, finish))

    page.route(COMPLETIONS, fulfill)
    return asked


def wait_for_requests(page: Any, asked: list[dict[str, Any]], number: int) -> None:
    """The browser's events, requests among them, come while the page is asked for something."""
    wait_until(lambda: page.evaluate("true") and len(asked) == number)


def calls(*made: tuple[str, str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One delta with these calls: id, name, arguments."""
    return [
        {
            "tool_calls": [
                {
                    "index": index,
                    "id": key,
                    "function": {"name": name, "arguments": json.dumps(given)},
                }
                for index, (key, name, given) in enumerate(made)
            ]
        }
    ]


def offer(page: Any, *names: str, own: object = None, must_call: bool = False) -> None:
    page.click(".composer .chip >> nth=1")
    for name in names:
        page.check(f"[name={name}]")
    if own is not None:
        page.fill(".own-tools", json.dumps(own))
    page.get_by_label("A call must come first").set_checked(must_call)


def test_a_forced_call_of_the_model_is_carried_out_in_the_browser_and_answered(
    open_page: Callable[..., Any],
) -> None:
    visit = open_page()
    page, chat = visit.page, Chat(visit.page)
    offer(page, "get_current_time", must_call=True)
    with page.expect_request(COMPLETIONS) as first:
        page.fill(".composer textarea", "What time is it?")
        page.keyboard.press("Enter")
    assert first.value.post_data_json["tool_choice"] == "required"
    wait_until(lambda: len(chat.answers) == 2)
    chat.answer()
    assert page.locator(".call b").inner_text() == "get_current_time"
    assert page.locator(".call-state").inner_text() == "called"
    assert chat.message("tool", 0).locator(".who").inner_text() == "Result of get_current_time"
    assert chat.message("assistant", 1).get_attribute("data-state") == "done", "the server took it"


def test_results_go_back_with_their_calls_and_the_model_goes_on(
    open_page: Callable[..., Any],
) -> None:
    visit = open_page()
    page, chat = visit.page, Chat(visit.page)
    asked = script(
        page,
        calls(("a", "calculate", {"expression": "2 * (3 + sqrt(16))"}),
              ("b", "get_weather", {"city": "Rome"}),
              ("c", "calculate", {"expression": "alert(1)"})),
        [{"content": "Fourteen, and sunny."}],
    )  # fmt: skip
    offer(page, "calculate", own=[WEATHER])
    page.fill(".composer textarea", "How much, and how is it in Rome?")
    page.keyboard.press("Enter")
    wait_until(lambda: page.locator(".message.tool").count() == 2)
    assert page.locator(".call-state").all_inner_texts() == [
        "called",
        "waits for you",
        "called",
    ]
    visit.shot("tools")
    page.get_by_label("Result of get_weather").fill("sunny, 24 °C")
    page.keyboard.press("Enter")
    wait_for_requests(page, asked, 2)
    chat.answer()
    assert chat.answers[-1] == "Fourteen, and sunny."
    assert [tool["function"]["name"] for tool in asked[0]["tools"]] == ["calculate", "get_weather"]
    assert asked[0]["tools"][1]["function"] == WEATHER and asked[0]["tool_choice"] == "auto"
    _, answer, *results = asked[1]["messages"]
    assert answer["content"] is None
    assert [call["id"] for call in answer["tool_calls"]] == ["a", "b", "c"]
    assert [result["tool_call_id"] for result in results] == ["a", "b", "c"]
    assert results[0]["content"] == "14" and results[1]["content"] == "sunny, 24 °C"
    assert results[2]["content"].startswith('Error: "alert" is not known')
    page.reload()
    assert len(Chat(page).answers) == 2
    message = page.locator(".message.tool").nth(2)
    message.hover()
    message.locator("[data-tool=edit]").click()
    page.fill(".editor textarea", "rain")
    page.keyboard.press("Enter")
    wait_for_requests(page, asked, 3)
    chat.answer()
    assert [m["content"] for m in asked[2]["messages"][3:4]] == ["rain"], "an edit is a branch"
    assert chat.branch("tool", 2) == "2/2"


def test_calls_that_nobody_answered_are_not_sent_and_none_run_on_for_ever(
    open_page: Callable[..., Any],
) -> None:
    visit = open_page()
    page, chat = visit.page, Chat(visit.page)
    asked = script(page, calls(("x", "random_integer", {"low": 1, "high": 1})))
    offer(page, "random_integer")
    page.fill(".composer textarea", "Go on and on.")
    page.keyboard.press("Enter")
    page.wait_for_selector(".call[data-state=pending]")
    assert 5 < len(asked) < 12
    page.unroute(COMPLETIONS)
    last = script(page, [{"content": "Enough."}])
    chat.send("Stop it.")
    assert chat.answers[-1] == "Enough."
    messages = last[0]["messages"]
    made = [call["id"] for message in messages for call in message.get("tool_calls", [])]
    assert len(made) == sum(message["role"] == "tool" for message in messages) == len(asked) - 1


def test_tools_that_cannot_be_sent_are_named(open_page: Callable[..., Any]) -> None:
    visit = open_page()
    page = visit.page
    Chat(page)
    state = page.locator(".tools-state")
    for own, problem in (
        ("[{", "no JSON"),
        ('[{"name": "a b"}]', "tool 1 needs a name"),
        ('[{"name": "x", "parameters": []}]', "must be a JSON Schema"),
        ('[{"name": "x"}, {"name": "x"}]', "two tools named x"),
    ):
        page.click(".panel [data-tab=tools]")
        page.fill(".own-tools", own)
        assert problem in state.inner_text()
        page.fill(".composer textarea", "Hello")
        page.keyboard.press("Enter")
        assert "The tools cannot be sent" in page.locator(".toast").inner_text()
    assert page.locator(".message").count() == 0
    page.click("text=Example")
    assert state.inner_text().startswith("Offered: get_weather")
