"""The watch view in a real browser: what it shows is what the engine says, and it stays smooth."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from waiting import PATIENCE_S, wait_until
from watch_events import large_state

if TYPE_CHECKING:
    from playwright.sync_api import Page

LIVE = ".watch[data-live=true]"
VIEW = "document.querySelector('.watch').watch"
MOVE_ABOUT = """async () => {
  const { tree } = document.querySelector(".watch").watch;
  const intervals = [];
  let before = performance.now();
  for (let turn = 0; turn < 60; turn++) {
    tree.pan((turn % 7) - 3, 2);
    tree.zoom(turn < 30 ? 1.03 : 0.97);
    await new Promise((resolve) => requestAnimationFrame(resolve));
    intervals.push(performance.now() - before);
    before = performance.now();
  }
  return intervals;
}"""
# Where a corner of the pool shows that no pinned tip covers: [x, y] in the window.
UNCOVERED_CELL = """(() => {
  const canvas = document.querySelector(".pool-cells canvas");
  const { left, right, top, bottom } = canvas.getBoundingClientRect();
  const corners = [left + 3, right - 3].flatMap((x) => [[x, top + 3], [x, bottom - 3]]);
  return corners.find(([x, y]) => document.elementFromPoint(x, y) === canvas);
})()"""
NOTE_TEXTS = """
  window.painted = [];
  const paint = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
    window.painted.push(text);
    return paint.call(this, text, ...place);
  };
