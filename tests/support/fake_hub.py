"""A Hugging Face hub on this machine: the few endpoints that its client uses to fetch a model."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants as hub_constants
import pytest

COMMIT = "c0ffee" + "0" * 34
OLDER_COMMIT = "decade" + "0" * 34


class FakeHub(ThreadingHTTPServer):
    """`models`: files by model; all have the revisions main and v1. `gated` ones need a token."""

    daemon_threads = True

    def __init__(self, models: dict[str, dict[str, bytes]], gated: frozenset[str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models = models
        self.gated = gated
        self.fetched: list[str] = []  # files whose contents were sent, as "commit/name"
        self.num_bytes_sent = 0  # of files
        self.tokens: set[str | None] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, has_body: bool) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        token = self.headers.get("Authorization")
        if parts[:2] == ["api", "models"] and len(parts) >= 6:
            repo, action, revision = "/".join(parts[2:4]), parts[4], parts[5]
        elif len(parts) >= 5 and parts[2] == "resolve":
            repo, action, revision = "/".join(parts[:2]), "resolve", parts[3]
        else:
            return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        files = self.server.models.get(repo)
        if files is None:
            return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        if repo in self.server.gated:
            self.server.tokens.add(token)
            if token is None:
                return self._send(401, b"", {"X-Error-Code": "GatedRepo"})
        commit = {"main": COMMIT, "v1": OLDER_COMMIT}.get(revision, revision)
        if commit not in (COMMIT, OLDER_COMMIT):
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        if action == "revision":
            siblings = [{"rfilename": name} for name in files]
            return self._send_json({"id": repo, "sha": commit, "siblings": siblings})
        if action == "tree":
            folder = "".join(f"{part}/" for part in parts[6:])
            return self._send_json(
                [{"type": "file", "path": name, "size": len(files[name]), "oid": name}
                 for name in files if name.startswith(folder)]
            )  # fmt: skip
        name = "/".join(parts[4:])
        if name not in files:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        about = {"X-Repo-Commit": commit, "ETag": f'"{abs(hash(files[name]))}"'}
        status, body = 200, files[name]
        if asked := self.headers.get("Range"):
            first, last = map(int, asked.removeprefix("bytes=").split("-"))
            status, body = 206, body[first : last + 1]
            about["Content-Range"] = f"bytes {first}-{first + len(body) - 1}/{len(files[name])}"
        if has_body:
            self.server.fetched.append(f"{commit}/{name}")
            self.server.num_bytes_sent += len(body)
        self._send(status, body, about, has_body)

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], has_body: bool = True
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if has_body:
            self.wfile.write(body)


@contextmanager
def fake_hub(
    models: dict[str, dict[str, bytes]], gated: frozenset[str] = frozenset()
) -> Iterator[FakeHub]:
    """A hub with these models, running until the end of the block or an earlier stop."""
    hub = FakeHub(models, gated)
    thread = threading.Thread(target=hub.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()


def ask_only(hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point this process's client at this hub, with a cache in `folder` and no token."""
    monkeypatch.setattr(hub_constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(hub_constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(folder / "cache"))
    monkeypatch.setattr(hub_constants, "HF_TOKEN_PATH", str(folder / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
