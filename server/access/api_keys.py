"""API keys: who owns each, what it may request, and where it is stored.

Only digests are stored, in memory as in the file. A key made by `stemma keygen --api` has 256
random bits, so its plain SHA-256 reveals nothing; a key that a person makes up is only as strong
as it is long. A lookup compares with every key, each in constant time.

The file is TOML with one table per key, and is read again when it changes:

    [alice]
    sha256 = "9f86d081..."
    requests_per_minute = 60
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ...errors import InvalidRequest
from ...frontend.protocol.numbers import MAX_REQUEST_PRIORITY

log = logging.getLogger(__name__)

PREFIX = "sk-stemma-"
MIN_KEY_CHARS = 16
MAX_KEY_CHARS = 512
LOOK_EVERY_S = 1.0  # how often the file is checked, when a request comes
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_KEY = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key and what it may request; None: no limit of its own."""

    name: str
    sha256: str
    tenant: str = ""  # whose share of the engine it uses and whose KV it shares; the key's name
    is_admin: bool = False  # under --isolate-cache: may see and change what belongs to others
    max_concurrent: int | None = None  # requests at a time
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and outputs
    max_priority: int | None = None  # that a request may ask for


def new_key() -> str:
    """A random key that cannot be guessed."""
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> str:
    """The digest that is stored for a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def file_entry(name: str, key: str) -> str:
    """The lines of a key file that admit `key`. Raises InvalidRequest for an unfit name."""
    return f'[{_checked_name(name)}]\nsha256 = "{digest_of(key)}"\n'


class KeyRing:
    """The keys of a server: those of its command line and those of its file.

    Raises InvalidRequest for a key that is too short, or a file that cannot be used. If the file
    becomes unusable later, the keys stay as they are and the log says so.
    """

    def __init__(
        self,
        given: Sequence[str] = (),
        path: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._given = [_given_key(number, key) for number, key in enumerate(given, 1)]
        self._path = path
        self._clock = clock
        self._looked_s = clock()
        self._stamp: object = None
        self._of_file: list[ApiKey] = []
        if path is not None:
            self._stamp = _stamp_of(path)
            self._of_file = read_keys(path)

    @property
    def is_used(self) -> bool:
        """Whether requests need a key; stays true when the file has no keys (any more)."""
        return bool(self._given) or self._path is not None

    def find(self, key: str) -> ApiKey | None:
        """The matching key; takes equally long whether one matches or not."""
        self._look_at_file()
        digest = digest_of(key)
        found = None
        for known in (*self._given, *self._of_file):
            if hmac.compare_digest(digest, known.sha256):
                found = known
        return found

    def _look_at_file(self) -> None:
        now = self._clock()
        if self._path is None or now - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now
        stamp = _stamp_of(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._of_file = read_keys(self._path)
        except InvalidRequest as error:
            log.error("%s; the keys that were there before go on to be accepted", error)
        else:
            log.warning("%s has changed: %d keys", self._path, len(self._of_file))


def read_keys(path: Path) -> list[ApiKey]:
    """The keys of a file. Raises InvalidRequest that says what is wrong, and never shows a key."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidRequest(f"api_keys: {path} cannot be read: {error}", "api_keys") from error
    keys = [_key_of(path, name, table) for name, table in tables.items()]
    if len({key.sha256 for key in keys}) < len(keys):
        raise InvalidRequest(f"api_keys: {path} has the same key under two names", "api_keys")
    return keys


def _key_of(path: Path, name: str, table: object) -> ApiKey:
    try:
        if not isinstance(table, Mapping):
            raise InvalidRequest.of("a key", name, "a table, [NAME]")
        return ApiKey(_checked_name(name), **_options(name, table))
    except InvalidRequest as error:
        raise InvalidRequest(f"api_keys: {path}: [{name}]: {error}", "api_keys") from error


def _options(name: str, table: Mapping[str, Any]) -> dict[str, Any]:
    known = [field.name for field in fields(ApiKey) if field.name != "name"]
    options: dict[str, Any] = {"tenant": name, **table}
    for option, value in options.items():
        if option not in known:
            raise InvalidRequest.of("option", option, f"one of {known}")
        _check_option(option, value)
    if "sha256" not in table:
        raise InvalidRequest("sha256 is missing: `stemma keygen --api` makes one", "sha256")
    return options


def _check_option(option: str, value: object) -> None:
    match option:
        case "sha256":
            is_fine = isinstance(value, str) and _DIGEST.fullmatch(value) is not None
            allowed, value = "64 hexadecimal digits in lower case", "..."
        case "tenant":
            is_fine = isinstance(value, str) and _NAME.fullmatch(value) is not None
            allowed = "up to 64 letters, digits, ._-"
        case "is_admin":
            is_fine, allowed = isinstance(value, bool), "true or false"
        case "max_priority":
            is_fine = type(value) is int and abs(value) <= MAX_REQUEST_PRIORITY
            allowed = f"an integer in [-{MAX_REQUEST_PRIORITY}, {MAX_REQUEST_PRIORITY}]"
        case _:
            is_fine = type(value) is int and 1 <= value <= 10**12
            allowed = "an integer of at least 1"
    if not is_fine:
        raise InvalidRequest.of(option, value, allowed)


def _given_key(number: int, key: str) -> ApiKey:
    if not MIN_KEY_CHARS <= len(key) <= MAX_KEY_CHARS or not _KEY.fullmatch(key):
        allowed = f"{MIN_KEY_CHARS} to {MAX_KEY_CHARS} ASCII characters without spaces"
        raise InvalidRequest.of("api_key", "...", f"{allowed} (`stemma keygen --api` makes one)")
    name = f"key-{number}"
    return ApiKey(name, digest_of(key), name)


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise InvalidRequest.of("name", name, "up to 64 letters, digits, ._-")
    return name


def _stamp_of(path: Path) -> object:
    """A value that changes when the file changes."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