"""
SHELVES = ("novels", "maps", "letters")
SYSTEM = "You keep a small library by the sea and answer its readers in plain sentences. "


def ask(url: str, prompt: str, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 64, "temperature": 0.7, "ignore_eos": True, **fields}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def empty_cache(url: str) -> None:
    """Flush it until nothing is left: what requests use stays, and a page that was closed a moment
    ago has left some that are about to be aborted."""

    def is_empty() -> bool:
        assert httpx.post(f"{url}/flush_cache", timeout=PATIENCE_S).status_code == 200
        info = httpx.get(f"{url}/server_info", timeout=PATIENCE_S).json()
        return bool(info.get("engine", info)["cached_tokens"] == 0)

    wait_until(is_empty)


@pytest.fixture
def load(page_server: Any) -> Iterator[None]:
    """Requests that share prefixes, from several clients, until the test ends."""
    is_over = threading.Event()

    def client(number: int) -> None:
        turn = 0
        while not is_over.is_set():
            shelf = SHELVES[(number + turn) % len(SHELVES)]
            ask(page_server.url, f"{SYSTEM}Shelf: {shelf}. Reader {number}, turn {turn}:")
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
    """NOTE: not the page's wait_for_function, which evals and so is refused by the page's CSP."""
    wait_until(lambda: bool(value(page, expression)))


def number_in(page: Page, selector: str) -> int:
    return int(page.locator(selector).inner_text().replace(",", ""))


def place_of(page: Page, node: str) -> tuple[float, float]:
    """Where on the page the dot of a node is."""
    found = value(
        page,
        f"(() => {{ const node = {node}; const box = view.tree.canvas.getBoundingClientRect();"
        " const at = view.tree.at(node); return [box.left + at.x, box.top + at.y]; })()",
    )
    return found[0], found[1]


def settled(page: Page) -> None:
    """Wait until nothing on the tree moves any more."""
    wait_for(page, "view.tree.frame === undefined")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_engine_is_shown_at_work(
    open_page: Callable[..., Any], load: None, scheme: str
) -> None:
    visit = open_page("/#/watch", width=1440, height=900, scheme=scheme)
    page = visit.page
    page.wait_for_selector(LIVE)
    wait_for(page, "view.model.users.size > 3 && view.model.rates.decode_tokens > 0")
    wait_for(page, "view.model.steps.length > 100 && view.model.history.decode.length > 8")
    page.wait_for_selector(".requests li .progress")
    visit.shot(f"watch-{scheme}")
    tip = page.locator(".tip:not(.is-pinned)")
    trunk = "[...view.model.nodes.values()].find((node) => node.parent !== null && node.x)"

    def is_explained() -> bool:  # the tree moves while it grows
        page.mouse.move(*place_of(page, trunk))
        return tip.is_visible() and "tokens" in tip.inner_text()

    wait_until(is_explained)
    page.mouse.move(5, 5)
    is_lit = "view.tree.lit !== null && view.lit.request.node === [...view.tree.lit].pop()"

    def request_is_explained() -> bool:  # one may end just then
        page.evaluate("document.querySelector('.requests li[tabindex]')?.focus()")
        return bool(value(page, is_lit)) and tip.is_visible() and "Request" in tip.inner_text()

    wait_until(request_is_explained)
    page.locator(".timeline-canvas").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert tip.inner_text().startswith("Step ")
    page.keyboard.press("Escape")
    assert not tip.is_visible()


def test_numbers_are_those_of_server_info(open_page: Callable[..., Any], page_server: Any) -> None:
    visit = open_page("/#/watch")
    page = visit.page
    page.wait_for_selector(LIVE)
    for shelf in SHELVES:
        ask(page_server.url, f"{SYSTEM}What is new among the {shelf}?", max_tokens=8)
    info = httpx.get(f"{page_server.url}/server_info", timeout=PATIENCE_S).json()
    info = info.get("engine", info)
    cached = info["cached_tokens"]
    wait_for(page, f"view.model.engine.cached_tokens === {cached}")
    assert number_in(page, ".headline span:nth-child(2) b") == cached
    assert number_in(page, ".pool-facts [data-kind=free] b") == info["free_tokens"]
    assert number_in(page, ".pool-facts [data-kind=cached] b") == info["evictable_tokens"]
    wait_for(page, "view.model.nodes.size > 3")
    shown = "[...view.model.nodes.values()].reduce((sum, node) => sum + node.tokens, 0)"
    wait_for(page, f"{shown} === {cached}")
    squares = "view.pool.owners.filter((owner) => owner !== 0).length"
    wait_for(page, f"{squares} * view.model.pool.pages_per_cell >= {cached}")  # every second look
    assert value(page, squares) <= cached
    settled(page)
    page.fill(".tools input", "new among the")
    page.wait_for_selector(".found:not(:empty)")
    assert "found" in page.locator(".found").inner_text()
    page.fill(".tools input", "")
    leaf = "[...view.model.nodes.values()].find((node) => node.text.includes('maps'))"
    page.mouse.click(*place_of(page, leaf))
    pinned = page.locator(".tip.is-pinned")
    pinned.wait_for()
    assert "maps" in pinned.inner_text() and "Cached" in pinned.inner_text()
    page.mouse.move(*value(page, UNCOVERED_CELL))  # beside it, not instead
    page.locator(".tip:not(.is-pinned)").wait_for()
    assert pinned.is_visible()
    page.locator(".tree-canvas").focus()
    page.keyboard.press("ArrowLeft")
    assert value(page, "view.tree.pinned.id") == value(page, f"{leaf}.parent")
    page.keyboard.press("Escape")
    assert not pinned.is_visible()
    page.mouse.click(*place_of(page, leaf))
    pinned.locator(".close").click()
    assert not pinned.is_visible()


def test_an_empty_cache_offers_a_demo_that_fills_it(
    open_page: Callable[..., Any], page_server: Any
) -> None:
    empty_cache(page_server.url)
    visit = open_page("/#/watch", width=390, height=844)
    page = visit.page
    page.wait_for_selector(LIVE)
    page.locator(".empty .demo").click()
    wait_for(page, "view.model.nodes.size > 12 && view.model.users.size > 2")
    assert not page.locator(".empty").is_visible()
    assert page.evaluate("document.scrollingElement.scrollWidth") <= 390
    visit.shot("watch-phone")


def test_labels_on_a_phone_name_who_speaks(open_page: Callable[..., Any], page_server: Any) -> None:
    empty_cache(page_server.url)
    messages = [{"role": "user", "content": "Hi, my name is Nora. I live in Bergen."}]
    for question in ("What is my name?", "Where do I live?"):
        turns = [*messages, {"role": "assistant", "content": "Hello."}]
        body = {"messages": [*turns, {"role": "user", "content": question}], "max_tokens": 8}
        reply = httpx.post(f"{page_server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
        assert reply.status_code == 200, reply.text
    visit = open_page("/#watch", width=390, height=844)
    page = visit.page
    page.add_init_script(NOTE_TEXTS)
    page.reload()
    page.wait_for_selector(LIVE)
    begins = """painted.includes("User: ")
        && painted.some((text) => text.startsWith("Hi, my name is"))"""
    wait_until(lambda: page.evaluate(begins))
    settled(page)
    painted = page.evaluate("painted")
    assert not [text for text in painted if "<|" in text]
    visit.shot("watch-phone-labels")
    page.mouse.click(
        *place_of(page, "[...view.model.nodes.values()].find((n) => n.text.includes('Nora'))")
    )
    assert "User: Hi, my name" in page.locator(".tip.is-pinned .tip-text").inner_text()


def test_two_thousand_nodes_are_drawn_frame_by_frame(open_page: Callable[..., Any]) -> None:
    visit = open_page("/#/watch", width=1440, height=900)
    page = visit.page
    page.wait_for_selector(LIVE)
    value(page, "view.aborter.abort()")
    for number in range(2):
        state = json.dumps(large_state(2000, seed=number, run=f"made up {number}"))
        page.evaluate(f"{VIEW}.take({state})")
    assert value(page, "view.tree.layout.order.length") == 2000
    for shape in ("rows", "round"):
        page.locator(f"button[data-shape={shape}]").click()
        page.wait_for_timeout(600)
        value(page, "view.tree.frameTimes.splice(0)")
        intervals = sorted(page.evaluate(MOVE_ABOUT))
        page.locator("button.fit").click()
        times = sorted(value(page, "view.tree.frameTimes"))
        page.wait_for_timeout(400)
        visit.shot(f"watch-2000-{shape}")
        assert len(times) >= 60
        print(
            f"{shape}: a frame takes {times[len(times) // 2]:.1f} ms, at most {times[-1]:.1f} ms; "
            f"one every {intervals[len(intervals) // 2]:.1f} ms"
        )


def test_an_engine_that_is_gone_is_said_to_be_gone(open_page: Callable[..., Any]) -> None:
    visit = open_page("/#/watch")
    page = visit.page
    page.wait_for_selector(LIVE)
    down = b'event: engine\ndata: {"state": "down", "reason": "it is being started again"}\n\n'
    page.route(
        "**/watch",
        lambda route: route.fulfill(body=down, headers={"content-type": "text/event-stream"}),
    )
    page.goto(f"{visit.url}/#/chat")
    page.wait_for_selector(LIVE, state="detached")  # or the view, with its stream, just stays
    page.goto(f"{visit.url}/#/watch")
    outage = page.locator(".outage")
    outage.wait_for()
    wait_until(lambda: "started again" in outage.inner_text())
    page.unroute("**/watch")
    page.wait_for_selector(LIVE)
    assert not outage.is_visible()


def test_those_who_want_no_motion_get_none(open_page: Callable[..., Any], page_server: Any) -> None:
    visit = open_page("/#/chat")
    visit.page.emulate_media(reduced_motion="reduce")
    visit.page.goto(f"{visit.url}/#/watch")
    page = visit.page
    page.wait_for_selector(LIVE)
    ask(page_server.url, f"{SYSTEM}Does anything move?", max_tokens=4)
    wait_for(page, "[...view.model.nodes.values()].some((n) => n.text.includes('anything'))")
    time.sleep(0.1)
    still = "[...view.model.nodes.values()].every((n) => n.x === n.depth && n.y === n.breadth)"
    assert value(page, still)


def test_assets_are_modules_without_libraries() -> None:
    import stemma

    folder = Path(stemma.__file__).parent / "server/page/assets/watch"
    paths = [*folder.glob("*.js")]
    assert paths
    for path in paths:
        text = path.read_text(encoding="utf-8")
        assert "innerHTML" not in text and "http://" not in text and "https://" not in text, path
