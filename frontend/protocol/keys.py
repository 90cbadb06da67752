"""The keys of CURVE, ZeroMQ's encryption: a pair for the runtime and one for each client.

A key is given as its 40 characters of Z85 or as the path of a certificate file as `zmq.auth` writes
them: `NAME.key` has a public key, `NAME.key_secret` both. A client knows the runtime's public key
and its own secret one; the runtime knows the public keys of its clients.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.auth

from ...errors import InvalidRequest

KEY_CHARS = 40
SECRET_MODE = 0o600
LOCAL_ADDRESSES = ("ipc://", "inproc://", "tcp://127.0.0.1:", "tcp://localhost:", "tcp://[::1]:")


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """A client's own keys, and the runtime key that it accepts."""

    server_public: bytes
    public: bytes
    secret: bytes


def is_local(endpoint: str) -> bool:
    """Whether only this host can reach the endpoint, so that keys are optional."""
    return endpoint.startswith(LOCAL_ADDRESSES)


def is_tcp(endpoint: str) -> bool:
    """Whether the peer may vanish without this host's kernel being told."""
    return endpoint.startswith("tcp://")


def client_keys(
    endpoint: str, server_key: str | Path | None, client_key: str | Path | None
) -> ClientKeys | None:
    """The keys for a connection to `endpoint`, None where it needs none.

    Raises InvalidRequest for an invalid or missing key.
    """
    if server_key is None and client_key is None:
        if not is_local(endpoint):
            raise InvalidRequest(
                f"endpoint={endpoint!r} is not on this host: it needs server_key (the runtime's "
                "public key) and client_key (this client's secret one); `stemma keygen` makes them",
                "server_key",
            )
        return None
    if server_key is None or client_key is None:
        missing = "server_key" if server_key is None else "client_key"
        raise InvalidRequest(f"{missing} is missing: a client needs both keys", missing)
    if not is_tcp(endpoint):
        raise InvalidRequest.of("server_key", str(server_key), "none: only tcp:// takes keys")
    secret = read_secret("client_key", client_key)
    return ClientKeys(read_public("server_key", server_key), zmq.curve_public(secret), secret)


def read_public(field: str, key: str | Path) -> bytes:
    """A public key. Raises InvalidRequest naming `field`."""
    return _bare(key) or _load(field, key)[0]


def read_secret(field: str, key: str | Path) -> bytes:
    """A secret key. Raises InvalidRequest naming `field`."""
    secret = _bare(key) or _load(field, key)[1]
    if secret is None:
        raise InvalidRequest.of(field, str(key), "a file with a secret key (NAME.key_secret)")
    return secret


def write_pair(folder: Path, public_folder: Path, name: str) -> tuple[Path, Path]:
    """Make a pair: NAME.key in `public_folder` and NAME.key_secret in `folder`, readable by its
    owner only. Raises InvalidRequest rather than replace a file."""
    public, secret = zmq.curve_keypair()
    paths = public_folder / f"{name}.key", folder / f"{name}.key_secret"
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    _write_new(paths[1], _certificate(public, secret))
    _write_new(paths[0], _certificate(public))
    return paths


def _bare(key: str | Path) -> bytes | None:
    """The key itself where `key` is one: Z85 has no white space and no file has such a name."""
    text = str(key)
    if isinstance(key, Path) or len(text) != KEY_CHARS or Path(text).exists():
        return None
    return text.encode("ascii", "replace")


def _load(field: str, path: str | Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        allowed = f"a key of {KEY_CHARS} characters or a certificate file ({error})"
        raise InvalidRequest.of(field, str(path), allowed) from error
    return public, secret


def _certificate(public: bytes, secret: bytes | None = None) -> str:
    lines = ["metadata", "curve", f'    public-key = "{public.decode()}"']
    if secret is not None:
        lines.append(f'    secret-key = "{secret.decode()}"')
    return "\n".join(lines) + "\n"


def _write_new(path: Path, text: str) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, SECRET_MODE)
    except OSError as error:
        raise InvalidRequest.of("out", str(path), f"a file that can be made ({error})") from error
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
