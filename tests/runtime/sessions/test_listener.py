"""Keys: who has them comes in, who has not is told so on both sides; and where none are needed."""

from __future__ import annotations

import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import torch
import zmq
from malformed_clients import Served
from waiting import PATIENCE_S

import stemma
from stemma.bench.serving.runners.ports import free_port
from stemma.errors import EngineError, InvalidRequest
from stemma.frontend.client.greeting import mechanism_of
from stemma.frontend.protocol.keys import client_keys, read_public, read_secret, write_pair
from stemma.runtime.sessions import clients as clients_module
from stemma.runtime.sessions.listener import Listener, ServerKeys


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """server.key, server.key_secret, alice.key_secret, clients/alice.key."""
    folder = tmp_path_factory.mktemp("keys")
    write_pair(folder, folder, "server")
    write_pair(folder, folder / "clients", "alice")
    write_pair(folder, folder, "mallory")
    return folder


@pytest.fixture(scope="module")
def served(checkpoint: Path, keys: Path) -> Iterator[Served]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    server_keys = ServerKeys.load(keys / "server.key_secret", keys / "clients")
    served = Served(checkpoint, keys, port=free_port(), keys=server_keys)
    yield served
    served.stop()
    torch.set_num_threads(num_threads)


@stemma.function
def program(s: stemma.ProgramState) -> None:
    s += "hello" + stemma.gen("x", max_tokens=3, temperature=0, ignore_eos=True)


def test_a_client_with_its_key_runs_programs_as_over_ipc(served: Served, keys: Path) -> None:
    with stemma.Runtime(served.endpoint) as local:
        expected = program.run(backend=local).text()
    with stemma.Runtime(served.tcp_endpoint, **_alice(keys)) as backend:
        assert program.run(backend=backend).text() == expected
    bare = {
        "server_key": read_public("server_key", keys / "server.key").decode(),
        "client_key": read_secret("client_key", keys / "alice.key_secret").decode(),
    }
    with stemma.Runtime(served.tcp_endpoint, **bare) as backend:
        assert program.run(backend=backend).text() == expected


@pytest.mark.parametrize(
    ("server_key", "client_key", "message"),
    [
        ("server.key", "mallory.key_secret", "refused client_key"),
        ("mallory.key", "alice.key_secret", "server_key is not its key"),
        (None, None, "one side has keys"),
    ],
)
def test_a_wrong_key_is_a_clear_error_after_a_short_while(
    served: Served, keys: Path, server_key: str | None, client_key: str | None, message: str
) -> None:
    options = {
        "server_key": keys / server_key if server_key else None,
        "client_key": keys / client_key if client_key else None,
    }
    with pytest.raises(EngineError, match=message):
        stemma.Runtime(served.tcp_endpoint, timeout_s=PATIENCE_S, **options)


@pytest.mark.parametrize(
    ("mechanism", "has_keys", "message"),
    [
        ("CURVE", False, "one side has keys .CURVE., this has none"),
        ("NULL", True, "one side has keys .CURVE., this has keys"),
        ("CURVE", True, "server_key is not its key"),
    ],
)
def test_a_runtime_that_hangs_up_before_it_has_said_why_is_asked(
    keys: Path, mechanism: str, has_keys: bool, message: str
) -> None:
    """As a busy one does: it reads all of the greeting before the rest of its own is sent."""
    options = _alice(keys) if has_keys else {}
    with _hanging_up(mechanism) as port, pytest.raises(EngineError, match=message):
        stemma.Runtime(f"tcp://127.0.0.1:{port}", timeout_s=PATIENCE_S, **options)


@pytest.mark.parametrize("has_keys", [False, True])
def test_a_runtime_behind_a_port_that_only_hangs_up_is_waited_for(
    keys: Path, has_keys: bool
) -> None:
    """As a forwarded port does until somebody listens behind it."""
    options = _alice(keys) if has_keys else {}
    with _hanging_up(None) as port:
        match = f"no runtime answered at tcp://127.0.0.1:{port} within 1 s"
        with pytest.raises(EngineError, match=match):
            stemma.Runtime(f"tcp://127.0.0.1:{port}", timeout_s=1.0, **options)


def test_a_greeting_names_the_mechanism(served: Served) -> None:
    assert mechanism_of(served.tcp_endpoint) == "CURVE"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        assert mechanism_of(f"tcp://127.0.0.1:{port}") == "NULL"
    for other in (f"tcp://127.0.0.1:{port}", served.endpoint, "tcp://a:1;b:2", "tcp://127.0.0.1:*"):
        assert mechanism_of(other) is None


