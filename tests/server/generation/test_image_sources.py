"""What an image's URL may reach: nothing but what the settings name, and no private address."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from stemma.errors import InvalidRequest
from stemma.frontend.protocol.chat_message import Message
from stemma.frontend.protocol.ir import GenParams
from stemma.server.generation import image_sources as module
from stemma.server.generation.image_sources import ImageSources, is_public
from stemma.server.protocol.task import Task
from stemma.server.settings import ServerSettings

Answer = Callable[[httpx.Request], httpx.Response]
PUBLIC = "93.184.216.34"


def asked(url: str, answer: Answer | None = None, **settings: Any) -> str:
    """The data URL that a chat with this image becomes."""
    transport = None if answer is None else httpx.MockTransport(answer)
    sources = ImageSources(ServerSettings(**settings), transport)
    message = Message("user", "Hi", images=((0, url),))
    task = asyncio.run(sources.resolved(Task([[message]], GenParams())))
    (prompt,) = task.prompts
    ((_, found),) = prompt[0].images  # type: ignore[union-attr]
    return str(found)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What names stand for."""
    known = {"pictures.example": [PUBLIC], "cdn.example": ["2606:2800:220:1::1"]}

    async def getaddrinfo(_: object, host: str, port: int, **__: object) -> list[Any]:
        if host not in known:
            raise socket.gaierror(8, "no such name")
        return [(2, 1, 6, "", (address, port)) for address in known[host]]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    return known


def test_bytes_are_fetched_from_the_address_that_was_judged(names: dict[str, list[str]]) -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, stream=httpx.ByteStream(b"bytes"))

    found = asked("https://pictures.example/a.png?x=1", answer, image_hosts=("pictures.example",))
    assert base64.b64decode(found.partition(",")[2]) == b"bytes"
    (request,) = seen
    assert request.url.host == PUBLIC and request.headers["host"] == "pictures.example"
    assert request.extensions["sni_hostname"] == "pictures.example"
    assert not {"authorization", "cookie"} & set(request.headers)


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.9.9", "169.254.169.254", "0.0.0.0", "::1",
     "fe80::1", "fc00::1", "fec0::1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::",
     "100.64.0.1",
     "224.0.0.1", "ff02::1", "255.255.255.255", "2001:db8::1"],
)  # fmt: skip
def test_a_name_that_stands_for_a_private_address_is_refused(
    names: dict[str, list[str]], address: str
) -> None:
    assert not is_public(ipaddress.ip_address(address))
    names["pictures.example"] = [PUBLIC, address]
    with pytest.raises(InvalidRequest, match="public addresses"):
        asked("http://pictures.example/", _never, image_hosts=("pictures.example",))


def _never(request: httpx.Request) -> httpx.Response:
    raise AssertionError(f"{request.url} was asked")


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://other.example/a.png", "of hosts"),
        ("http://pictures.example.evil.example/", "of hosts"),
        ("http://pictures.example@evil.example/", "of hosts"),
        ("http://user:pass@pictures.example/", "of hosts"),
        ("http://pictures.example:8080/", "without a port"),
        ("http://127.0.0.1/", "of hosts"),
        ("http://[::1]/", "of hosts"),
        ("http://2130706433/", "of hosts"),
        ("ftp://pictures.example/", "a URL: data"),
        ("gopher://pictures.example/", "a URL: data"),
        ("javascript:alert(1)", "a URL: data"),
        ("//pictures.example/a.png", "a URL: data"),
        ("http:///a.png", "of hosts"),
        ("http://[bad/", "could not be fetched"),
        ("file:///etc/passwd", "no files are read here"),
    ],
)
def test_other_places_are_refused(names: dict[str, list[str]], url: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        asked(url, _never, image_hosts=("pictures.example",))


def test_nothing_is_fetched_unless_hosts_are_named() -> None:
    with pytest.raises(InvalidRequest, match="--image-host"):
        asked("https://pictures.example/a.png", _never)


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        ("http://127.0.0.1:8000/flush_cache", "of hosts"),
        ("http://evil.example/", "of hosts"),
        ("file:///etc/passwd", "of hosts"),
        ("http://cdn.example:9/", "without a port"),
        ("/again", "more than 3 redirects"),
    ],
)
def test_each_redirect_is_judged(names: dict[str, list[str]], place: str, problem: str) -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(302, headers={"location": place})

    hosts = ("pictures.example", "cdn.example")
    with pytest.raises(InvalidRequest, match=problem):
        asked("http://pictures.example/", answer, image_hosts=hosts)


def test_a_redirect_to_another_named_host_is_followed(names: dict[str, list[str]]) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.headers["host"] == "cdn.example":
            return httpx.Response(200, stream=httpx.ByteStream(b"there"))
        return httpx.Response(301, headers={"location": "https://cdn.example/b"})

    hosts = ("pictures.example", "cdn.example")
    found = asked("http://pictures.example/", answer, image_hosts=hosts)
    assert base64.b64decode(found.partition(",")[2]) == b"there"


def test_what_is_too_large_slow_or_not_there_is_refused(names: dict[str, list[str]]) -> None:
    hosts = {"image_hosts": ("pictures.example",)}

    def large(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=httpx.ByteStream(b"x" * 20_000))

    async def silent(_: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(InvalidRequest, match="--max-image-mb"):
        asked("http://pictures.example/", large, max_image_mb=0.01, **hosts)
    with pytest.raises(InvalidRequest, match=r"more than 0\.1 s"):
        asked("http://pictures.example/", silent, image_timeout_s=0.1, **hosts)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="status 404"):
        asked("http://pictures.example/", lambda _: httpx.Response(404), **hosts)
    del names["pictures.example"]
    with pytest.raises(InvalidRequest, match="gaierror"):
        asked("http://pictures.example/", _never, **hosts)


def test_images_of_a_prompt_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_IMAGE_CHARS", 1000)
    with pytest.raises(InvalidRequest, match="at most 1000 characters"):
        asked(f"data:image/png;base64,{'A' * 1000}")
    with pytest.raises(InvalidRequest, match="--max-image-mb"):
        asked(f"data:image/png;base64,{'A' * 2000}", max_image_mb=0.001)


def test_a_file_behind_a_link_out_of_the_root_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "pictures"
    root.mkdir()
    (root / "a b.png").write_bytes(b"here")
    (tmp_path / "secret").write_bytes(b"there")
    (root / "link").symlink_to(tmp_path / "secret")
    found = asked(f"file://{root}/a%20b.png", image_root=str(root))
    assert base64.b64decode(found.partition(",")[2]) == b"here"
    for path in ("link", "../secret", "%2e%2e/secret", "", "no", "a b.png\0"):
        with pytest.raises(InvalidRequest, match="within --image-root"):
            asked(f"file://{root}/{path}", image_root=str(root))
    with pytest.raises(InvalidRequest, match="within --image-root"):
        asked(f"file://elsewhere{root}/a.png", image_root=str(root))
