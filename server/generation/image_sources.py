"""Where a request's images come from: its own bytes, a folder of this host, other hosts.

The engine takes bytes alone, as data URLs. Without settings nothing else is read: a file must lie
within the folder that is named, and a host be in the list. What a name stands for is looked up once
and judged before it is connected to, so that no request reaches this host's own services or others
that only it can reach; so is each place that a server sends us on to.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import socket
import ssl
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import httpx

from ...errors import InvalidRequest
from ...frontend.protocol.chat_message import Message
from ..protocol.task import Prompt, Task
from ..settings import ServerSettings

MAX_REDIRECTS = 3
# Of all images of a prompt, in base64: a frame of the wire holds 16 MiB.
MAX_IMAGE_CHARS = 15 * 1024 * 1024
_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class ImageSources:
    """Reads what the settings allow. Lifetime: the application's."""

    def __init__(
        self, settings: ServerSettings, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        """`transport`: what connects; the network unless given."""
        self._root = None if settings.image_root is None else Path(settings.image_root).resolve()
        self._hosts = frozenset(host.lower() for host in settings.image_hosts)
        self._timeout_s = settings.image_timeout_s
        self._max_bytes = int(settings.max_image_mb * 1e6)
        self._transport = transport

    async def resolved(self, task: Task) -> Task:
        """The task with the bytes of its images in place of what names them. Raises
        InvalidRequest."""
        if not any(_images_of(prompt) for prompt in task.prompts):
            return task
        prompts = [await self._of_prompt(prompt) for prompt in task.prompts]
        return replace(task, prompts=prompts)

    async def _of_prompt(self, prompt: Prompt) -> Prompt:
        if not _images_of(prompt):
            return prompt
        messages = [message for message in prompt if isinstance(message, Message)]
        return await self.with_bytes(messages)

    async def with_bytes(self, chat: Sequence[Message]) -> list[Message]:
        """The same of a chat alone. Raises InvalidRequest."""
        messages: list[Message] = []
        num_chars = 0
        for message in chat:
            images = []
            for place, url in message.images:
                images.append((place, await self._data_url(url)))
                num_chars += len(images[-1][1])
                if num_chars > MAX_IMAGE_CHARS:
                    allowed = f"at most {MAX_IMAGE_CHARS} characters of base64 in a prompt"
                    raise InvalidRequest.of("image_url", f"{num_chars} characters", allowed)
            messages.append(message._replace(images=tuple(images)))
        return messages

    async def _data_url(self, url: str) -> str:
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "data":
            self._require_size(len(url) * 3 // 4)
            return url
        if scheme == "file":
            data = await asyncio.to_thread(self._read_file, url)
        elif scheme in _PORTS:
            data = await self._fetch(url)
        else:
            raise InvalidRequest.of("image_url", url[:100], "a URL: data:, https:, http: or file:")
        return f"data:image/*;base64,{base64.b64encode(data).decode()}"

    def _require_size(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            allowed = f"at most {self._max_bytes} bytes (--max-image-mb)"
            raise InvalidRequest.of("image_url", f"{num_bytes} bytes", allowed)

    # --- files ------------------------------------------------------------------------------------

    def _read_file(self, url: str) -> bytes:
        """Of a file within the root, links followed before it is judged."""
        if self._root is None:
            raise InvalidRequest("image_url: no files are read here (--image-root)", "image_url")
        outside = InvalidRequest.of("image_url", url[:100], "a file within --image-root")
        try:
            parts = urlsplit(url)
            path = Path(url2pathname(parts.path)).resolve()
            if parts.netloc or not path.is_relative_to(self._root) or not path.is_file():
                raise outside
            self._require_size(path.stat().st_size)
            with path.open("rb") as file:
                data = file.read(self._max_bytes + 1)
        except (OSError, ValueError):
            raise outside from None
        self._require_size(len(data))
        return data

    # --- other hosts ------------------------------------------------------------------------------

    async def _fetch(self, url: str) -> bytes:
        if not self._hosts:
            allowed = "a data URL: no images are fetched here (--image-host)"
            raise InvalidRequest.of("image_url", url[:100], allowed)
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._client() as client,
            ):
                for _ in range(1 + MAX_REDIRECTS):
                    found = await self._ask(client, url)
                    if isinstance(found, bytes):
                        return found
                    url = found
        except InvalidRequest:
            raise
        except TimeoutError:
            raise _unreached(url, f"it took more than {self._timeout_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            raise _unreached(url, type(error).__name__) from None
        raise _unreached(url, f"more than {MAX_REDIRECTS} redirects")

    def _client(self) -> httpx.AsyncClient:
        """Its own connections, so that none is used for another name than it was opened for."""
        return httpx.AsyncClient(
            trust_env=False, verify=self._certificates, transport=self._transport
        )

    @cached_property
    def _certificates(self) -> ssl.SSLContext:
        """Read once: it takes tens of milliseconds, on the server's loop."""
        return httpx.create_ssl_context(trust_env=False)

    async def _ask(self, client: httpx.AsyncClient, url: str) -> bytes | str:
        """The bytes, or where they are instead. The address that was judged is the one that is
        connected to; the name stays that of the request and of the certificate."""
        parts = urlsplit(url)
        host = (parts.hostname or "").lower()
        port = parts.port or _PORTS.get(parts.scheme, 0)
        if parts.scheme not in _PORTS or host not in self._hosts or parts.username is not None:
            raise InvalidRequest.of("image_url", url[:100], f"of hosts {sorted(self._hosts)}")
        if port != _PORTS[parts.scheme]:
            raise InvalidRequest.of("image_url", url[:100], "without a port")
        address = await public_address(host, port)
        target = httpx.URL(url).copy_with(host=str(address))
        headers = {"host": host, "accept": "image/*", "accept-encoding": "identity"}
        extensions = {"sni_hostname": host, "timeout": httpx.Timeout(self._timeout_s).as_dict()}
        request = client.build_request("GET", target, headers=headers, extensions=extensions)
        response = await client.send(request, stream=True, follow_redirects=False)
        try:
            if response.status_code in _REDIRECTS and "location" in response.headers:
                return str(httpx.URL(url).join(response.headers["location"]))
            if response.status_code != 200:
                raise _unreached(url, f"status {response.status_code}")
            data = bytearray()
            async for chunk in response.aiter_raw():
                data += chunk
                self._require_size(len(data))
            return bytes(data)
        finally:
            await response.aclose()


async def public_address(host: str, port: int) -> Address:
    """An address of the host. Raises InvalidRequest if any of its addresses is not public."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
    if not addresses or not all(map(is_public, addresses)):
        raise InvalidRequest.of("image_url", host[:100], "a host with public addresses alone")
    return addresses[0]


def is_public(address: Address) -> bool:
    """Whether it is of the internet; what an IPv6 address stands for in IPv4 is judged, too."""
    if isinstance(address, ipaddress.IPv6Address):
        inner: Sequence[ipaddress.IPv4Address | None] = [
            address.ipv4_mapped, address.sixtofour, *(address.teredo or ())
        ]  # fmt: skip
        if address in _NAT64:
            inner = [*inner, ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)]
        if not all(is_public(each) for each in inner if each is not None):
            return False
        if address.is_site_local:  # deprecated, and routed within a site alone where it is in use
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def _images_of(prompt: Prompt) -> bool:
    if not prompt or not isinstance(prompt[0], Message):  # a long text, or many ids
        return False
    return any(isinstance(message, Message) and message.images for message in prompt)


def _unreached(url: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"image_url: {url[:100]!r} could not be fetched: {why}", "image_url")
