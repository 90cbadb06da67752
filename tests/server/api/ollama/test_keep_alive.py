"""`keep_alive` as Ollama's clients write it."""

from __future__ import annotations

import pytest

from stemma.server.api.ollama.keep_alive import (
    FOREVER,
    asks_to_unload,
    seconds_of,
    told_in,
    unloaded_answer,
)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        (0, 0.0),
        ("0", 0.0),
        ("-0", 0.0),
        (1.5, 1.5),
        (300, 300.0),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("1.5h", 5400.0),
        ("+.5s", 0.5),
        ("1500ms", 1.5),
        ("2500µs", 0.0025),
        (-1, FOREVER),
        ("-1s", FOREVER),
        ("-1m", FOREVER),
        (10**300, FOREVER),
        ("9999999999999999h", FOREVER),
    ],
)
def test_seconds_and_durations(value: object, seconds: float | None) -> None:
    assert seconds_of(value) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "value", ["", "5", "m", "5 m", "5x", "-", "1..5s", "٣s", "1s" * 33, True, [1], {"s": 1}]
)
def test_what_is_no_duration_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="allowed: seconds, or a duration as '5m'"):
        seconds_of(value)
    assert told_in("/api/chat", {"keep_alive": value}) is None


def test_only_ollamas_endpoints_are_heeded() -> None:
    assert told_in("/api/embed", {"keep_alive": "5m"}) == 300
    assert told_in("/v1/chat/completions", {"keep_alive": "5m"}) is None
    assert told_in("/api/chat", ["keep_alive"]) is None


@pytest.mark.parametrize(
    ("path", "body", "asks"),
    [
        ("/api/generate", {"model": "a", "keep_alive": 0}, True),
        ("/api/generate", {"model": "a:latest", "keep_alive": "0s", "prompt": ""}, True),
        ("/api/chat", {"model": "a", "keep_alive": 0, "messages": []}, True),
        ("/api/chat", {"model": "a", "keep_alive": 0, "messages": [{}]}, False),
        ("/api/generate", {"model": "a", "keep_alive": 0, "prompt": "Hi"}, False),
        ("/api/generate", {"model": "a", "keep_alive": 1}, False),
        ("/api/generate", {"model": "a"}, False),
        ("/api/generate", {"model": "a:adapter", "keep_alive": 0}, False),
        ("/api/embed", {"model": "a", "keep_alive": 0}, False),
    ],
)
def test_nothing_to_say_and_no_time_to_stay_asks_to_unload(
    path: str, body: dict[str, object], asks: bool
) -> None:
    assert asks_to_unload(path, body, "a") is asks


def test_the_answer_is_that_of_the_endpoint() -> None:
    assert unloaded_answer("/api/generate", "a")["response"] == ""
    assert unloaded_answer("/api/chat", "a")["message"] == {"role": "assistant", "content": ""}
