"""API keys: what a file may say, what is found by a key, and what a file that changes does."""

from __future__ import annotations

import argparse
import hmac
import os
from pathlib import Path

import pytest

from stemma.cli.parser import run_command
from stemma.errors import InvalidRequest
from stemma.server.access import api_keys
from stemma.server.access.api_keys import KeyRing, file_entry, new_key, read_keys
from stemma.server.settings import ServerSettings, add_server_flags, server_settings

GIVEN = "a-key-of-the-command-line"


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_a_key_is_found_by_itself_alone_and_kept_as_a_digest(tmp_path: Path) -> None:
    key = new_key()
    path = write(tmp_path / "keys", file_entry("alice", key) + "max_concurrent = 3\n")
    ring = KeyRing([GIVEN], path)
    found = ring.find(key)
    assert found is not None and (found.name, found.max_concurrent) == ("alice", 3)
    assert found.tenant == "alice" and not found.is_admin
    assert (other := ring.find(GIVEN)) is not None and other.name == "key-1"
    assert ring.find(key[:-1]) is None and ring.find("") is None
    assert ring.find("\udc00") is None  # what no header can hold, but a caller may
    assert key not in path.read_text() and GIVEN not in repr(vars(ring))


def test_each_key_is_compared_in_constant_time_whether_it_is_found_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [new_key() for _ in range(5)]
    entries = "".join(file_entry(f"k{index}", key) for index, key in enumerate(keys))
    ring = KeyRing((), write(tmp_path / "keys", entries))
    compared: list[str] = []

    def compare(a: str, b: str) -> bool:
        compared.append(b)
        return a == b

    monkeypatch.setattr(hmac, "compare_digest", compare)
    for key in (keys[0], keys[4], "nobody's"):
        compared.clear()
        ring.find(key)
        assert len(compared) == 5


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[a", "cannot be read"),
        ("a = 3", "a table"),
        ('["a b"]\nsha256 = "' + "0" * 64 + '"', "name='a b'"),
        ("[a]\n", "sha256 is missing"),
        ('[a]\nsha256 = "abc"', "64 hexadecimal"),
        ('[a]\nsha256 = "' + "0" * 64 + '"\nrate = 3', "option='rate'"),
        ('[a]\nsha256 = "' + "0" * 64 + '"\nmax_concurrent = 0', "max_concurrent=0"),
        ('[a]\nsha256 = "' + "0" * 64 + '"\nis_admin = 1', "is_admin=1"),
        ('[a]\nsha256 = "' + "0" * 64 + '"\ntenant = "x/y"', "tenant='x/y'"),
        ('[a]\nsha256 = "' + "0" * 64 + '"\nmax_priority = 10000', "max_priority"),
        ("".join(file_entry(name, GIVEN) for name in "ab"), "under two names"),
    ],
)
def test_a_file_that_says_what_it_cannot_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match="api_keys") as caught:
        read_keys(write(tmp_path / "keys", text))
    assert reason in str(caught.value)


def test_a_changed_file_is_read_again_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    now = [0.0]
    first, second = new_key(), new_key()
    path = write(tmp_path / "keys", file_entry("one", first))
    ring = KeyRing((), path, clock=lambda: now[0])

    def change(text: str) -> None:
        fresh = write(tmp_path / "fresh", text)
        os.replace(fresh, path)
        now[0] += api_keys.LOOK_EVERY_S

    change(file_entry("two", second))
    assert ring.find(first) is None, "a key that was taken out is out"
    assert (found := ring.find(second)) is not None and found.name == "two"
    change("[broken")
    assert ring.find(second) is not None
    path.unlink()
    now[0] += api_keys.LOOK_EVERY_S
    assert ring.find(second) is not None and ring.is_used
    change("")
    assert ring.find(second) is None and ring.is_used, "no keys: nobody comes in"


@pytest.mark.parametrize("key", ["", "short", "with space in it here", "ключ-ключ-ключ-ключ"])
def test_a_key_that_could_be_guessed_or_not_be_sent_is_refused(key: str) -> None:
    with pytest.raises(InvalidRequest, match="api_key"):
        KeyRing([key])


def test_keygen_prints_a_key_and_the_lines_that_let_it_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["keygen", "--api", "--client", "bob"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    key = next(line for line in lines if line.startswith(api_keys.PREFIX))
    at = lines.index("[bob]")
    ring = KeyRing((), write(tmp_path / "keys", "\n".join(lines[at : at + 2])))
    assert (found := ring.find(key)) is not None and found.name == "bob"


# --- settings -------------------------------------------------------------------------------------


def settings_of(*flags: str) -> ServerSettings:
    parser = argparse.ArgumentParser()
    add_server_flags(parser)
    return server_settings(parser.parse_args(flags))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "example.org"])
def test_beyond_this_host_a_key_is_needed(host: str) -> None:
    with pytest.raises(InvalidRequest, match="outside this host"):
        settings_of("--host", host)
    assert settings_of("--host", host, "--insecure").insecure
    assert settings_of("--host", host, "--api-key", GIVEN).has_keys
    assert settings_of("--host", host, "--api-keys", "file").has_keys


def test_keys_and_origins_are_repeatable_and_the_environment_has_one_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert settings_of().api_key == () and not settings_of().has_keys
    monkeypatch.setenv("STEMMA_API_KEY", "one-of-the-environment")
    settings = settings_of("--api-key", GIVEN, "--api-key", GIVEN * 2, "--cors-origin", "null://x")
    assert settings.api_key == (GIVEN, GIVEN * 2, "one-of-the-environment")
    assert settings.cors_origins == ("null://x",) and GIVEN not in repr(settings)
    assert settings_of("--api-key", GIVEN).api_key[0] == GIVEN, "no default is changed by another"


@pytest.mark.parametrize(
    "flags",
    [
        ("--isolate-cache",),
        ("--cors-origin", "*"),
        ("--cors-origin", "https://a.example/"),
        ("--cors-origin", "a.example"),
        ("--max-body-mb", "0"),
        ("--max-body-mb", "nan"),
        ("--max-tokens-limit", "0"),
        ("--max-queued-requests", "-1"),
    ],
)
def test_flags_that_make_no_sense_are_refused_by_name(flags: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest, match=flags[0].strip("-").replace("-", "_")):
        settings_of(*flags)
