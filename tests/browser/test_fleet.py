"""The watch view of several engines in a real browser: all at a glance, one of them in detail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from server_process import ServerProcess
from waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Page

LIVE = ".watch[data-live=true]"
VIEW = "document.querySelector('.watch').watch"
SHELVES = ("novels", "maps", "letters")
SYSTEM = "You keep a small library by the sea and answer its readers in plain sentences. "
# Cells of a row that stand where another one does.
OVERLAPS = """[...document.querySelectorAll(".replica")].flatMap((row) => {
  const cells = [...row.querySelectorAll(".cell > span, .name, .pool")];
  const boxes = cells.map((cell) => cell.getBoundingClientRect());
  return cells.filter((_, i) => boxes.some((box, j) => j > i && box.left < boxes[i].right - 1
    && boxes[i].left < box.right - 1 && box.top < boxes[i].bottom - 4
    && boxes[i].top < box.bottom - 4)).map((cell) => cell.textContent);
})"""


@pytest.fixture(scope="module")
def page_server(
    tmp_path_factory: pytest.TempPathFactory, browser_path: str
) -> Iterator[ServerProcess]:
    """Of two engines, in place of the one of other modules."""
    flags = ("--replicas", "2", "--placement", "round_robin", "--num-threads", "1")
    with ServerProcess(tmp_path_factory.mktemp("fleet"), *flags) as server:
        server.wait_healthy()
        yield server


@pytest.fixture
def load(page_server: ServerProcess) -> Iterator[None]:
    """Requests that share prefixes, from several clients, until the test ends."""
    is_over = threading.Event()

    def client(number: int) -> None:
        turn = 0
        while not is_over.is_set():
            shelf = SHELVES[(number + turn) % len(SHELVES)]
            prompt = f"{SYSTEM}Shelf: {shelf}. Reader {number}, turn {turn}:"
            body = {"prompt": prompt, "max_tokens": 64, "temperature": 0.7, "ignore_eos": True}
            reply = httpx.post(f"{page_server.url}/v1/completions", json=body, timeout=PATIENCE_S)
            assert reply.status_code == 200, reply.text
            turn += 1

    threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    yield
    is_over.set()
    for thread in threads:
        thread.join()


def value(page: Page, expression: str) -> Any:
    return page.evaluate(f"(() => {{ const view = {VIEW}; return {expression}; }})()")


def wait_for(page: Page, expression: str) -> None:
    wait_until(lambda: bool(value(page, expression)))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1360, 860), (390, 844)])
def test_all_replicas_are_shown_and_one_of_them_is_chosen(
    open_page: Callable[..., Any], load: None, scheme: str, width: int, height: int
) -> None:
    visit = open_page("/#/watch", width=width, height=height, scheme=scheme)
    page = visit.page
    page.wait_for_selector(LIVE)
    rows = page.locator(".replica")
    wait_for(page, "view.fleet.replicas.length === 2 && view.model.users.size > 1")
    wait_for(page, "view.fleet.replicas.every((told) => told.rates.output_tokens > 0)")
    wait_for(page, "view.fleet.replicas.every((told) => told.rates.hit_rate > 0)")
    wait_for(page, "view.model.steps.length > 40")
    assert rows.count() == 2 and page.locator(".fleet .headline").inner_text().startswith("2 of 2")
    assert [row.get_attribute("aria-pressed") for row in rows.all()] == ["true", "false"]
    text = " ".join(rows.nth(1).inner_text().split())
    for said in ("Replica 1", "ready", "call", "program", "held", "of 32,768", "hits", "tokens/s"):
        assert said in text, text
    assert page.evaluate("document.scrollingElement.scrollWidth") <= width
    assert value(page, "view.fleet.list.scrollWidth <= view.fleet.list.clientWidth")
    assert value(page, OVERLAPS) == []
    clipped = "[...view.fleet.list.querySelectorAll('.cell, .name')].filter((cell) => "
    clipped += "cell.scrollWidth > cell.clientWidth + 1).length"
    assert value(page, clipped) == 0
    visit.shot(f"fleet-{width}-{scheme}")
    run = value(page, "view.model.run")
    rows.nth(1).click()
    wait_for(page, f"view.model.replica === 1 && view.model.run !== '{run}'")
    assert page.url.endswith("#/watch/1")
    assert [row.get_attribute("aria-pressed") for row in rows.all()] == ["false", "true"]
    wait_for(page, "view.model.nodes.size > 3")
    page.go_back()
    wait_for(page, f"view.model.replica === 0 && view.model.run === '{run}'")


def test_a_replica_that_leaves_is_seen_to_come_back(
    open_page: Callable[..., Any], page_server: ServerProcess
) -> None:
    visit = open_page("/#/watch/1", width=1360, height=860)
    page = visit.page
    page.wait_for_selector(LIVE)
    assert value(page, "view.model.replica") == 1
    run = value(page, "view.model.run")
    answer = httpx.post(f"{page_server.url}/restart_replica?replica=1", timeout=PATIENCE_S)
    assert answer.status_code == 200
    wait_for(page, "view.fleet.replicas[1].num_restarts === 1")
    wait_for(page, f"view.model.isLive && view.model.run !== '{run}'")
    assert value(page, "view.model.replica") == 1
    assert page.locator(".replica .is-restarts").nth(1).inner_text() == "1 restart"


def test_many_replicas_in_any_state_keep_to_their_lines(open_page: Callable[..., Any]) -> None:
    visit = open_page("/#/watch", width=1360, height=860)
    page = visit.page
    page.wait_for_selector(LIVE)
    wait_for(page, "view.fleet.replicas.length === 2")
    value(page, "view.aborter.abort()")
    page.evaluate(
        """(states) => {
          const { watch } = document.querySelector(".watch");
          const [told] = watch.fleet.replicas;
          watch.takeFleet({ replicas: states.map((state, number) => ({
            ...told, replica: number, state, num_calls: 12345, num_programs: 6789,
            ...(state === "lost" || state === "starting"
              ? { total_tokens: undefined, why: "the engine was killed by signal 9" } : {}),
          })) });
        }""",
        ["ready", "leaving", "lost", "starting", "stopped", *["ready"] * 7],
    )
    assert page.locator(".replica").count() == 12
    heights = value(page, "[...document.querySelectorAll('.replica')].map((r) => r.offsetHeight)")
    assert max(heights) - min(heights) <= 2
    assert "signal 9" in page.locator(".replica").nth(2).inner_text()
    visit.shot("fleet-many")
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.scrollingElement.scrollWidth") <= 390
    assert value(page, OVERLAPS) == []
    visit.shot("fleet-many-phone")
