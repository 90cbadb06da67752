"""Rates, the queue and the rules of browsers, by a clock that the test holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from stemma.server.access.api_keys import ApiKey
from stemma.server.access.cors import BrowserRules
from stemma.server.access.load import Capacity, Load, Ticket
from stemma.server.access.rates import WINDOW_S, KeyUsage
from stemma.server.access.route_access import RouteAccess, door_of
from stemma.server.protocol.failures import Refusal

STEPS = some.lists(some.tuples(some.floats(0, 30), some.integers(0, 500)), max_size=60)


@given(limit=some.integers(1, 40), steps=STEPS)
def test_no_more_requests_begin_than_a_bucket_held_and_has_got_since(
    limit: int, steps: list[tuple[float, int]]
) -> None:
    usage = KeyUsage(ApiKey("k", "", requests_per_minute=limit), 0.0)
    now = 0.0
    for begun, (seconds, _) in enumerate(steps, 1):
        now += seconds
        try:
            usage.begin(now)
        except Refusal as refusal:
            assert refusal.status_code == 429 and refusal.kind == "requests"
            wait_s = float((refusal.headers or {})["retry-after-ms"]) / 1e3
            now += wait_s + 0.002  # whoever comes when he is told to is let in
            usage.begin(now)
        assert begun <= limit + now * limit / WINDOW_S + 1e-6
        assert usage.headers()["x-ratelimit-limit-requests"] == str(limit)


@given(limit=some.integers(1, 1000), steps=STEPS)
def test_tokens_are_made_up_for_before_the_next_request(
    limit: int, steps: list[tuple[float, int]]
) -> None:
    usage = KeyUsage(ApiKey("k", "", tokens_per_minute=limit), 0.0)
    now = used = 0.0
    for seconds, num_tokens in steps:
        now += seconds
        room = limit + now * limit / WINDOW_S - used  # at most: a full bucket runs over
        try:
            usage.begin(now)
        except Refusal as refusal:
            assert refusal.kind == "tokens" and used > 0, "who has used nothing is let in"
        else:
            assert room >= 1 - 1e-6
            usage.charge(num_tokens, now)
            used += num_tokens


def test_a_key_runs_so_many_requests_at_a_time_and_a_change_of_limits_forgets_nothing() -> None:
    key = ApiKey("k", "", max_concurrent=2, requests_per_minute=10)
    usage = KeyUsage(key, 0.0)
    usage.begin(0.0)
    usage.begin(0.0)
    with pytest.raises(Refusal, match="2 requests at a time"):
        usage.begin(0.0)
    usage.end()
    usage.begin(0.0)
    usage.take_limits(ApiKey("k", "", max_concurrent=9, requests_per_minute=5), 0.0)
    assert usage.headers()["x-ratelimit-remaining-requests"] == "5"
    usage.take_limits(ApiKey("k", "", max_concurrent=9), 0.0)
    assert usage.headers() == {} and usage.num_running == 2


def test_a_full_queue_says_when_there_is_room_by_the_rate_of_what_has_ended() -> None:
    now = [100.0]
    load = Load(clock=lambda: now[0])
    tickets = [Ticket(load) for _ in range(10)]
    for ticket in tickets:
        ticket.take(2, Capacity(20, 0))
    late = Ticket(load)
    with pytest.raises(Refusal) as caught:
        late.take(1, Capacity(20, 0))
    assert caught.value.status_code == 429 and caught.value.code == "queue_full"
    assert (caught.value.headers or {})["retry-after"] == "1"
    for ticket in tickets[:4]:  # two samples a second
        now[0] += 1.0
        load.note_end()
        load.note_end()
        ticket.release()
    late.take(8, Capacity(20, 0))
    with pytest.raises(Refusal) as caught:
        Ticket(load).take(16, Capacity(20, 0))
    assert (caught.value.headers or {})["retry-after"] == "6"  # 16 * 3 s / 8
    late.release()
    late.release()
    for ticket in tickets:
        ticket.release()
    assert load.num_samples == 0


LOOPBACK = BrowserRules.of("127.0.0.1", (), ("https://chat.example",), has_keys=False)
KEYED = BrowserRules.of("0.0.0.0", (), (), has_keys=True)
PROXIED = BrowserRules.of("127.0.0.1", ("llm.example",), (), has_keys=False)


@pytest.mark.parametrize(
    ("rules", "method", "host", "origin", "site", "is_fine"),
    [
        (LOOPBACK, "POST", "127.0.0.1:8000", None, None, True),  # curl
        (LOOPBACK, "POST", "localhost:8000", "http://localhost:8000", "same-origin", True),
        (LOOPBACK, "POST", "[::1]:8000", "http://[::1]:8000", "same-origin", True),
        (LOOPBACK, "POST", "127.0.0.1:8000", "https://evil.example", "cross-site", False),
        (LOOPBACK, "POST", "127.0.0.1:8000", None, "cross-site", False),
        (LOOPBACK, "POST", "127.0.0.1:8000", "null", "cross-site", False),
        (LOOPBACK, "POST", "127.0.0.1:8000", "http://127.0.0.1:9999", "same-site", False),
        (LOOPBACK, "POST", "127.0.0.1:8000", "https://chat.example", "cross-site", True),
        (LOOPBACK, "POST", "evil.example", "http://evil.example", "same-origin", False),
        (LOOPBACK, "GET", "evil.example", None, "same-origin", False),  # DNS rebinding
        (LOOPBACK, "GET", "127.0.0.1.evil.example", None, None, False),
        (LOOPBACK, "GET", "127.0.0.1:8000", None, "cross-site", True),  # a link was followed
        (LOOPBACK, "GET", "127.0.0.1:8000", "https://evil.example", "cross-site", False),
        (LOOPBACK, "GET", "LOCALHOST.:80", None, None, True),
        (PROXIED, "POST", "LLM.example", "https://llm.example", "same-origin", True),
        (PROXIED, "POST", "other.example", None, None, False),
        (KEYED, "POST", "llm.example", "https://llm.example", "same-origin", True),
        (KEYED, "POST", "llm.example", "https://evil.example", "cross-site", False),
    ],
)
def test_only_pages_that_may_reach_the_server(
    rules: BrowserRules, method: str, host: str, origin: str | None, site: str | None, is_fine: bool
) -> None:
    is_open = method == "GET"  # the page, say
    if is_fine:
        rules.check([host], origin, site, is_open=is_open)
        return
    with pytest.raises(Refusal) as caught:
        rules.check([host], origin, site, is_open=is_open)
    assert caught.value.status_code == 403


def test_every_host_that_is_named_must_be_fine() -> None:
    with pytest.raises(Refusal):
        LOOPBACK.check(["127.0.0.1", "evil.example"], None, None, is_open=True)


@pytest.mark.parametrize(
    ("method", "path", "door"),
    [
        ("GET", "/health", RouteAccess.OPEN),
        ("GET", "/", RouteAccess.OPEN),
        ("HEAD", "/assets/main.js", RouteAccess.OPEN),
        ("POST", "/health", RouteAccess.KEY),
        ("POST", "/assets/x", RouteAccess.KEY),
        ("GET", "/v1/models", RouteAccess.KEY),
        ("GET", "/openapi.json", RouteAccess.KEY),
        ("GET", "/never/heard/of", RouteAccess.KEY),
        ("GET", "/metrics", RouteAccess.ADMIN),
        ("GET", "/metrics/", RouteAccess.ADMIN),
        ("POST", "/flush_cache", RouteAccess.ADMIN),
    ],
)
def test_what_nobody_has_opened_needs_a_key(method: str, path: str, door: RouteAccess) -> None:
    assert door_of(method, path, is_metrics_open=False) is door
    if path == "/metrics":
        assert door_of(method, path, is_metrics_open=True) is RouteAccess.OPEN
