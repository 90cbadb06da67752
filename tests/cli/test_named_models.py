"""`--model NAME=MODEL`: what is a name, and what a path; which flags several models have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stemma.cli.model_specs import endpoints_beside
from stemma.cli.named_models import NamedModel, named_models
from stemma.errors import InvalidRequest
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL


def names(*given: str) -> list[tuple[str, str]]:
    return [(model.name, model.source) for model in named_models(given)]


def test_one_model_without_a_name_is_a_server_of_one(tmp_path: Path) -> None:
    odd = tmp_path / "a=b"
    odd.mkdir()
    assert names() == names("org/model") == names(str(tmp_path)) == names(str(odd)) == []
    assert names("/nowhere/a=b") == [], "a path that is not there, as ever"


def test_one_with_a_name_and_several_are_named(tmp_path: Path) -> None:
    odd = tmp_path / "a=b"
    odd.mkdir()
    assert names("a=org/model") == [("a", "org/model")]
    assert names(f"org/a={tmp_path}") == [("org/a", str(tmp_path))]
    assert names("a=b=c", "ü x=y/z") == [("a", "b=c"), ("ü x", "y/z")]
    assert names("org/model@main", str(odd)) == [("model", "org/model@main"), ("a=b", str(odd))]
    assert named_models(["a=x", "b=x"]) == [NamedModel("a", "x"), NamedModel("b", "x")]


@pytest.mark.parametrize(
    "given",
    [
        ("a=x", "a=y"),
        ("x/m", "y/m"),
        ("=x", "b=y"),
        ("a=", "b=y"),
        ("default=x", "b=y"),
        ("a:latest=x", "b=y"),
        (" a=x", "b=y"),
        ("a\nb=x", "b=y"),
        ("\udcff=x", "b=y"),
        ("a" * 257 + "=x", "b=y"),
    ],
)
def test_names_that_requests_could_not_use_are_refused(given: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest, match=r"^model="):
        named_models(given)


def test_each_model_has_an_address_beside_the_first_ones() -> None:
    assert endpoints_beside("ipc:///run/8000.ipc", 3) == [
        "ipc:///run/8000.ipc",
        "ipc:///run/8000-2.ipc",
        "ipc:///run/8000-3.ipc",
    ]
    assert endpoints_beside("ipc:///run.d/here", 2)[1] == "ipc:///run.d/here-2"
    assert endpoints_beside("tcp://[::1]:7000", 2)[1] == "tcp://[::1]:7001"
    for endpoint in ("tcp://127.0.0.1:65535", "tcp://127.0.0.1:*", "tcp://127.0.0.1:0"):
        with pytest.raises(InvalidRequest, match="the next port"):
            endpoints_beside(endpoint, 2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--replicas", "2"), "replicas: several models have one engine each"),
        (("--served-model-name", "x"), "NAME=MODEL names each"),
        (("--revision", "x"), "NAME/MODEL@REVISION"),
        (("--lora-paths", "x=y"), "adapters belong to one model"),
        (("--models-memory-gb", "0.2"), "model 'a': it takes 0.3"),
        (("--models-max", "0"), "models_max=0 is not allowed"),
        (("--model", "c=/nowhere", "--model-load-timeout-s", "0"), "model_load_timeout_s=0.0"),
    ],
)
def test_flags_that_do_not_go_with_several_models_are_one_clear_line(
    flags: tuple[str, ...], message: str
) -> None:
    command = [sys.executable, "-m", "stemma", "serve", "--port", "0"]
    command += ["--model", f"a={EMBEDDED_MODEL}", "--model", f"b={EMBEDDED_MODEL}", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and message in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
