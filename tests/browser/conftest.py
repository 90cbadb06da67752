"""A real browser on a real `stemma serve`. Where playwright or a browser is missing, these tests
are skipped and say so; STEMMA_BROWSER names a browser that is somewhere else.

Screenshots of what was tested stay in build/browser/.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from waiting import PATIENCE_S, wait_until

import stemma

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

SHOTS = Path(stemma.__file__).parent / "build" / "browser"
BROWSERS = ("/usr/bin/chromium", "chromium", "chromium-browser", "google-chrome")
BROWSER_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SERVE_FLAGS = ("--max-total-tokens", "32768", "--num-threads", "1")  # the browser needs a core too
WAIT_MS = 120_000  # for anything on the page: for what hangs alone


@dataclass(frozen=True)
class Served:
    """A running `stemma serve`."""

    url: str
    process: subprocess.Popen[bytes]

    @property
    def engine_pid(self) -> int:
        """Of the engine's process that runs now."""
        listed = subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
        )
        rows = [line.split(None, 2) for line in listed.stdout.splitlines()]
        mine = [row for row in rows if int(row[1]) == self.process.pid]
        (pid,) = [int(pid) for pid, _, args in mine if "stemma.runtime" in args]
        return pid

    def num_aborted(self) -> int:
        """Requests that the engine has ended because nobody wanted them any more."""
        metrics = httpx.get(f"{self.url}/metrics", timeout=PATIENCE_S).text
        found = re.search(r'\nstemma_requests_total\{.*finish_reason="abort".*\} (\d+)', metrics)
        assert found, metrics
        return int(found[1])


@pytest.fixture(scope="session")
def browser_path() -> str:
    """Of the browser; asked for before anything is started in vain."""
    return _browser_path()


@pytest.fixture(scope="session")
def page_server(tmp_path_factory: pytest.TempPathFactory, browser_path: str) -> Iterator[Served]:
    """One server for all tests of the page."""
    folder = tmp_path_factory.mktemp("page")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "stemma", "serve", "--port", str(port)]
    command += ["--endpoint", f"ipc://{folder}/page.ipc", *SERVE_FLAGS]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        served = Served(f"http://127.0.0.1:{port}", process)
        wait_until(lambda: process.poll() is not None or _is_healthy(served.url))
        assert process.poll() is None, (folder / "log").read_text()
        yield served
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


@pytest.fixture(scope="module")
def browser(browser_path: str) -> Iterator[Browser]:
    """One a module: while it runs, its driver's event loop is the main thread's, and other tests
    start loops of their own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=BROWSER_FLAGS)
        yield browser
        browser.close()


@dataclass
class Visit:
    """A page that a visitor has opened, and what it did that nobody sees."""

    page: Page
    url: str
    complaints: list[str] = field(default_factory=list)  # errors and warnings of the console
    foreign: list[str] = field(default_factory=list)  # requests to anywhere but the server
    may_complain: bool = False

    def watch(self) -> None:
        """Begin to note."""
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.complaints.append(f"thrown: {error}"))
        self.page.on("request", self._on_request)

    def _on_console(self, message: object) -> None:
        if getattr(message, "type") in ("error", "warning"):  # noqa: B009 (a type of playwright's)
            self.complaints.append(getattr(message, "text"))  # noqa: B009

    def _on_request(self, request: object) -> None:
        address = str(getattr(request, "url"))  # noqa: B009
        if not address.startswith((self.url, "data:", "blob:")):
            self.foreign.append(address)

    def shot(self, name: str) -> None:
        """Keep a picture of what is seen."""
        SHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SHOTS / f"{name}.png", animations="disabled")


@pytest.fixture
def open_page(browser: Browser, page_server: Served) -> Iterator[Callable[..., Visit]]:
    """Opens pages, each for a new visitor; in the end none has complained or asked elsewhere."""
    visits: list[Visit] = []
    contexts: list[BrowserContext] = []

    def open_one(
        path: str = "/", *, width: int = 1280, height: int = 800, scheme: str = "light"
    ) -> Visit:
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if scheme == "dark" else "light",
        )
        contexts.append(context)
        context.set_default_timeout(WAIT_MS)
        visit = Visit(context.new_page(), page_server.url)
        visit.watch()
        visits.append(visit)
        visit.page.goto(page_server.url + path)
        return visit

    yield open_one
    for context in contexts:
        context.close()
    for visit in visits:
        assert visit.foreign == []
        assert visit.may_complain or visit.complaints == []


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=PATIENCE_S).status_code == 200
    except httpx.TransportError:
        return False


def _browser_path() -> str:
    """Skips the test where there is no browser, or nothing to drive it with."""
    pytest.importorskip("playwright.sync_api", reason="needs pip install 'stemma-lm[browser]'")
    names = (os.environ.get("STEMMA_BROWSER"), *BROWSERS)
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium or Chrome was found; STEMMA_BROWSER may name one")
    return found
