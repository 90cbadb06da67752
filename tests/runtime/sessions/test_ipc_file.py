"""Who may listen at an ipc path, and what is left of it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from stemma.errors import ProtocolError
from stemma.runtime.sessions.ipc_file import remove_leftovers
from stemma.runtime.sessions.listener import Listener


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        yield context


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "programs.ipc"


Context = zmq.Context[zmq.Socket[bytes]]


def listen(context: Context, path: Path) -> Listener:
    return Listener(context, [f"ipc://{path}"], None)


def test_an_address_that_is_listened_at_is_not_taken_over(context: Context, path: Path) -> None:
    first = listen(context, path)
    client = context.socket(zmq.DEALER)
    client.setsockopt(zmq.LINGER, 0)
    with pytest.raises(ProtocolError, match="another runtime listens there and holds"):
        listen(context, path)
    client.connect(f"ipc://{path}")
    client.send(b"still there")
    assert first.router.poll(60_000) and first.router.recv_multipart()[1] == b"still there"
    client.close()
    first.close(linger_ms=0)


def test_a_clean_stop_leaves_nothing_and_the_address_is_free(context: Context, path: Path) -> None:
    for _ in range(2):
        listen(context, path).close(linger_ms=0)
        assert list(path.parent.iterdir()) == []


def test_the_socket_of_one_who_died_is_replaced(context: Context, path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    path.with_name("programs.ipc.lock").touch()
    listen(context, path).close(linger_ms=0)
    assert list(path.parent.iterdir()) == []


def test_another_programs_socket_is_left_alone(context: Context, path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(ProtocolError, match="another process listens there"):
            listen(context, path)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_what_is_no_socket_is_refused_and_left_as_it_is(
    context: Context, path: Path, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    target = tmp_path_factory.mktemp("elsewhere") / "precious"
    target.write_text("precious")
    if kind == "link":
        path.symlink_to(target)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_text("precious")
    with pytest.raises(ProtocolError, match="no socket; remove it, or choose another"):
        listen(context, path)
    assert list(path.parent.iterdir()) == [path] and target.read_text() == "precious"


def test_a_lock_that_is_a_link_is_refused(context: Context, path: Path, tmp_path: Path) -> None:
    (tmp_path / "programs.ipc.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(ProtocolError, match="cannot listen"):
        listen(context, path)
    assert not (tmp_path / "victim").exists()


@pytest.mark.parametrize("endpoint", ["ipc://", "ipc:///"])
def test_an_endpoint_that_names_no_file_is_refused(context: Context, endpoint: str) -> None:
    with pytest.raises(ProtocolError, match="it names no file"):
        Listener(context, [endpoint], None)


def test_leftovers_of_the_dead_are_removed_and_the_living_keep_theirs(
    context: Context, path: Path
) -> None:
    living = listen(context, path)
    for name in ("dead.ipc", "dead.ipc.lock"):
        path.with_name(name).touch()
    remove_leftovers(path.parent)
    assert sorted(each.name for each in path.parent.iterdir()) == [path.name, f"{path.name}.lock"]
    living.close(linger_ms=0)


def test_an_abstract_name_has_no_file(context: Context) -> None:
    Listener(context, ["ipc://@stemma-test-abstract"], None).close(linger_ms=0)
