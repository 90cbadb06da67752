"""The page's files: served as they lie in the package, with headers that let nothing else in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from stemma.server.generation.service import Service
from stemma.server.page import page
from stemma.server.settings import ServerSettings

ASSETS = Path(page.__file__).parent / "assets"
SINKS = r"\.(innerHTML|outerHTML|insertAdjacentHTML)\b|document\.write|\beval\(|new Function"


class NoEngine:
    """The page is served while no engine runs."""

    @property
    def connection(self) -> object:
        raise AssertionError("the page asked for the engine")


@pytest.fixture
def client() -> Iterator[TestClient]:
    app = FastAPI()
    app.include_router(page.router(Service(NoEngine(), ServerSettings())))  # type: ignore[arg-type]
    with TestClient(app) as client:
        yield client


def test_every_file_of_the_page_is_served_with_its_type_and_a_strict_policy(
    client: TestClient,
) -> None:
    paths = [path.relative_to(ASSETS).as_posix() for path in ASSETS.rglob("*.*")]
    assert "index.html" in paths and "chat/view.js" in paths
    for path in paths:
        answer = client.get(f"/assets/{path}")
        assert answer.status_code == 200, path
        assert answer.content == (ASSETS / path).read_bytes()
        assert answer.headers["content-type"].startswith(("text/", "image/svg+xml")), path
        policy = answer.headers["content-security-policy"]
        assert "default-src 'self'" in policy and "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert client.get("/").content == (ASSETS / "index.html").read_bytes()


def test_a_file_that_the_browser_has_is_not_sent_again(client: TestClient) -> None:
    etag = client.get("/assets/main.js").headers["etag"]
    again = client.get("/assets/main.js", headers={"if-none-match": f'W/{etag}, "other"'})
    assert again.status_code == 304 and again.content == b""
    assert client.get("/assets/main.js", headers={"if-none-match": '"other"'}).status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/assets/../page.py", "/assets/%2e%2e/page.py", "/assets/..%2fpage.py", "/assets/",
     "/assets//etc/passwd", "/assets/%2fetc%2fpasswd", "/assets/chat", "/assets/none.js"],
)  # fmt: skip
def test_nothing_but_the_files_of_the_page_is_served(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


def test_no_file_of_the_page_reaches_out_or_writes_markup() -> None:
    paths = [*ASSETS.rglob("*.*")]
    assert {path.suffix for path in paths} >= {".js", ".html", ".css"}
    for path in paths:
        text = path.read_text()
        hosts = set(re.findall(r"https?://([\w.-]+)", text)) - {"www.w3.org"}
        assert not hosts, f"{path.name}: {hosts}"
        if path.suffix == ".js":
            assert not re.search(SINKS, text), path.name
        if path.suffix == ".html":
            assert not re.search(r"<script>|\sstyle=|\son\w+=", text), path.name