def _alice(keys: Path) -> dict[str, Path]:
    return {"server_key": keys / "server.key", "client_key": keys / "alice.key_secret"}


@contextmanager
def _hanging_up(mechanism: str | None) -> Iterator[int]:
    """The port of a peer that hangs up when it has read a whole greeting; to one that is not sent
    whole it says what follows. None: it hangs up at once."""
    name = (mechanism or "").encode().ljust(20, b"\0")

    def answer(peer: socket.socket) -> None:
        if mechanism is None:
            return
        peer.settimeout(0.1)
        peer.sendall(b"\xff" + bytes(8) + b"\x7f\x03")
        told = b""
        with suppress(TimeoutError):
            while len(told) < 64 and (data := peer.recv(64)):
                told += data
        if len(told) < 64:
            peer.sendall(b"\0" + name + bytes(32))

    def serve() -> None:
        while True:
            peer, _ = listening.accept()
            with peer:
                if is_over.is_set():
                    return
                with suppress(OSError):
                    answer(peer)

    is_over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            is_over.set()
            socket.create_connection(listening.getsockname()).close()
            thread.join()


def test_a_client_may_be_added_while_the_server_runs(served: Served, keys: Path) -> None:
    write_pair(keys, keys / "clients", "bob")
    options = {**_alice(keys), "client_key": keys / "bob.key_secret"}
    with stemma.Runtime(served.tcp_endpoint, **options) as backend:
        assert program.run(backend=backend)["x"]


def test_a_key_that_opens_sessions_without_end_leaves_room_for_another(
    served: Served, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients_module, "MAX_CLIENTS", 8)
    write_pair(keys, keys / "clients", "carol")
    carol = {**_alice(keys), "client_key": keys / "carol.key_secret"}
    with ExitStack() as held:
        with pytest.raises(EngineError, match="of them yours"):
            for _ in range(5):
                held.enter_context(stemma.Runtime(served.tcp_endpoint, **_alice(keys)))
        with stemma.Runtime(served.tcp_endpoint, **carol) as backend:
            assert program.run(backend=backend)["x"]


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:5555", "tcp://192.0.2.1:5555", "tcp://*:5555"])
def test_beyond_this_host_both_sides_ask_for_keys(endpoint: str) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with pytest.raises(InvalidRequest, match="needs server_key and client_keys"):
        Listener(context, [endpoint], None)
    with pytest.raises(InvalidRequest, match="stemma keygen"):
        stemma.Runtime(endpoint)
    context.term()


def test_keys_that_are_none_or_missing_are_refused(keys: Path, tmp_path: Path) -> None:
    local = "tcp://127.0.0.1:5555"
    with pytest.raises(InvalidRequest, match="client_key is missing"):
        client_keys(local, keys / "server.key", None)
    with pytest.raises(InvalidRequest, match="server_key is missing"):
        client_keys(local, None, keys / "alice.key_secret")
    with pytest.raises(InvalidRequest, match=r"NAME\.key_secret"):
        client_keys(local, keys / "server.key", keys / "server.key")
    with pytest.raises(InvalidRequest, match="server_key='nothing'"):
        client_keys(local, "nothing", keys / "alice.key_secret")
    with pytest.raises(InvalidRequest, match="only tcp://"):
        client_keys("ipc://x", keys / "server.key", keys / "alice.key_secret")
    with pytest.raises(InvalidRequest, match="client_keys"):
        ServerKeys.load(keys / "server.key_secret", tmp_path)
    (tmp_path / "garbage.key").write_text("no certificate\n")
    with pytest.raises(InvalidRequest, match="client_keys"):
        ServerKeys.load(keys / "server.key_secret", tmp_path)


def test_secret_keys_are_for_their_owner_alone_and_never_replaced(tmp_path: Path) -> None:
    public, secret = write_pair(tmp_path, tmp_path / "public", "carol")
    assert stat.S_IMODE(secret.stat().st_mode) == stat.S_IMODE(public.stat().st_mode) == 0o600
    before = secret.read_text()
    with pytest.raises(InvalidRequest, match="carol"):
        write_pair(tmp_path, tmp_path / "public", "carol")
    assert secret.read_text() == before
    assert read_public("key", public) == zmq.curve_public(read_secret("key", secret))
